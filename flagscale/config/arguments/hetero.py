"""The arguments of heterogeneous training: one model on unlike devices.

Names and meanings are FlagScale's, so that its YAMLs need no change. What they make together is
:mod:`flagscale.config.arguments.meshes`. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from flagscale.config.arguments.spec import arg


@dataclass(frozen=True)
class Heterogeneous:
    """Meshes: which ranks hold which pipeline stages, each with parallel sizes of its own."""

    enable_hetero: bool = arg(
        False,
        "Train one model on meshes: pipeline stages on unlike devices, each mesh with its "
        "own tensor-, context-, expert- and data-parallel sizes and number of layers",
    )
    hetero_mode: str = arg(
        "pp",
        "What unlike devices share: pp, the layers of one pipeline (hetero_process_meshes); dp, a "
        "step's samples, each with the whole model (hetero_micro_batch_sizes)",
        choices=("pp", "dp"),
    )
    hetero_micro_batch_sizes: tuple[int, ...] | None = arg(
        None,
        "With hetero_mode: dp, pairs of how many replicas and the micro-batch size that each of "
        "them takes, in the order of ranks: 8 2 8 1. The loss is per token then "
        "(calculate_per_token_loss)",
    )
    hetero_num_microbatches: tuple[str, ...] | None = arg(
        None,
        "With hetero_mode: dp, pairs of how many replicas and the micro-batches that each of them "
        "takes a step; without it all take as many. auto: as many as suit the times that the "
        "replicas take in the first steps",
    )
    hetero_process_meshes: tuple[str, ...] | None = arg(
        None,
        "The meshes, in the pipeline's order: five sizes each (tensor, context, expert, data and "
        "pipeline parallel), or words such as tp=2,dp=4,layers=18,device_type=A800, which a YAML "
        "writes as a list of maps of device_type, tp, cp, ep, etp, dp, pp and layers (a list: of "
        "each stage). A micro-batch has micro_batch_size x dp of the first mesh sequences. "
        "ranks=16 alone leaves a mesh's sizes to be chosen, by measuring before training starts "
        "what takes how long; auto makes such a mesh of each type= of the hostfile. Then "
        "micro_batch_size is the most sequences that a rank takes at once",
    )
    hetero_pipeline_layer_split: tuple[str, ...] | None = arg(
        None,
        "Layers of each pipeline stage, over all meshes, or auto: those by which a step is "
        "shortest and fits, by what a layer takes on each mesh, which is measured before training "
        "starts and kept for the next time; without it all stages have as many",
    )
    hetero_device_types: tuple[str, ...] | None = arg(
        None,
        "The device type of each mesh, as the hostfile has it in `type=`: ranks are numbered by "
        "mesh, so hosts are ordered by these types first",
    )
    hetero_current_device_type: str | None = arg(
        None, "The device type of this rank's host; the launcher tells it from the hostfile"
    )
    hetero_use_cpu_communication: bool = arg(
        False,
        "What stages of different meshes send each other goes through the hosts' memory, by Gloo, "
        "whatever the communication backend",
    )
    hetero_eager_1f1b: bool = arg(
        False,
        "Every stage of the meshes does twice as many forward passes ahead as there are stages "
        "after it, instead of as many: what stages send each other over a slow link is hidden, and "
        "activations of as many more micro-batches are kept",
    )
    use_partial_reduce_for_shared_embedding: bool = arg(
        True,
        "Gradients of an embedding tied to the output layer are summed by the rows that ranks of "
        "the two ends share, never as a whole: always so here",
    )
    standalone_embedding_stage: bool = arg(
        False, "The first pipeline stage holds the embedding and no layers"
    )
    expert_tensor_parallel_size_per_process_mesh: tuple[int, ...] | None = arg(
        None, "Tensor parallel size of the experts, of each mesh", minimum=1
    )
