"""Layouts with heterogeneous meshes and with heterogeneous replicas."""

from __future__ import annotations

from dataclasses import replace

from support.layout_models import (
    AUTO_RECOMPUTE,
    BF16,
    COMPILED,
    DISTRIBUTED_OPTIMIZER,
    DIVISIBLE_BY_SIX,
    DROPOUT,
    FAST_BACKEND,
    FP16_1,
    FULL_RECOMPUTE,
    GPT2,
    LLAMA,
    MASKED_DOCUMENTS,
    MBS2,
    MBS3,
    MOE,
    MOE_ALL_LOSSES,
    MOE_SEQ_AUX_LOSS,
    MTP,
    MTP_MOE,
    MTP_TIED,
    OVERLAP,
    PER_TOKEN,
    PP2,
    RECOMPUTE_GRANULARITY,
    RECOMPUTE_LAYERS,
    RECOMPUTE_METHOD,
    SP,
    TIED,
    VPP2,
    LayoutCase,
)


def mesh_options(sizes: str, split: str = "", more: str = "") -> str:
    """Return the options of heterogeneous meshes: five sizes per mesh, and layers per stage."""
    options = f"--enable-hetero --hetero-process-meshes {sizes}"
    return f"{options}{f' --hetero-pipeline-layer-split {split}' if split else ''} {more}"


def replica_options(sizes: str, counts: str = "", extra: str = "") -> str:
    """Return the options of heterogeneous replicas.

    ``sizes``: pairs of a number of replicas and their micro-batch size.
    ``counts``: pairs of a number of replicas and their number of micro-batches.
    """
    options = f"--enable-hetero --hetero-mode dp --hetero-micro-batch-sizes {sizes}"
    return f"{options}{f' --hetero-num-microbatches {counts}' if counts else ''} {extra}"


# Pipeline stages on meshes with different layouts: tp cp ep dp pp of each mesh.
TP2_DP2 = "2 1 1 1 1  1 1 1 2 1"
DP2_TP2 = "1 1 1 2 1  2 1 1 1 1"
MESHES = (
    LayoutCase("mesh-tp2+dp2", 4, LLAMA, mesh_options(TP2_DP2, "3 1", MBS2), "llama"),
    LayoutCase(
        "mesh-tp2+dp2-sp-do",
        4,
        LLAMA,
        mesh_options(TP2_DP2, "3 1", f"{MBS2} {DISTRIBUTED_OPTIMIZER} --sequence-parallel"),
        "llama",
    ),
    LayoutCase(
        "mesh-tp2+dp2-through-hosts",
        4,
        LLAMA,
        mesh_options(TP2_DP2, "3 1", f"{MBS2} --hetero-use-cpu-communication"),
        "llama",
        backend=FAST_BACKEND,
    ),
    LayoutCase("mesh-dp2+tp2-tied", 4, TIED, mesh_options(DP2_TP2, "1 3"), "tied"),
    LayoutCase("mesh-tp2+dp2-mtp", 4, MTP, mesh_options(TP2_DP2, "3 1", MBS2), "mtp"),
    LayoutCase(
        "mesh-dp2+tp2-mtp-tied-sp-do",
        4,
        MTP_TIED,
        mesh_options(DP2_TP2, "1 3", f"{DISTRIBUTED_OPTIMIZER} --sequence-parallel"),
        "mtp-tied",
    ),
    LayoutCase(
        "mesh-ep2+ep1-mtp-moe",
        4,
        MTP_MOE,
        mesh_options("1 1 2 2 1  2 1 1 1 1", "2 2", "--sequence-parallel"),
        "mtp-moe",
    ),
    LayoutCase(
        "mesh-dp2+tp2-tied-sp-do-overlap",
        4,
        TIED,
        mesh_options(DP2_TP2, "1 3", f"{OVERLAP} --sequence-parallel"),
        "tied",
    ),
    LayoutCase(
        "mesh-1+1+1-eager",
        3,
        LLAMA,
        mesh_options("1 1 1 1 1  1 1 1 1 1  1 1 1 1 1", "1 2 1", "--hetero-eager-1f1b"),
        "llama",
    ),
    LayoutCase(
        "mesh-1x2+dp2-no-layers-first",
        4,
        LLAMA,
        mesh_options("1 1 1 1 2  1 1 1 2 1", "0 3 1", MBS2 + " --standalone-embedding-stage"),
        "llama",
    ),
    LayoutCase(
        "mesh-dp2+dp3-per-token",
        5,
        LLAMA,
        mesh_options("1 1 1 2 1  1 1 1 3 1", "2 2", f"{PER_TOKEN} {MBS3}"),
        "llama-6",
    ),
    LayoutCase(
        "mesh-dp3+tp2-uneven-do",
        5,
        TIED,
        mesh_options(
            "1 1 1 3 1  2 1 1 1 1", "2 2", f"{DISTRIBUTED_OPTIMIZER} --global-batch-size 6"
        ),
        "tied-6",
    ),
    LayoutCase(
        "mesh-dp3+tp2-dp2-tied-sp",
        7,
        TIED,
        mesh_options(
            "1 1 1 3 1  2 1 1 2 1", "2 2", f"{PER_TOKEN} --global-batch-size 6 --sequence-parallel"
        ),
        "tied-6",
        backend=FAST_BACKEND,
    ),
    LayoutCase(
        "mesh-tp2-dp2+dp2-pp2-sp-do",
        8,
        LLAMA,
        mesh_options(
            "2 1 1 2 1  1 1 1 2 2", "2 1 1", f"{DISTRIBUTED_OPTIMIZER} --sequence-parallel"
        ),
        "llama",
        backend=FAST_BACKEND,
    ),
    LayoutCase(
        "mesh-tp2+tp3-tied-sp-do",
        5,
        DIVISIBLE_BY_SIX,
        mesh_options("2 1 1 1 1  3 1 1 1 1", "2 2", f"{DISTRIBUTED_OPTIMIZER} --sequence-parallel"),
        "by-six",
        backend=FAST_BACKEND,
    ),
    LayoutCase(
        "mesh-cp2+dp2", 4, LLAMA, mesh_options("1 2 1 1 1  1 1 1 2 1", "2 2", MBS2), "llama"
    ),
    LayoutCase(
        "mesh-dp2+cp2-do",
        4,
        LLAMA,
        mesh_options("1 1 1 2 1  1 2 1 1 1", "2 2", DISTRIBUTED_OPTIMIZER),
        "llama",
    ),
    LayoutCase(
        "mesh-1+tp2-cp2-sp",
        5,
        LLAMA,
        mesh_options("1 1 1 1 1  2 2 1 1 1", "2 2", "--sequence-parallel"),
        "llama",
        backend=FAST_BACKEND,
    ),
    LayoutCase(
        "mesh-vpp2",
        4,
        LLAMA,
        mesh_options(TP2_DP2, "2 2", f"{MBS2} --num-virtual-stages-per-pipeline-rank 2"),
        "llama",
    ),
    LayoutCase(
        "mesh-vpp2-tied-do-overlap",
        4,
        TIED,
        mesh_options(DP2_TP2, "2 2", f"{OVERLAP} --num-virtual-stages-per-pipeline-rank 2"),
        "tied",
    ),
    LayoutCase("mesh-bf16", 4, BF16, mesh_options(TP2_DP2, "3 1", MBS2), "bf16", 2e-2),
    LayoutCase(
        "mesh-fp16-overflow-in-the-last",
        4,
        FP16_1,
        mesh_options(TP2_DP2, "3 1", MBS2),
        "fp16-overflow",
        2e-2,
        overflow=(3, 1),
    ),
    LayoutCase(
        "mesh-fp16-overflow-in-the-first-do",
        4,
        FP16_1,
        mesh_options(TP2_DP2, "3 1", f"{MBS2} {DISTRIBUTED_OPTIMIZER}"),
        "fp16-overflow",
        2e-2,
        overflow=(1, 1),
    ),
    LayoutCase(
        "mesh-apart",
        4,
        MASKED_DOCUMENTS,
        mesh_options(TP2_DP2, "3 1", f"{MBS2} {PER_TOKEN}"),
        "apart-per-token",
    ),
    LayoutCase(
        "mesh-compiled", 4, LLAMA, mesh_options(TP2_DP2, "3 1", f"{COMPILED} {MBS2}"), "llama"
    ),
    LayoutCase("mesh-gpt2", 4, GPT2, mesh_options(TP2_DP2, "1 1", MBS2), "gpt2"),
    LayoutCase(
        "mesh-recompute-auto",
        4,
        LLAMA,
        mesh_options(TP2_DP2, "3 1", f"{MBS2} {AUTO_RECOMPUTE} 0.0017"),
        "llama",
    ),
    LayoutCase(
        "mesh-recompute-by-stage",
        4,
        LLAMA,
        mesh_options(
            TP2_DP2,
            "3 1",
            f"{MBS2} {FULL_RECOMPUTE} 1 "
            f"{RECOMPUTE_GRANULARITY} 1,2,1 1,1,0,1,1 {RECOMPUTE_METHOD} 1,2,1 1,2,0 "
            f"{RECOMPUTE_LAYERS} 1,1,2,1,1 1,2,1",
        ),
        "llama",
    ),
    LayoutCase(
        "mesh-moe-ep2+dp2-recompute",
        4,
        MOE_ALL_LOSSES,
        mesh_options(
            "1 1 2 2 1  1 1 1 2 1",
            "2 2",
            f"{FULL_RECOMPUTE} 1 {RECOMPUTE_GRANULARITY} 1,1,0,1,1 1,2,1",
        ),
        "every-loss-mbs2",
    ),
    LayoutCase(
        "mesh-moe-dp2+tp2-ep2-do",
        4,
        MOE_ALL_LOSSES,
        mesh_options(
            "1 1 1 2 1  2 1 2 1 1",
            "2 2",
            f"{DISTRIBUTED_OPTIMIZER} --sequence-parallel "
            "--expert-tensor-parallel-size-per-process-mesh 1 1",
        ),
        "every-loss-mbs2",
    ),
    LayoutCase(
        "mesh-moe-cp2+dp2-uneven",
        4,
        MOE_ALL_LOSSES,
        mesh_options("1 2 1 1 1  1 1 1 2 1", "2 2", f"{MBS3} {PER_TOKEN}"),
        "every-loss-mbs3",
    ),
    # Automatic choice of layers per stage and of mesh sizes, by measured costs.
    LayoutCase(
        "mesh-auto-moe-vpp2-do",
        4,
        MOE,
        mesh_options(
            "1 1 2 2 1  1 1 1 2 1",
            "auto",
            f"{DISTRIBUTED_OPTIMIZER} --num-virtual-stages-per-pipeline-rank 2",
        ),
        "moe",
    ),
    LayoutCase(
        "mesh-auto-mtp-moe", 2, MTP_MOE, mesh_options("1 1 1 1 1  1 1 1 1 1", "auto"), "mtp-moe"
    ),
    LayoutCase(
        "mesh-auto-every-loss",
        2,
        MOE_ALL_LOSSES,
        mesh_options("1 1 1 1 1  1 1 1 1 1", "auto", MBS2),
        "every-loss-mbs2",
    ),
    LayoutCase(
        "mesh-of-chosen-sizes",
        4,
        LLAMA,
        mesh_options("ranks=2 ranks=2", "", DISTRIBUTED_OPTIMIZER),
        "llama",
    ),
    # Heterogeneous replicas: numbers of replicas, micro-batch sizes and micro-batches.
    LayoutCase("shares-1x1+1x3", 2, LLAMA, replica_options("1 1 1 3"), "llama"),
    LayoutCase(
        "shares-2x1+1x2-do-overlap",
        2,
        LLAMA,
        replica_options("1 1 1 2", "1 2 1 1", OVERLAP),
        "llama",
    ),
    LayoutCase(
        "shares-tp2-1x3+1x1",
        4,
        TIED,
        replica_options("1 3 1 1", "", f"{SP} {DISTRIBUTED_OPTIMIZER}"),
        "tied",
    ),
    LayoutCase(
        "shares-moe-1x1+1x3", 2, MOE_SEQ_AUX_LOSS, replica_options("1 1 1 3"), "moe-by-sequence"
    ),
    # Replicas are weighted by their tokens.
    LayoutCase(
        "shares-pp2-1x1+1x3-mtp", 4, MTP, replica_options("1 1 1 3", "", PP2), "mtp-per-token"
    ),
    LayoutCase(
        "shares-three",
        3,
        LLAMA,
        replica_options("2 1 1 2", "1 1 1 3 1 1", "--global-batch-size 6"),
        "llama-6",
    ),
    LayoutCase(
        "shares-pp2-1x2+2x1-do",
        4,
        LLAMA,
        replica_options("1 2 1 1", "1 1 1 2", f"{PP2} {DISTRIBUTED_OPTIMIZER}"),
        "llama",
    ),
    LayoutCase(
        "shares-pp2-vpp2-1x4+1x2-tied-do-overlap",
        4,
        TIED,
        replica_options("2 1", "1 4 1 2", f"{VPP2} {OVERLAP} --global-batch-size 6"),
        "tied-6",
    ),
)

# Dropout masks depend on the layout, so this case has a separate reference.
MESH_DROPOUT = LayoutCase(
    "mesh-dropout", 4, DROPOUT, mesh_options(TP2_DP2, "3 1", f"{MBS2} --sequence-parallel"), ""
)
MESHES += (
    replace(
        MESH_DROPOUT,
        name="mesh-dropout-recompute",
        layout=f"{MESH_DROPOUT.layout} {FULL_RECOMPUTE} 1",
        reference="mesh-dropout",
    ),
)
