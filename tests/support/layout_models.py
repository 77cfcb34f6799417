"""Tiny models, command-line options of their layouts, and test cases that combine both."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.needs import explain_no_compiler

LLAMA = """
--num-layers 4 --hidden-size 64 --num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 128
--seq-length 32 --micro-batch-size 1 --global-batch-size 4 --train-iters 2 --lr 2e-3
--vocab-size 500 --make-vocab-size-divisible-by 64 --mock-data --normalization RMSNorm --swiglu
--disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights
--hidden-dropout 0 --attention-dropout 0 --eval-iters 1 --num-workers 0 --clip-grad 0.5
--lr-decay-style constant --init-method-std 0.1
"""
# File name (without extension) of short documents, several per sequence.
SHORT_DOCUMENTS = "short_document"
# A token attends only to its own document.
MASKED_DOCUMENTS = (
    LLAMA.replace(
        "--mock-data", f"--data-path {SHORT_DOCUMENTS} --tokenizer-type NullTokenizer --split 4,1,0"
    )
    + "--reset-attention-mask --reset-position-ids --eod-mask-loss"
)
# File of conversations, of which the loss includes only the answers.
CONVERSATIONS, CHAT_TOKENIZER = "conversations.jsonl", "chat_tokenizer"
SFT = LLAMA.replace(
    "--mock-data",
    f"--sft --data-path {CONVERSATIONS} --tokenizer-type HuggingFaceTokenizer "
    f"--tokenizer-path {CHAT_TOKENIZER} --split 4,1 --seq-length 128 "
    "--make-vocab-size-divisible-by 32",
).replace("--vocab-size 500", "")
LORA = SFT + "--peft-type lora --lora-dim 4 --lora-alpha 16 --lr 2e-2"
# Adapters for some parts of combined layers only.
LORA_SOME_LAYERS = LORA + " --lora-target-modules q_proj v_proj o_proj up_proj --weight-decay 0.1"
TIED = LLAMA.replace("--untie-embeddings-and-output-weights", "")
# Model dimensions that are divisible by tensor parallel sizes 2 and 3.
DIVISIBLE_BY_SIX = (
    TIED
    + """--hidden-size 96 --num-attention-heads 6 --num-query-groups 6 --ffn-hidden-size 192
--seq-length 36"""
)
GPT2 = """
--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1
--global-batch-size 4 --train-iters 2 --lr 2e-3 --vocab-size 500 --mock-data --qk-layernorm
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
MOE_LORA = (
    MOE
    + "--peft-type lora --lora-dim 4 --lora-alpha 16 --lr 2e-2 "
    + "--lora-target-modules linear_fc1 linear_fc2"
)
MOE_AUX_LOSS = MOE.replace("none", "aux_loss --moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 1e-3")
MOE_RAMPUP = MOE_AUX_LOSS.replace("--train-iters 2", "--train-samples 8 --rampup-batch-size 2 2 4")
MOE_ALL_LOSSES = MOE.replace(
    "none",
    """aux_loss seq_aux_loss global_aux_loss
--moe-aux-loss-coeff 0.03 0.05 0.02 --moe-z-loss-coeff 1e-2 --moe-shared-expert-intermediate-size 64
""",
)
BERT = """
--family bert --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32
--micro-batch-size 1 --global-batch-size 4 --train-iters 2 --lr 2e-3 --vocab-size 500 --mock-data
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
MLA = (
    LLAMA.replace("--num-query-groups 2", "")
    + """--multi-latent-attention --q-lora-rank 24 --kv-lora-rank 12 --qk-head-dim 12
--qk-pos-emb-head-dim 4 --v-head-dim 10 --qk-layernorm --rotary-scaling-factor 4 --mscale-all-dim 1
--original-max-position-embeddings 8
"""
)
# Widths that FP8 GEMMs support (multiples of 16), also with tensor parallel size 2.
MLA_BF16 = (
    MLA
    + """--bf16 --q-lora-rank 32 --kv-lora-rank 48 --qk-head-dim 16 --qk-pos-emb-head-dim 16
--v-head-dim 16
"""
)
MLA_LORA = MLA + "--peft-type lora --lora-dim 4 --lora-alpha 16 --lr 2e-2"
MLA_MOE = (
    MLA
    + """--num-experts 8 --moe-router-topk 4 --moe-ffn-hidden-size 32 --moe-layer-freq [0]+[1]*3
--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none
--moe-shared-expert-intermediate-size 32 --moe-router-score-function sigmoid
--moe-router-enable-expert-bias --moe-router-num-groups 4 --moe-router-group-topk 2
--moe-router-topk-scaling-factor 2.5 --moe-router-dtype fp32
"""
)
# Adapters of dense MLPs, shared experts and experts, in an MLA model.
MLA_MOE_LORA_EXPERTS = (
    MLA_MOE
    + "--peft-type lora --lora-dim 4 --lora-alpha 16 --lr 2e-2 "
    + "--lora-target-modules linear_proj up_proj linear_fc2"
)
MLA_MOE_LORA = MLA_MOE + "--peft-type lora --lora-dim 4 --lora-alpha 16 --lr 2e-2"
# Multi-token prediction.
MTP = MASKED_DOCUMENTS + " --mtp-num-layers 2 --mtp-loss-scaling-factor 0.3"
MTP_LORA = MTP + " --peft-type lora --lora-dim 4 --lora-alpha 16 --lr 4e-3"
MTP_TIED = TIED + "--mtp-num-layers 1"
MTP_MOE = MLA_MOE.replace(
    "load-balancing-type none",
    "load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.01 --mtp-num-layers 1",
)
SHORT_DOCUMENT_DATA = f"--data-path {SHORT_DOCUMENTS} --tokenizer-type NullTokenizer --split 4,1,0"
GEMMA_MASKED_DOCUMENTS = GEMMA.replace(
    "--mock-data", f"{SHORT_DOCUMENT_DATA} --reset-attention-mask --eod-mask-loss"
)
GEMMA_MASKED_DOCUMENTS += "--reset-position-ids"
MLA_MASKED_DOCUMENTS = MLA.replace(
    "--mock-data", f"{SHORT_DOCUMENT_DATA} --reset-attention-mask --eod-mask-loss"
)
# Muon with fp32 products; its updates are as large as Adam's.
_MUON = (
    " --optimizer muon --muon-fp32-matmul-prec highest --muon-use-nesterov --lr 1e-2 "
    "--muon-extra-scale-factor 0.2 --weight-decay 0.1 "
)
MUON, MUON_MOE, MUON_MLA = LLAMA + _MUON, MOE + _MUON, MLA + _MUON
# Small steps, because a sign that rounding changes changes a weight by two steps.
LION = LLAMA + " --optimizer lion --lr 1e-4 --weight-decay 0.1 "
LION_MOE = MOE + " --optimizer lion --lr 1e-4 --weight-decay 0.1 "
SHARED_PRODUCTS = "--muon-tp-mode distributed"
BF16 = LLAMA + "--bf16"
# Less to compute: a CPU multiplies FP8 numbers one by one.
SHORT_BF16 = BF16 + " --num-layers 2 --seq-length 16"
FP16 = LLAMA + "--fp16 --initial-loss-scale 4096"
MOE_SEQ_AUX_LOSS = MOE_AUX_LOSS.replace("aux_loss --", "seq_aux_loss --")
DROPOUT = LLAMA + "--hidden-dropout 0.1 --attention-dropout 0.1"
FP16_HYSTERESIS_1 = FP16 + " --hysteresis 1 --train-iters 3"

# Options of layouts: TP tensor, PP pipeline, VPP virtual pipeline, CP context, EP expert
# parallelism, SP sequence parallelism, MBS micro-batch size, and the number.
TP2, PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
MBS2, MBS3 = "--micro-batch-size 2", "--micro-batch-size 3 --global-batch-size 6"
PER_TOKEN = "--calculate-per-token-loss"
CP2 = "--context-parallel-size 2"
CP2_GATHER = f"{CP2} --cp-comm-type all_gather"
CP2_RING, CP4_RING = (f"--context-parallel-size {cp} --cp-comm-type p2p" for cp in (2, 4))
CP4_HIERARCHICAL = """--context-parallel-size 4 --cp-comm-type a2a+p2p
--hierarchical-context-parallel-sizes 2 2"""
EP2 = "--expert-model-parallel-size 2"
TP2_SP = TP2 + " --sequence-parallel"
TP_OVERLAP = "--tp-comm-overlap"
VPP2 = PP2 + " --num-virtual-stages-per-pipeline-rank 2"
SHARD_GRADIENTS = "--data-parallel-sharding-strategy optim_grads"
SHARD_WEIGHTS = "--data-parallel-sharding-strategy optim_grads_params"
HYBRID = "--num-distributed-optimizer-instances 2"
DISTRIBUTED_OPTIMIZER = "--use-distributed-optimizer"
OFFLOAD = f"{DISTRIBUTED_OPTIMIZER} --optimizer-cpu-offload"
PRECISION_AWARE = f"{DISTRIBUTED_OPTIMIZER} --use-precision-aware-optimizer"
LEAN_MOMENTS = f"{PRECISION_AWARE} --exp-avg-dtype fp8 --exp-avg-sq-dtype fp8"
LEAN_BF16 = f"{LEAN_MOMENTS} --main-params-dtype bf16 --main-grads-dtype bf16"
LEAN_FP16 = (
    f"{PRECISION_AWARE} --exp-avg-dtype fp16 --exp-avg-sq-dtype fp16 --main-params-dtype fp16"
)
FULL_RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers"
OFFLOAD_LAYERS = "--min-offloaded-tensor-size 256 --cpu-offloading-num-layers"
OFFLOAD_MODULES = """--min-offloaded-tensor-size 256 --fine-grained-activation-offloading
--offload-modules"""
SELECTIVE = "--recompute-granularity selective --recompute-modules"
AUTO_RECOMPUTE = "--recompute-granularity auto --recompute-memory-gib"
RECOMPUTE_GRANULARITY = "--recompute-granularity-per-stage-micro-batch"
RECOMPUTE_METHOD = "--recompute-method-per-stage-micro-batch"
RECOMPUTE_LAYERS = "--recompute-num-layers-per-stage-micro-batch"
GROUPED_EXPERTS = "--moe-grouped-gemm"
COMPILED = "--transformer-impl compiled"
CUDA_GRAPH = "--cuda-graph-impl local --cuda-graph-scope full_iteration --cuda-graph-warmup-steps 1"
OVERLAP = (
    DISTRIBUTED_OPTIMIZER + " --overlap-grad-reduce --overlap-param-gather --bucket-size 20000"
)

# A tensor-parallel step has hundreds of collectives, which dominate the time of a case on gloo.
# Cases that do not test gloo use fsccl if it can be compiled.
FAST_BACKEND = "auto" if explain_no_compiler() else "fsccl"


@dataclass(frozen=True)
class LayoutCase:
    """A model in a parallel layout, and the reference run whose results it must reproduce.

    The reference has one rank, or is the same layout on gloo.
    """

    name: str
    world_size: int
    """Number of ranks."""
    model: str
    """Command-line arguments of the model and the training."""
    layout: str
    """Command-line arguments of the layout."""
    reference: str
    """Name of the case whose results are expected; empty for a reference."""
    tolerance: float = 1e-5
    """Maximum relative and absolute difference of results."""
    backend: str = "auto"
    """Communication backend."""
    clusters: str = ""
    """Sizes of the nodes into which fsccl divides the ranks (``FSCCL_CLUSTERS``)."""
    overflow: tuple[int, int] | None = None
    """Rank and step in which one of the rank's gradients is infinite."""
    graphs: bool = False
    """Whether to trace and compile the layers, which takes seconds."""

    def to_record(self, data_cache: Path) -> dict[str, Any]:
        """Return the record of the case that the worker reads.

        Cases share the shuffle indices of data sets in ``data_cache``.
        """
        return {
            "id": self.name,
            "world": self.world_size,
            "argv": [*f"{self.model} {self.layout}".split(), "--data-cache-path", str(data_cache)],
            "backend": self.backend,
            "clusters": self.clusters,
            "overflow": self.overflow,
            "graphs": self.graphs,
        }
