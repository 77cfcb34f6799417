"""Tiny models, what can be asked for of their layouts, as arguments, and a case of both."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.needs import why_no_compiler

LLAMA = """
--num-layers 4 --hidden-size 64 --num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 128
--seq-length 32 --micro-batch-size 1 --global-batch-size 4 --train-iters 3 --lr 2e-3
--vocab-size 500 --make-vocab-size-divisible-by 64 --mock-data --normalization RMSNorm --swiglu
--disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights
--hidden-dropout 0 --attention-dropout 0 --eval-iters 1 --num-workers 0 --clip-grad 0.5
--lr-decay-style constant --init-method-std 0.1
"""
# Documents of a few tokens, several a sequence, which are kept apart.
SHORT_DOCUMENTS = "short_document"
APART = (
    LLAMA.replace(
        "--mock-data", f"--data-path {SHORT_DOCUMENTS} --tokenizer-type NullTokenizer --split 4,1,0"
    )
    + "--reset-attention-mask --reset-position-ids --eod-mask-loss"
)
# Conversations, of which the answers are learned.
TALKS, CHAT_TOKENIZER = "talks.jsonl", "chat_tokenizer"
SFT = LLAMA.replace(
    "--mock-data",
    f"--sft --data-path {TALKS} --tokenizer-type HuggingFaceTokenizer "
    f"--tokenizer-path {CHAT_TOKENIZER} --split 4,1 --seq-length 128 "
    "--make-vocab-size-divisible-by 32",
).replace("--vocab-size 500", "")
LORA = SFT + "--peft-type lora --lora-dim 4 --lora-alpha 16 --lr 2e-2"
# Of layers that are several of Hugging Face's, some parts alone.
LORA_PARTS = LORA + " --lora-target-modules q_proj v_proj o_proj up_proj --weight-decay 0.1"
TIED = LLAMA.replace("--untie-embeddings-and-output-weights", "")
# What tensor parallel sizes 2 and 3 both divide.
BY_SIX = (
    TIED
    + """--hidden-size 96 --num-attention-heads 6 --num-query-groups 6 --ffn-hidden-size 192
--seq-length 36"""
)
GPT2 = """
--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1
--global-batch-size 4 --train-iters 3 --lr 2e-3 --vocab-size 500 --mock-data --qk-layernorm
--make-vocab-size-divisible-by 64 --hidden-dropout 0 --attention-dropout 0 --eval-iters 1
--num-workers 0 --lr-decay-style constant --init-method-std 0.1
"""
MOE = (
    LLAMA
    + """
--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-token-dispatcher-type alltoall
--moe-router-load-balancing-type none
"""
)
BALANCED = MOE.replace("none", "aux_loss --moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 1e-3")
GROWING = BALANCED.replace("--train-iters 3", "--train-samples 8 --rampup-batch-size 2 2 4")
EVERY_LOSS = MOE.replace(
    "none",
    """aux_loss seq_aux_loss global_aux_loss
--moe-aux-loss-coeff 0.03 0.05 0.02 --moe-z-loss-coeff 1e-2 --moe-shared-expert-intermediate-size 64
""",
)
BERT = """
--family bert --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32
--micro-batch-size 1 --global-batch-size 4 --train-iters 3 --lr 2e-3 --vocab-size 500 --mock-data
--make-vocab-size-divisible-by 64 --hidden-dropout 0 --attention-dropout 0 --eval-iters 1
--num-workers 0 --lr-decay-style constant --init-method-std 0.1
"""
ROTARY_BERT = (
    BERT
    + """--position-embedding-type rope --untie-embeddings-and-output-weights --swiglu
--disable-bias-linear --normalization RMSNorm --num-query-groups 2 --ffn-hidden-size 128
"""
)
BERT_MOE = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64"
GEMMA = (
    TIED.replace("--swiglu", "--gated-linear-unit --openai-gelu")
    + """--layernorm-zero-centered-gamma --sandwich-norm --scale-embeddings --qk-layernorm
--window-size 6 0 --window-attn-skip-freq 2 --window-rotary-base 100 --softmax-scale 0.2
--attn-logit-softcapping 2 --final-logit-softcapping 5
"""
)
LATENT = (
    LLAMA.replace("--num-query-groups 2", "")
    + """--multi-latent-attention --q-lora-rank 24 --kv-lora-rank 12 --qk-head-dim 12
--qk-pos-emb-head-dim 4 --v-head-dim 10 --qk-layernorm --rotary-scaling-factor 4 --mscale-all-dim 1
--original-max-position-embeddings 8
"""
)
# Widths that 8-bit products take, of a rank of two as well.
LATENT_BF16 = (
    LATENT
    + """--bf16 --q-lora-rank 32 --kv-lora-rank 48 --qk-head-dim 16 --qk-pos-emb-head-dim 16
--v-head-dim 16
"""
)
LATENT_LORA = LATENT + "--peft-type lora --lora-dim 4 --lora-alpha 16 --lr 2e-2"
LATENT_MOE = (
    LATENT
    + """--num-experts 8 --moe-router-topk 4 --moe-ffn-hidden-size 32 --moe-layer-freq [0]+[1]*3
--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none
--moe-shared-expert-intermediate-size 32 --moe-router-score-function sigmoid
--moe-router-enable-expert-bias --moe-router-num-groups 4 --moe-router-group-topk 2
--moe-router-topk-scaling-factor 2.5 --moe-router-dtype fp32
"""
)
LATENT_MOE_LORA = LATENT_MOE + "--peft-type lora --lora-dim 4 --lora-alpha 16 --lr 2e-2"
# Layers that predict further tokens.
MTP = APART + " --mtp-num-layers 2 --mtp-loss-scaling-factor 0.3"
MTP_LORA = MTP + " --peft-type lora --lora-dim 4 --lora-alpha 16 --lr 4e-3"
MTP_TIED = TIED + "--mtp-num-layers 1"
MTP_MOE = LATENT_MOE.replace(
    "load-balancing-type none",
    "load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.01 --mtp-num-layers 1",
)
DOCUMENTS = f"--data-path {SHORT_DOCUMENTS} --tokenizer-type NullTokenizer --split 4,1,0"
GEMMA_APART = GEMMA.replace("--mock-data", f"{DOCUMENTS} --reset-attention-mask --eod-mask-loss")
GEMMA_APART += "--reset-position-ids"
LATENT_APART = LATENT.replace("--mock-data", f"{DOCUMENTS} --reset-attention-mask --eod-mask-loss")
BF16 = LLAMA + "--bf16"
FP16 = LLAMA + "--fp16 --initial-loss-scale 4096"
BY_SEQUENCE = BALANCED.replace("aux_loss --", "seq_aux_loss --")
DROPPING = LLAMA + "--hidden-dropout 0.1 --attention-dropout 0.1"
FP16_1 = FP16 + " --hysteresis 1"

TP2, PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
MBS2, MBS3 = "--micro-batch-size 2", "--micro-batch-size 3 --global-batch-size 6"
PER_TOKEN = "--calculate-per-token-loss"
CP2 = "--context-parallel-size 2"
EP2 = "--expert-model-parallel-size 2"
SP = TP2 + " --sequence-parallel"
HIDDEN = "--tp-comm-overlap"
VPP2 = PP2 + " --num-virtual-stages-per-pipeline-rank 2"
DO = "--use-distributed-optimizer"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers"
AUTO = "--recompute-granularity auto --recompute-memory-gib"
GRANULARITY = "--recompute-granularity-per-stage-micro-batch"
METHOD = "--recompute-method-per-stage-micro-batch"
LAYERS = "--recompute-num-layers-per-stage-micro-batch"
GROUPED = "--moe-grouped-gemm"
COMPILED = "--transformer-impl compiled"
CAPTURED = "--cuda-graph-impl local --cuda-graph-scope full_iteration --cuda-graph-warmup-steps 1"
OVERLAP = DO + " --overlap-grad-reduce --overlap-param-gather --bucket-size 20000"

# A tensor-parallel step has hundreds of operations, on which gloo spends most of a case's time:
# where the case is not about them, fsccl does them if it can be compiled.
FASTER = "auto" if why_no_compiler() else "fsccl"


@dataclass(frozen=True)
class Case:
    """A layout, and the run that it must equal: of one rank, or of the same layout on gloo."""

    name: str
    world: int
    model: str
    layout: str
    reference: str
    tolerance: float = 1e-5
    backend: str = "auto"
    clusters: str = ""
    overflow: tuple[int, int] | None = None
    """A rank, and the step in which a gradient of its is infinite."""
    graphs: bool = False
    """Layers are really compiled, as far as graphs go: that takes seconds."""

    def record(self, cache: Path) -> dict[str, Any]:
        """What the worker reads. Cases find the shuffled mock data of others in ``cache``."""
        return {
            "id": self.name,
            "world": self.world,
            "argv": [*f"{self.model} {self.layout}".split(), "--data-cache-path", str(cache)],
            "backend": self.backend,
            "clusters": self.clusters,
            "overflow": self.overflow,
            "graphs": self.graphs,
        }
