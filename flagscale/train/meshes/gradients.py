"""Gradients of a model whose parts are laid out unlike each other.

What megatron.core does inside a mesh it does here too. Beyond one mesh there are an embedding that
both ends of the pipeline hold, tied to the output layer or read by layers that predict further
tokens, and the number of tokens by which a step's gradients may be divided. One norm for all is
:mod:`flagscale.train.optim.joint`'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.process_groups_config import ProcessGroupCollection

from flagscale.train.state import unwrap


def collection() -> ProcessGroupCollection:
    """This rank's groups, as the schedules want to be given them: without those of tied weights,
    whose gradients :class:`Finalize` sums."""
    groups = ProcessGroupCollection.use_mpu_process_groups()
    groups.embd = groups.pos_embd = None
    return groups


class Finalize:
    """Completes a step's gradients: megatron.core's ``finalize_model_grads_func``."""

    def __init__(self, chunks: Sequence[Any], ends: Sequence[dist.ProcessGroup]) -> None:
        """``ends``: for each piece of a tied embedding's rows here, the ranks that have it too."""
        self._tied = list(_tied(chunks)) if ends else []
        self._ends = ends
        self._reports_tokens = parallel_state.is_pipeline_last_stage(ignore_virtual=True)

    def __call__(
        self,
        chunks: list[Any],
        num_tokens: torch.Tensor | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        force_all_reduce: bool = False,
    ) -> None:
        """See ``megatron.core.distributed.finalize_model_grads``."""
        finalize_model_grads(
            chunks, None, pg_collection=pg_collection, force_all_reduce=force_all_reduce
        )
        for chunk, weight in self._tied:
            self._sum(chunk, weight, whole=force_all_reduce)
        if num_tokens is not None:
            total = self._tokens(num_tokens)
            for chunk in chunks:
                chunk.scale_gradients(1.0 / total)

    def _sum(self, chunk: Any, weight: torch.nn.Parameter, *, whole: bool) -> None:
        """Sum a tied weight's gradient over both ends: of every mesh's replicas, which have the
        same, each its share of one; with a distributed optimizer the slice that each has."""
        gradient = weight.main_grad  # type: ignore[attr-defined]
        if chunk.ddp_config.use_distributed_optimizer and not whole:
            low, high = _own_slice(chunk, weight, gradient)
            flat = gradient.view(-1)
            flat[:low].zero_()
            flat[high:].zero_()
        else:
            gradient.div_(parallel_state.get_data_parallel_world_size(with_context_parallel=True))
        for rows, group in zip(gradient.chunk(len(self._ends)), self._ends, strict=True):
            dist.all_reduce(rows, group=group)

    def _tokens(self, own: torch.Tensor) -> torch.Tensor:
        """Tokens of the step over all ranks; tensor-parallel ranks count the same ones."""
        total = own.double() / parallel_state.get_tensor_model_parallel_world_size()
        if not self._reports_tokens:
            total = torch.zeros_like(total)
        dist.all_reduce(total)
        at_least_one: torch.Tensor = total.clamp(min=1.0)
        return at_least_one


def _tied(chunks: Sequence[Any]) -> Iterator[tuple[Any, torch.nn.Parameter]]:
    """The weights of this rank that both ends of the pipeline have, each with the chunk it belongs
    to: an embedding that is the output layer too, or that is read at the end as well."""
    for chunk in chunks:
        model: Any = unwrap(chunk)
        if not (model.share_embeddings_and_output_weights or model.config.mtp_num_layers):
            return
        if model.pre_process or model.post_process:
            yield chunk, model.shared_embedding_or_output_weight()


def _own_slice(chunk: Any, weight: torch.nn.Parameter, gradient: torch.Tensor) -> tuple[int, int]:
    """Where in a weight's flat gradient the slice lies that this data-parallel rank has of its
    bucket; the others' are in it too, not summed."""
    group = chunk.param_to_bucket_group[weight]
    bucket = group.param_to_bucket[weight].grad_data
    share = bucket.numel() // group.intra_distributed_optimizer_instance_size
    before = (gradient.data_ptr() - bucket.data_ptr()) // gradient.element_size()
    low = group.intra_distributed_optimizer_instance_rank * share - before
    return min(max(low, 0), gradient.numel()), min(max(low + share, 0), gradient.numel())
