"""Layouts over unlike meshes, and over unlike replicas."""

from __future__ import annotations

from dataclasses import replace

from support.layout_models import (
    APART,
    AUTO,
    BF16,
    BY_SEQUENCE,
    BY_SIX,
    COMPILED,
    DO,
    DROPPING,
    EVERY_LOSS,
    FASTER,
    FP16_1,
    FULL,
    GPT2,
    GRANULARITY,
    LAYERS,
    LLAMA,
    MBS2,
    MBS3,
    METHOD,
    MOE,
    MTP,
    MTP_MOE,
    MTP_TIED,
    OVERLAP,
    PER_TOKEN,
    PP2,
    SP,
    TIED,
    VPP2,
    Case,
)


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

# Which activations are dropped depends on the layout, so that this run has a reference of its own.
DROPPED = Case(
    "mesh-dropout", 4, DROPPING, meshes(TP2_DP2, "3 1", f"{MBS2} --sequence-parallel"), ""
)
MESHES += (
    replace(DROPPED, name="mesh-dropout-recompute", layout=f"{DROPPED.layout} {FULL} 1",
            reference="mesh-dropout"),
)  # fmt: skip
