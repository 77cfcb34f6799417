"""Parallel layouts of tiny models, and the runs that they have to equal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from flagscale.config.arguments.flatten import flatten
from flagscale.config.load import load
from support.layout_meshes import TP2_DP2, meshes, shares
from support.layout_models import (
    APART,
    AUTO,
    BALANCED,
    BERT,
    BERT_MOE,
    BF16,
    BY_SEQUENCE,
    BY_SIX,
    CAPTURED,
    COMPILED,
    CP2,
    DO,
    EP2,
    EVERY_LOSS,
    FASTER,
    FP16,
    FP16_1,
    FULL,
    GEMMA,
    GEMMA_APART,
    GPT2,
    GRANULARITY,
    GROUPED,
    GROWING,
    HIDDEN,
    LATENT,
    LATENT_APART,
    LATENT_BF16,
    LATENT_LORA,
    LATENT_MOE,
    LATENT_MOE_LORA,
    LAYERS,
    LLAMA,
    LORA,
    LORA_PARTS,
    MBS2,
    MBS3,
    MOE,
    MTP,
    MTP_LORA,
    MTP_MOE,
    MTP_TIED,
    OVERLAP,
    PER_TOKEN,
    PP2,
    ROTARY_BERT,
    SFT,
    SP,
    TIED,
    TP2,
    VPP2,
    Case,
)

ROOT = Path(__file__).parents[2]


REFERENCES = (
    Case("llama", 1, LLAMA, "", ""),
    Case("tied", 1, TIED, "", ""),
    Case("gpt2", 1, GPT2, "", ""),
    Case("moe", 1, MOE, "", ""),
    Case("moe-balanced", 1, BALANCED, "", ""),
    Case("moe-by-sequence", 1, BY_SEQUENCE, "", ""),
    Case("moe-growing", 1, GROWING, "", ""),
    Case("every-loss-mbs2", 1, EVERY_LOSS, MBS2, ""),
    Case("every-loss-mbs3", 1, EVERY_LOSS, MBS3, ""),
    Case("bf16", 1, BF16, "", ""),
    Case("fp16-overflow", 1, FP16_1, "", "", overflow=(0, 1)),
    Case("llama-6", 1, LLAMA, "--global-batch-size 6", ""),
    Case("tied-6", 1, TIED, "--global-batch-size 6", ""),
    Case("gemma", 1, GEMMA, "", ""),
    Case("latent", 1, LATENT, "", ""),
    Case("latent-moe", 1, LATENT_MOE, "", ""),
    Case("latent-bf16", 1, LATENT_BF16, "", ""),
    Case("gemma-apart", 1, GEMMA_APART, "", ""),
    Case("latent-apart", 1, LATENT_APART, "", ""),
    Case("latent-lora", 1, LATENT_LORA, "", ""),
    Case("latent-moe-lora", 1, LATENT_MOE_LORA, "", ""),
    Case("bert", 1, BERT, "", ""),
    Case("bert-rotary", 1, ROTARY_BERT, "", ""),
    Case("bert-moe", 1, ROTARY_BERT + BERT_MOE, "", ""),
    Case("bert-bf16", 1, BERT + "--bf16", "", ""),
    Case("apart", 1, APART, "", ""),
    Case("sft", 1, SFT, "", ""),
    Case("lora", 1, LORA, "", ""),
    Case("lora-parts", 1, LORA_PARTS, "", ""),
    Case("lora-base", 1, SFT, "--train-iters 1 --lr 0", ""),
    Case("apart-per-token", 1, APART, PER_TOKEN, ""),
    Case("apart-by-positions", 1, APART, "--position-embedding-type learned_absolute", ""),
    Case("mtp", 1, MTP, "", ""),
    Case("mtp-lora", 1, MTP_LORA, "", ""),
    Case("mtp-per-token", 1, MTP, f"{PER_TOKEN} {MBS2}", ""),
    Case("mtp-tied", 1, MTP_TIED, "", ""),
    Case("mtp-moe", 1, MTP_MOE, "", ""),
    Case("by-six", 1, BY_SIX, "--make-vocab-size-divisible-by 384", ""),
)
CASES = (
    Case("local-attention", 1, LLAMA, "--attention-backend local", "llama"),
    Case("recompute-full", 1, LLAMA, f"{FULL} 1", "llama"),
    Case("recompute-auto", 1, LLAMA, f"{AUTO} 0.0036", "llama"),
    Case("recompute-selective", 1, LLAMA, "--recompute-granularity selective", "llama"),
    Case("per-token-loss", 1, LLAMA, PER_TOKEN, "llama"),
    Case("dp2", 2, LLAMA, "", "llama"),
    Case("dp2-do", 2, LLAMA, DO, "llama"),
    Case("dp2-do-overlap", 2, LLAMA, OVERLAP, "llama"),
    Case("dp2-do-captured-per-token", 2, LLAMA, f"{DO} {CAPTURED} {PER_TOKEN}", "llama"),
    Case("tp2", 2, LLAMA, TP2, "llama"),
    Case("tp2-sp", 2, LLAMA, SP, "llama"),
    Case("tp2-sp-recompute", 2, LLAMA, f"{SP} {FULL} 2", "llama", backend=FASTER),
    Case("pp2", 2, LLAMA, PP2, "llama"),
    Case("pp2-vpp2", 2, LLAMA, VPP2, "llama"),
    Case("pp2-recompute-auto", 2, LLAMA, f"{PP2} {AUTO} 0.0021", "llama"),
    Case("pp2-vpp2-recompute-by-stage", 2, LLAMA,
         f"{VPP2} {FULL} 1 {GRANULARITY} 1,4,1 1,2,0,2,1 2,1,1,3,0", "llama"),
    Case("pp2-first", 2, LLAMA, PP2 + " --decoder-first-pipeline-num-layers 1", "llama"),
    Case("pp2-by-hand", 2, LLAMA, PP2 + " --pipeline-model-parallel-layout Et|tttL", "llama"),
    Case("tied-tp2", 2, TIED, TP2, "tied", backend=FASTER),
    Case("tied-pp2-do", 2, TIED, PP2 + " " + DO, "tied"),
    Case("gpt2-tp2-sp", 2, GPT2, SP, "gpt2", backend=FASTER),
    Case("gpt2-pp2", 2, GPT2, PP2, "gpt2"),
    Case("moe-ep2", 2, MOE, "--expert-model-parallel-size 2", "moe"),
    Case("moe-tp2-etp1", 2, MOE, SP + " --expert-tensor-parallel-size 1", "moe", backend=FASTER),
    Case("moe-growing-pp2", 2, GROWING, PP2, "moe-growing"),
    Case("moe-balanced-tp2", 2, BALANCED, SP, "moe-balanced", backend=FASTER),
    Case("every-loss-mbs2-per-token", 1, EVERY_LOSS, f"{MBS2} {PER_TOKEN}", "every-loss-mbs2"),
    Case("every-loss-mbs2-tp2-per-token", 2, EVERY_LOSS, f"{MBS2} {SP} {PER_TOKEN}",
         "every-loss-mbs2", backend=FASTER),
    Case("bf16-fused-loss", 1, BF16, "--cross-entropy-loss-fusion", "bf16", 1e-2),
    Case("bf16-dp2-do", 2, BF16, DO, "bf16", 1e-3),
    Case("bf16-tp2-sp", 2, BF16, SP, "bf16", 2e-2, FASTER),
    Case("fp16", 1, FP16, "", "llama", 2e-2),
    Case("fp16-dp2-do", 2, FP16, DO, "fp16", 1e-3),
    Case("bf16-pp2", 2, BF16, PP2, "bf16", 1e-3),
    Case("tp2-dp2-sp-do-overlap", 4, LLAMA, f"{SP} {OVERLAP}", "llama"),
    Case("pp2-dp2-vpp2-do-overlap", 4, LLAMA, f"{VPP2} {OVERLAP}", "llama"),
    Case("tied-tp2-pp2-vpp2-sp", 4, TIED, f"{SP} {VPP2}", "tied"),
    Case("cp2", 2, LLAMA, CP2, "llama"),
    Case("gpt2-cp2", 2, GPT2, CP2, "gpt2"),
    Case("moe-cp2", 2, MOE, CP2, "moe"),
    Case("cp2-tp2-sp", 4, LLAMA, f"{CP2} {SP}", "llama", backend=FASTER),
    Case("cp2-pp2-recompute", 4, LLAMA, f"{CP2} {PP2} {FULL} 1", "llama"),
    Case("cp2-dp2-do-overlap", 4, LLAMA, f"{CP2} {OVERLAP}", "llama"),
    Case("cp4", 4, LLAMA, "--context-parallel-size 4", "llama"),
    Case("compiled-cp2", 2, LLAMA, f"{COMPILED} {CP2}", "llama"),
    # The faster build computes what the plain one does.
    Case("compiled", 1, LLAMA, COMPILED, "llama"),
    Case("compiled-tied", 1, TIED, COMPILED, "tied"),
    Case("compiled-gpt2", 1, GPT2, COMPILED, "gpt2"),
    Case("compiled-bf16", 1, BF16, COMPILED, "bf16", 1e-2),
    Case("compiled-fp16", 1, FP16, COMPILED, "llama", 2e-2),
    Case("compiled-dp2-do-overlap", 2, LLAMA, f"{COMPILED} {OVERLAP}", "llama"),
    Case("compiled-tp2", 2, LLAMA, f"{COMPILED} {TP2}", "llama", backend=FASTER),
    Case("compiled-tp2-sp-recompute", 2, LLAMA, f"{COMPILED} {SP} {FULL} 2", "llama",
         backend=FASTER),
    Case("compiled-tp2-sp-hidden", 2, LLAMA, f"{COMPILED} {SP} {HIDDEN}", "llama", backend=FASTER),
    Case("compiled-tp2-dp2-sp-hidden-do-overlap", 4, TIED,
         f"{COMPILED} {SP} {HIDDEN} {OVERLAP}", "tied", backend=FASTER),
    Case("compiled-pp2-recompute-by-stage", 2, LLAMA,
         f"{COMPILED} {PP2} {FULL} 1 {LAYERS} 1,1,0,3,2 1,4,1", "llama"),
    Case("compiled-tied-pp2-do", 2, TIED, f"{COMPILED} {PP2} {DO}", "tied"),
    Case("compiled-gpt2-tp2-sp", 2, GPT2, f"{COMPILED} {SP}", "gpt2", backend=FASTER),
    Case("moe-grouped", 1, MOE, GROUPED, "moe"),
    Case("moe-grouped-bf16", 1, MOE + "--bf16", GROUPED, "moe", 2e-2),
    Case("moe-grouped-ep2", 2, MOE, f"{GROUPED} --expert-model-parallel-size 2", "moe"),
    Case("moe-grouped-tp2", 2, BALANCED, f"{GROUPED} {SP}", "moe-balanced", backend=FASTER),
    Case("moe-grouped-allgather-dp2-do", 2, MOE.replace("alltoall", "allgather"),
         f"{GROUPED} {OVERLAP}", "moe"),
    Case("compiled-moe-grouped-ep2", 2, MOE,
         f"{COMPILED} {GROUPED} --expert-model-parallel-size 2 {OVERLAP}", "moe"),
    Case("compiled-moe-ep2", 2, MOE, f"{COMPILED} --expert-model-parallel-size 2", "moe"),
    Case("compiled-moe-tp2", 2, BALANCED, f"{COMPILED} {SP}", "moe-balanced", backend=FASTER),
    Case("compiled-tp2-dp2-sp-do-overlap", 4, LLAMA, f"{COMPILED} {SP} {OVERLAP}", "llama"),
    Case("compiled-pp2-dp2-vpp2-do-overlap", 4, LLAMA, f"{COMPILED} {VPP2} {OVERLAP}", "llama"),
    Case("fp8", 1, BF16, f"{COMPILED} --fp8 hybrid", "bf16", 3e-2),
    Case("fp8-e4m3-rowwise", 1, BF16, f"{COMPILED} --fp8 e4m3 --fp8-recipe rowwise", "bf16", 3e-2),
    Case("fp8-tp2-sp", 2, BF16, f"{COMPILED} {SP} --fp8 hybrid", "bf16", 3e-2, FASTER),
    Case("fp8-blockwise-pp2-dp2-do-overlap", 4, BF16, f"{COMPILED} {PP2} {OVERLAP} --fp8 e4m3 "
         "--fp8-recipe blockwise --first-last-layers-bf16", "bf16", 3e-2),
)  # fmt: skip

# Documents that are kept apart, by every attention, in every layout.
APART_CASES = (
    Case("apart-local-attention", 1, APART, "--attention-backend local", "apart"),
    Case("apart-mbs2-recompute", 1, APART, f"{MBS2} {FULL} 2 {PER_TOKEN}", "apart-per-token"),
    Case("apart-dp2-do", 2, APART, DO, "apart"),
    Case("apart-compiled-tp2-sp", 2, APART, f"{COMPILED} {SP}", "apart", backend=FASTER),
    Case("apart-pp2-vpp2", 2, APART, VPP2, "apart"),
    Case("apart-cp2", 2, APART, CP2, "apart"),
    Case("lora-recompute-mbs2", 1, LORA, f"{MBS2} {FULL} 2", "lora"),
    Case("lora-tp2", 2, LORA, TP2, "lora", backend=FASTER),
    Case("lora-parts-tp2-sp-do", 2, LORA_PARTS, f"{SP} {DO}", "lora-parts", backend=FASTER),
    Case("lora-compiled-tp2-sp-hidden", 2, LORA, f"{COMPILED} {SP} {HIDDEN}", "lora",
         backend=FASTER),
    Case("lora-compiled-tp2-sp-recompute", 2, LORA, f"{COMPILED} {SP} {FULL} 1", "lora",
         backend=FASTER),
    Case("lora-pp2-vpp2-do-overlap", 2, LORA, f"{VPP2} {OVERLAP}", "lora"),
    Case("lora-parts-compiled-pp2-dp2-do-overlap", 4, LORA_PARTS, f"{COMPILED} {PP2} {OVERLAP}",
         "lora-parts"),
    Case("sft-dp2-do-overlap", 2, SFT, OVERLAP, "sft"),
    Case("sft-cp2-pp2-vpp2", 4, SFT, f"{CP2} {VPP2}", "sft"),
    Case("apart-by-positions-pp2", 2, APART,
         f"--position-embedding-type learned_absolute {PP2}", "apart-by-positions"),
)  # fmt: skip


PREDICTING = (
    Case("mtp-compiled-tp2-sp-recompute", 2, MTP, f"{COMPILED} {SP} {FULL} 2", "mtp",
         backend=FASTER),
    Case("mtp-pp2-vpp2-do-overlap", 2, MTP, f"{VPP2} {OVERLAP}", "mtp"),
    Case("mtp-lora-pp2-do", 2, MTP_LORA, f"{PP2} {DO}", "mtp-lora"),
    Case("mtp-lora-tp2-sp", 2, MTP_LORA, SP, "mtp-lora", backend=FASTER),
    Case("mtp-cp2-per-token", 2, MTP, f"{CP2} {PER_TOKEN}", "mtp-per-token"),
    Case("mtp-cp2-do", 2, MTP, f"{CP2} {DO}", "mtp"),
    Case("mtp-tied-compiled-pp2-by-hand", 2, MTP_TIED,
         f"{COMPILED} {PP2} --pipeline-model-parallel-layout Ettt|tmL", "mtp-tied"),
    Case("mtp-moe-grouped-pp2-ep2-do", 4, MTP_MOE, f"{GROUPED} {PP2} {EP2} {DO}", "mtp-moe",
         backend=FASTER),
)  # fmt: skip


# Another family learns in every layout too.
FAMILIES = (
    Case("bert-compiled", 1, BERT, COMPILED, "bert"),
    Case("bert-dp2-do-overlap", 2, BERT, OVERLAP, "bert"),
    Case("bert-tp2-sp-do", 2, BERT, f"{SP} {DO}", "bert", backend=FASTER),
    Case("bert-compiled-tp2-sp", 2, BERT, f"{COMPILED} {SP}", "bert", backend=FASTER),
    Case("bert-pp2-vpp2-do-overlap", 2, BERT, f"{VPP2} {OVERLAP}", "bert"),
    Case("bert-bf16-tp2-sp", 2, BERT + "--bf16", SP, "bert-bf16", 1e-2, backend=FASTER),
    Case("bert-rotary-tp2-pp2-sp", 4, ROTARY_BERT, f"{SP} {PP2}", "bert-rotary", backend=FASTER),
    Case("bert-rotary-compiled-cp2-dp2", 4, ROTARY_BERT, f"{COMPILED} {CP2} {DO}", "bert-rotary"),
    Case("bert-moe-ep2", 2, ROTARY_BERT + BERT_MOE, "--expert-model-parallel-size 2", "bert-moe"),
    Case("bert-mesh-tp2+dp2-sp-do", 4, BERT, meshes(TP2_DP2, "3 1", f"{MBS2} {DO} "
         "--sequence-parallel"), "bert"),
    Case("bert-shares-1x1+1x3", 2, BERT, shares("1 1 1 3"), "bert"),
    Case("gemma-compiled-tp2-sp-do", 2, GEMMA, f"{COMPILED} {SP} {DO}", "gemma", backend=FASTER),
    Case("gemma-mesh-tp2+dp2-sp-do", 4, GEMMA, meshes(TP2_DP2, "3 1", f"{MBS2} {DO} "
         "--sequence-parallel"), "gemma", backend=FASTER),
    Case("gemma-pp2-recompute-full", 2, GEMMA, f"{PP2} {FULL} 1", "gemma"),
    Case("gemma-apart-compiled-tp2-sp", 2, GEMMA_APART, f"{COMPILED} {SP}", "gemma-apart"),
    Case("latent-apart-cp2", 2, LATENT_APART, CP2, "latent-apart"),
    Case("latent-tp2", 2, LATENT, TP2, "latent", backend=FASTER),
    Case("latent-fp8-blockwise-tp2-sp-recompute", 2, LATENT_BF16, f"{COMPILED} {SP} {FULL} 2 "
         "--fp8 e4m3 --fp8-recipe blockwise", "latent-bf16", 3e-2, FASTER),
    Case("latent-cp2", 2, LATENT, CP2, "latent", backend=FASTER),
    Case("latent-lora-compiled-tp2", 2, LATENT_LORA, f"{COMPILED} {TP2}", "latent-lora",
         backend=FASTER),
    Case("latent-moe-lora-tp2-sp-ep2-do", 2, LATENT_MOE_LORA, f"{SP} {DO} {EP2} "
         "--expert-tensor-parallel-size 1", "latent-moe-lora", backend=FASTER),
    Case("latent-moe-compiled-tp2-sp-ep2-do", 2, LATENT_MOE, f"{COMPILED} {SP} {DO} {EP2} "
         "--expert-tensor-parallel-size 1", "latent-moe", backend=FASTER),
    Case("latent-moe-mesh-ep2+ep2-do", 4, LATENT_MOE, meshes("1 1 2 2 1  1 1 2 2 1", "3 1", DO),
         "latent-moe", backend=FASTER),
    Case("latent-moe-pp2-ep2", 4, LATENT_MOE, f"{PP2} {EP2}", "latent-moe", backend=FASTER),
)  # fmt: skip

EXAMPLES = (
    *("deepseek/tiny", "deepseek/tiny_v2", "gemma/tiny", "gemma/tiny_2", "gpt2/tiny"),
    *("llama3/tiny_3.2", "mistral/tiny", "mistral/tiny_dense", "qwen2.5/tiny"),
    *("qwen3/tiny_pretraining", "qwen3/tiny_moe"),
)
"""Examples whose small model trains for a few steps, on made-up tokens: where, and which."""


def example(name: str) -> Case:
    """The small model of an example."""
    where, which = name.split("/")
    conf = ROOT / "examples" / where / "conf"
    sections = load(conf, "train", [f"train={which}", "action=dryrun"]).experiment.train.sections()
    words = flatten({**sections, "data": {"mock_data": True, "vocab_size": 1000}})
    more = "--train-iters 3 --eval-iters 1 --lr-warmup-iters 0 --seq-length 64"
    return Case(f"example-{name}", 1, " ".join(words), more, "")


# Layouts that between them call every collective of megatron.core, once more on our own library.
# A sum of two ranks' numbers has one value, whoever adds; four ranks may add in another order.
ON_FSCCL = {
    **dict.fromkeys(("dp2-do-overlap", "tp2-sp", "pp2-vpp2", "tied-pp2-do", "moe-ep2"), 0.0),
    "tp2-dp2-sp-do-overlap": 1e-6,
}
FSCCL_CASES = tuple(
    replace(
        case,
        name=f"{case.name}-fsccl",
        reference=case.name,
        tolerance=ON_FSCCL[case.name],
        backend="fsccl",
        clusters="2,2" if case.world == 4 else "",
    )
    for case in CASES
    if case.name in ON_FSCCL
)


# What compiling makes of collectives in layers, forward and backward, is the same for every device.
# Not so what it makes of gradients that are added in place: with several micro-batches on their way
# through a pipeline, this one kind of compiling takes them for changed.
GRAPHS = tuple(
    replace(case, name=f"{case.name}-graphs", graphs=True)
    for case in CASES
    if case.name
    in ("compiled-cp2", "compiled-tp2-sp-recompute", "compiled-tp2-sp-hidden", "compiled-moe-tp2")
)

FEW = frozenset({
    "tp2-dp2-sp-do-overlap", "cp2-tp2-sp", "latent-moe-pp2-ep2", "mesh-tp2+dp2", "mesh-bf16",
    "mesh-vpp2-tied-do-overlap", "mesh-moe-dp2+tp2-ep2-do", "mesh-fp16-overflow-in-the-last",
    "mesh-recompute-by-stage", "shares-pp2-1x2+2x1-do", "mesh-dp2+tp2-mtp-tied-sp-do",
})  # fmt: skip
"""Of the layouts of four ranks and more, those that are always trained. The others, and the same
once more on another backend, find what these do not, but rarely: they are slow tests."""


SELDOM = frozenset({
    "recompute-full", "dp2", "dp2-do", "tp2", "pp2-first", "tied-tp2", "gpt2-pp2", "gpt2-cp2",
    "moe-cp2", "every-loss-mbs2-per-token", "bf16-tp2-sp", "bf16-pp2", "fp16", "compiled-gpt2",
    "compiled-fp16", "compiled-tp2", "compiled-moe-ep2", "compiled-moe-tp2",
    "compiled-gpt2-tp2-sp", "moe-grouped-bf16", "moe-grouped-tp2", "fp8-e4m3-rowwise",
    "apart-dp2-do", "mtp-cp2-per-token", "pp2-vpp2",
})  # fmt: skip
"""Smaller ones of which each part is in another layout, too: slow tests as well."""


def is_slow(case: Case) -> bool:
    large = case.world > 3 and case.name not in FEW
    return large or case.name in SELDOM or case in (*FSCCL_CASES, *GRAPHS)
