"""Parallel layouts of tiny models, and the runs that they have to equal."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from layout_models import (
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
    DROPPING,
    EP2,
    EVERY_LOSS,
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
    METHOD,
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
)
from needs import why_no_compiler

from flagscale.config.arguments.flatten import flatten
from flagscale.config.load import load

ROOT = Path(__file__).parents[1]


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
# A tensor-parallel step has hundreds of operations, on which gloo spends most of a case's time:
# where the case is not about them, fsccl does them if it can be compiled.
FASTER = "auto" if why_no_compiler() else "fsccl"
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
    Case("fp8-blockwise-pp2-dp2-do-overlap", 4, BF16, f"{COMPILED} {PP2} {OVERLAP} --fp8 hybrid "
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


def meshes(sizes: str, split: str = "", more: str = "") -> str:
    """Options of heterogeneous training: five sizes a mesh, a split of the layers."""
    options = f"--enable-hetero --hetero-process-meshes {sizes}"
    return f"{options}{f' --hetero-pipeline-layer-split {split}' if split else ''} {more}"


def shares(sizes: str, counts: str = "", more: str = "") -> str:
    """Options of unlike replicas: how many have which micro-batch size, and how many of them."""
    options = f"--enable-hetero --hetero-mode dp --hetero-micro-batch-sizes {sizes}"
    return f"{options}{f' --hetero-num-microbatches {counts}' if counts else ''} {more}"


# Pipeline stages on meshes that are laid out unlike each other: tp cp ep dp pp of each.
TP2_DP2 = "2 1 1 1 1  1 1 1 2 1"
DP2_TP2 = "1 1 1 2 1  2 1 1 1 1"
MESHES = (
    Case("mesh-tp2+dp2", 4, LLAMA, meshes(TP2_DP2, "3 1", MBS2), "llama"),
    Case("mesh-tp2+dp2-sp-do", 4, LLAMA, meshes(TP2_DP2, "3 1", f"{MBS2} {DO} "
         "--sequence-parallel"), "llama"),
    Case("mesh-tp2+dp2-through-hosts", 4, LLAMA, meshes(TP2_DP2, "3 1", f"{MBS2} "
         "--hetero-use-cpu-communication"), "llama", backend=FASTER),
    Case("mesh-dp2+tp2-tied", 4, TIED, meshes(DP2_TP2, "1 3"), "tied"),
    Case("mesh-tp2+dp2-mtp", 4, MTP, meshes(TP2_DP2, "3 1", MBS2), "mtp"),
    Case("mesh-dp2+tp2-mtp-tied-sp-do", 4, MTP_TIED, meshes(DP2_TP2, "1 3", f"{DO} "
         "--sequence-parallel"), "mtp-tied"),
    Case("mesh-ep2+ep1-mtp-moe", 4, MTP_MOE, meshes("1 1 2 2 1  2 1 1 1 1", "2 2",
         "--sequence-parallel"), "mtp-moe"),
    Case("mesh-dp2+tp2-tied-sp-do-overlap", 4, TIED, meshes(DP2_TP2, "1 3", f"{OVERLAP} "
         "--sequence-parallel"), "tied"),
    Case("mesh-1+1+1-eager", 3, LLAMA, meshes("1 1 1 1 1  1 1 1 1 1  1 1 1 1 1", "1 2 1",
         "--hetero-eager-1f1b"), "llama"),
    Case("mesh-1x2+dp2-no-layers-first", 4, LLAMA, meshes("1 1 1 1 2  1 1 1 2 1", "0 3 1", MBS2
         + " --standalone-embedding-stage"), "llama"),
    Case("mesh-dp2+dp3-per-token", 5, LLAMA, meshes("1 1 1 2 1  1 1 1 3 1", "2 2",
         f"{PER_TOKEN} {MBS3}"), "llama-6"),
    Case("mesh-dp3+tp2-uneven-do", 5, TIED, meshes("1 1 1 3 1  2 1 1 1 1", "2 2",
         f"{DO} --global-batch-size 6"), "tied-6"),
    Case("mesh-dp3+tp2-dp2-tied-sp", 7, TIED, meshes("1 1 1 3 1  2 1 1 2 1", "2 2",
         f"{PER_TOKEN} --global-batch-size 6 --sequence-parallel"), "tied-6", backend=FASTER),
    Case("mesh-tp2-dp2+dp2-pp2-sp-do", 8, LLAMA, meshes("2 1 1 2 1  1 1 1 2 2", "2 1 1",
         f"{DO} --sequence-parallel"), "llama", backend=FASTER),
    Case("mesh-tp2+tp3-tied-sp-do", 5, BY_SIX, meshes("2 1 1 1 1  3 1 1 1 1", "2 2",
         f"{DO} --sequence-parallel"), "by-six", backend=FASTER),
    Case("mesh-cp2+dp2", 4, LLAMA, meshes("1 2 1 1 1  1 1 1 2 1", "2 2", MBS2), "llama"),
    Case("mesh-dp2+cp2-do", 4, LLAMA, meshes("1 1 1 2 1  1 2 1 1 1", "2 2", DO), "llama"),
    Case("mesh-1+tp2-cp2-sp", 5, LLAMA, meshes("1 1 1 1 1  2 2 1 1 1", "2 2",
         "--sequence-parallel"), "llama", backend=FASTER),
    Case("mesh-vpp2", 4, LLAMA, meshes(TP2_DP2, "2 2", f"{MBS2} "
         "--num-virtual-stages-per-pipeline-rank 2"), "llama"),
    Case("mesh-vpp2-tied-do-overlap", 4, TIED, meshes(DP2_TP2, "2 2", f"{OVERLAP} "
         "--num-virtual-stages-per-pipeline-rank 2"), "tied"),
    Case("mesh-bf16", 4, BF16, meshes(TP2_DP2, "3 1", MBS2), "bf16", 2e-2),
    Case("mesh-fp16-overflow-in-the-last", 4, FP16_1, meshes(TP2_DP2, "3 1", MBS2),
         "fp16-overflow", 2e-2, overflow=(3, 1)),
    Case("mesh-fp16-overflow-in-the-first-do", 4, FP16_1, meshes(TP2_DP2, "3 1", f"{MBS2} {DO}"),
         "fp16-overflow", 2e-2, overflow=(1, 1)),
    Case("mesh-apart", 4, APART, meshes(TP2_DP2, "3 1", f"{MBS2} {PER_TOKEN}"), "apart-per-token"),
    Case("mesh-compiled", 4, LLAMA, meshes(TP2_DP2, "3 1", f"{COMPILED} {MBS2}"), "llama"),
    Case("mesh-gpt2", 4, GPT2, meshes(TP2_DP2, "1 1", MBS2), "gpt2"),
    Case("mesh-recompute-auto", 4, LLAMA, meshes(TP2_DP2, "3 1", f"{MBS2} {AUTO} 0.0017"), "llama"),
    Case("mesh-recompute-by-stage", 4, LLAMA, meshes(TP2_DP2, "3 1", f"{MBS2} {FULL} 1 "
         f"{GRANULARITY} 1,2,1 1,1,0,1,1 {METHOD} 1,2,1 1,2,0 {LAYERS} 1,1,2,1,1 1,2,1"), "llama"),
    Case("mesh-moe-ep2+dp2-recompute", 4, EVERY_LOSS, meshes("1 1 2 2 1  1 1 1 2 1", "2 2",
         f"{FULL} 1 {GRANULARITY} 1,1,0,1,1 1,2,1"), "every-loss-mbs2"),
    Case("mesh-moe-dp2+tp2-ep2-do", 4, EVERY_LOSS, meshes("1 1 1 2 1  2 1 2 1 1", "2 2",
         f"{DO} --sequence-parallel --expert-tensor-parallel-size-per-process-mesh 1 1"),
         "every-loss-mbs2"),
    Case("mesh-moe-cp2+dp2-uneven", 4, EVERY_LOSS, meshes("1 2 1 1 1  1 1 1 2 1", "2 2",
         f"{MBS3} {PER_TOKEN}"), "every-loss-mbs3"),
    # Layers are shared out by what they take, which is measured first; and sizes chosen.
    Case("mesh-auto-moe-vpp2-do", 4, MOE, meshes("1 1 2 2 1  1 1 1 2 1", "auto", f"{DO} "
         "--num-virtual-stages-per-pipeline-rank 2"), "moe"),
    Case("mesh-auto-mtp-moe", 2, MTP_MOE, meshes("1 1 1 1 1  1 1 1 1 1", "auto"), "mtp-moe"),
    Case("mesh-auto-every-loss", 2, EVERY_LOSS, meshes("1 1 1 1 1  1 1 1 1 1", "auto", MBS2),
         "every-loss-mbs2"),
    Case("mesh-of-chosen-sizes", 4, LLAMA, meshes("ranks=2 ranks=2", "", DO), "llama"),
    # Data parallelism over unlike replicas: how many take which micro-batches, and how many.
    Case("shares-1x1+1x3", 2, LLAMA, shares("1 1 1 3"), "llama"),
    Case("shares-2x1+1x2-do-overlap", 2, LLAMA, shares("1 1 1 2", "1 2 1 1", OVERLAP), "llama"),
    Case("shares-tp2-1x3+1x1", 4, TIED, shares("1 3 1 1", "", f"{SP} {DO}"), "tied"),
    Case("shares-moe-1x1+1x3", 2, BY_SEQUENCE, shares("1 1 1 3"), "moe-by-sequence"),
    # A replica counts as much as it has tokens.
    Case("shares-pp2-1x1+1x3-mtp", 4, MTP, shares("1 1 1 3", "", PP2), "mtp-per-token"),
    Case("shares-three", 3, LLAMA, shares("2 1 1 2", "1 1 1 3 1 1", "--global-batch-size 6"),
         "llama-6"),
    Case("shares-pp2-1x2+2x1-do", 4, LLAMA, shares("1 2 1 1", "1 1 1 2", f"{PP2} {DO}"), "llama"),
    Case("shares-pp2-vpp2-1x4+1x2-tied-do-overlap", 4, TIED, shares("2 1", "1 4 1 2",
         f"{VPP2} {OVERLAP} --global-batch-size 6"), "tied-6"),
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


# Which activations are dropped depends on the layout, so that this run has a reference of its own.
DROPPED = Case(
    "mesh-dropout", 4, DROPPING, meshes(TP2_DP2, "3 1", f"{MBS2} --sequence-parallel"), ""
)
MESHES += (
    replace(DROPPED, name="mesh-dropout-recompute", layout=f"{DROPPED.layout} {FULL} 1",
            reference="mesh-dropout"),
)  # fmt: skip

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
