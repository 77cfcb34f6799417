"""Test cases of heterogeneous layouts.

A heterogeneous mesh is a number of ranks with its own parallel sizes that holds consecutive
pipeline stages. Heterogeneous replicas are data-parallel replicas with different micro-batches.
"""

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
    FP16_HYSTERESIS_1,
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
    TIED,
    TP2_SP,
    VPP2,
    LayoutCase,
)


def mesh_options(sizes: str, layer_split: str = "", extra: str = "") -> str:
    """Return the options of heterogeneous meshes.

    Args:
        sizes: tp cp ep dp pp of each mesh.
        layer_split: number of layers of each stage; empty for an automatic split.
        extra: other options.
    """
    options = f"--enable-hetero --hetero-process-meshes {sizes}"
    return (
        f"{options}{f' --hetero-pipeline-layer-split {layer_split}' if layer_split else ''} {extra}"
    )


def replica_options(sizes: str, counts: str = "", extra: str = "") -> str:
    """Return the options of heterogeneous replicas.

    Args:
        sizes: pairs of a number of replicas and their micro-batch size.
        counts: pairs of a number of replicas and their number of micro-batches.
        extra: other options.
    """
    options = f"--enable-hetero --hetero-mode dp --hetero-micro-batch-sizes {sizes}"
    return f"{options}{f' --hetero-num-microbatches {counts}' if counts else ''} {extra}"


# Pipeline stages on meshes with different layouts: tp cp ep dp pp of each mesh.
TP2_DP2 = "2 1 1 1 1  1 1 1 2 1"
DP2_TP2 = "1 1 1 2 1  2 1 1 1 1"
MESH_CASES = (
    LayoutCase("mesh-tp2+dp2", 4, LLAMA, mesh_options(TP2_DP2, "3 1", MBS2), "llama"),
    LayoutCase(
        "mesh-tp2+dp2-sp-do",
        4,
        LLAMA,
        mesh_options(TP2_DP2, "3 1", f"{MBS2} {DISTRIBUTED_OPTIMIZER} --sequence-parallel"),
        "llama",
    ),
    LayoutCase(
        "mesh-tp2+dp2-via-host-memory",
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
        "mesh-1x2+dp2-empty-first-stage",
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
        "divisible-by-six",
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
        "mesh-fp16-overflow-on-last-stage",
        4,
        FP16_HYSTERESIS_1,
        mesh_options(TP2_DP2, "3 1", MBS2),
        "fp16-overflow",
        2e-2,
        overflow=(3, 1),
    ),
    LayoutCase(
        "mesh-fp16-overflow-on-first-stage-do",
        4,
        FP16_HYSTERESIS_1,
        mesh_options(TP2_DP2, "3 1", f"{MBS2} {DISTRIBUTED_OPTIMIZER}"),
        "fp16-overflow",
        2e-2,
        overflow=(1, 1),
    ),
    LayoutCase(
        "mesh-masked",
        4,
        MASKED_DOCUMENTS,
        mesh_options(TP2_DP2, "3 1", f"{MBS2} {PER_TOKEN}"),
        "masked-per-token",
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
        "mesh-recompute-per-stage",
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
        "all-losses-mbs2",
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
        "all-losses-mbs2",
    ),
    LayoutCase(
        "mesh-moe-cp2+dp2-uneven",
        4,
        MOE_ALL_LOSSES,
        mesh_options("1 2 1 1 1  1 1 1 2 1", "2 2", f"{MBS3} {PER_TOKEN}"),
        "all-losses-mbs3",
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
        "mesh-auto-all-losses",
        2,
        MOE_ALL_LOSSES,
        mesh_options("1 1 1 1 1  1 1 1 1 1", "auto", MBS2),
        "all-losses-mbs2",
    ),
    LayoutCase(
        "mesh-auto-sizes",
        4,
        LLAMA,
        mesh_options("ranks=2 ranks=2", "", DISTRIBUTED_OPTIMIZER),
        "llama",
    ),
    # Heterogeneous replicas: numbers of replicas, micro-batch sizes and micro-batches.
    LayoutCase("replicas-1x1+1x3", 2, LLAMA, replica_options("1 1 1 3"), "llama"),
    LayoutCase(
        "replicas-2x1+1x2-do-overlap",
        2,
        LLAMA,
        replica_options("1 1 1 2", "1 2 1 1", OVERLAP),
        "llama",
    ),
    LayoutCase(
        "replicas-tp2-1x3+1x1",
        4,
        TIED,
        replica_options("1 3 1 1", "", f"{TP2_SP} {DISTRIBUTED_OPTIMIZER}"),
        "tied",
    ),
    LayoutCase(
        "replicas-moe-1x1+1x3", 2, MOE_SEQ_AUX_LOSS, replica_options("1 1 1 3"), "moe-seq-aux-loss"
    ),
    # Replicas are weighted by their tokens.
    LayoutCase(
        "replicas-pp2-1x1+1x3-mtp", 4, MTP, replica_options("1 1 1 3", "", PP2), "mtp-per-token"
    ),
    LayoutCase(
        "replicas-three",
        3,
        LLAMA,
        replica_options("2 1 1 2", "1 1 1 3 1 1", "--global-batch-size 6"),
        "llama-6",
    ),
    LayoutCase(
        "replicas-pp2-1x2+2x1-do",
        4,
        LLAMA,
        replica_options("1 2 1 1", "1 1 1 2", f"{PP2} {DISTRIBUTED_OPTIMIZER}"),
        "llama",
    ),
    LayoutCase(
        "replicas-pp2-vpp2-1x4+1x2-tied-do-overlap",
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
MESH_CASES += (
    replace(
        MESH_DROPOUT,
        name="mesh-dropout-recompute",
        layout=f"{MESH_DROPOUT.layout} {FULL_RECOMPUTE} 1",
        reference="mesh-dropout",
    ),
)
