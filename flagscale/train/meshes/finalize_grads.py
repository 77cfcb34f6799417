"""Gradient finalization for a model on heterogeneous meshes.

Finalization reduces the gradients over data-parallel ranks after the backward pass. Within a mesh,
a number of ranks with the same parallel sizes, megatron.core's is used. Two reductions involve
several meshes: of an embedding that the first and the last stage hold, because it is tied to the
output layer or read by multi-token prediction layers, and of the number of tokens that divides a
step's gradients. The gradient norm is computed in :mod:`flagscale.train.optim.global_norm`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.process_groups_config import ProcessGroupCollection

from flagscale.train.state import unwrap_model


def build_group_collection() -> ProcessGroupCollection:
    """Return this rank's groups as pipeline schedules expect them.

    The groups for tied weights are omitted, because :class:`MeshGradientFinalizer` reduces these
    gradients.
    """
    groups = ProcessGroupCollection.use_mpu_process_groups()
    groups.embd = groups.pos_embd = None
    return groups


class MeshGradientFinalizer:
    """megatron.core's ``finalize_model_grads_func`` for heterogeneous meshes."""

    def __init__(
        self, chunks: Sequence[Any], tied_embedding_groups: Sequence[dist.ProcessGroup]
    ) -> None:
        """Find the tied weights of this rank.

        Args:
            chunks: model chunks of this rank.
            tied_embedding_groups: see :class:`~.groups.MeshGroups`.
        """
        self._tied_weights = list(_find_tied_weights(chunks)) if tied_embedding_groups else []
        self._tied_groups = tied_embedding_groups
        self._is_last_stage = parallel_state.is_pipeline_last_stage(ignore_virtual=True)

    def __call__(
        self,
        chunks: list[Any],
        num_tokens: torch.Tensor | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        force_all_reduce: bool = False,
    ) -> None:
        """Finalize the gradients; see ``megatron.core.distributed.finalize_model_grads``."""
        finalize_model_grads(
            chunks, None, pg_collection=pg_collection, force_all_reduce=force_all_reduce
        )
        for chunk, weight in self._tied_weights:
            self._reduce_tied_gradient(chunk, weight, force_all_reduce=force_all_reduce)
        if num_tokens is not None:
            total = self._count_tokens(num_tokens)
            for chunk in chunks:
                chunk.scale_gradients(1.0 / total)

    def _reduce_tied_gradient(
        self, chunk: Any, weight: torch.nn.Parameter, *, force_all_reduce: bool
    ) -> None:
        """Sum the gradient of a tied weight over the first and the last stage.

        The data-parallel replicas of a mesh have equal gradients, and each contributes an equal
        fraction. With a distributed optimizer, each contributes the slice that it owns; with
        ``force_all_reduce`` its gradients are complete nevertheless.
        """
        gradient = weight.main_grad  # type: ignore[attr-defined]
        if chunk.ddp_config.use_distributed_optimizer and not force_all_reduce:
            low, high = _owned_slice(chunk, weight, gradient)
            flat = gradient.view(-1)
            flat[:low].zero_()
            flat[high:].zero_()
        else:
            gradient.div_(parallel_state.get_data_parallel_world_size(with_context_parallel=True))
        # Slices of the gradient correspond to the groups, see MeshGroups.
        for rows, group in zip(
            gradient.chunk(len(self._tied_groups)), self._tied_groups, strict=True
        ):
            dist.all_reduce(rows, group=group)

    def _count_tokens(self, local_tokens: torch.Tensor) -> torch.Tensor:
        """Return the number of tokens of the step over all ranks, at least 1.

        Tensor-parallel ranks count the same tokens, so each contributes an equal fraction.
        """
        total = local_tokens.double() / parallel_state.get_tensor_model_parallel_world_size()
        if not self._is_last_stage:
            total = torch.zeros_like(total)
        dist.all_reduce(total)
        positive_total: torch.Tensor = total.clamp(min=1.0)
        return positive_total


def _find_tied_weights(chunks: Sequence[Any]) -> Iterator[tuple[Any, torch.nn.Parameter]]:
    """Yield the trained tied weights of this rank with their chunks.

    These are embeddings that are also the output layer or are also read at the end of the pipeline.
    """
    for chunk in chunks:
        model: Any = unwrap_model(chunk)
        if not (model.share_embeddings_and_output_weights or model.config.mtp_num_layers):
            return
        if model.pre_process or model.post_process:
            weight = model.shared_embedding_or_output_weight()
            if weight.requires_grad:  # frozen on both stages or on none
                yield chunk, weight


def _owned_slice(chunk: Any, weight: torch.nn.Parameter, gradient: torch.Tensor) -> tuple[int, int]:
    """Return start and end of this data-parallel rank's slice in the flat gradient of a weight.

    The rank owns a slice of the weight's bucket. Other parts of the gradient are not reduced.
    """
    group = chunk.param_to_bucket_group[weight]
    bucket = group.param_to_bucket[weight].grad_data
    slice_size = bucket.numel() // group.intra_distributed_optimizer_instance_size
    bucket_offset = (gradient.data_ptr() - bucket.data_ptr()) // gradient.element_size()
    low = group.intra_distributed_optimizer_instance_rank * slice_size - bucket_offset
    return min(max(low, 0), gradient.numel()), min(max(low + slice_size, 0), gradient.numel())
