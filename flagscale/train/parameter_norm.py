"""L2 norm of the model's parameters, for the log (``log_params_norm``)."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared

from flagscale.train.sharding.data_parallel import ShardedDataParallel


@torch.no_grad()
def compute_parameters_norm(chunks: list[DistributedDataParallel]) -> float:
    """Return the L2 norm of all weights of the model.

    Collective: all ranks call it. It synchronizes the device.

    A weight that several ranks hold counts once.
    """
    device = next(chunks[0].parameters()).device
    sum_of_squares = torch.zeros((), dtype=torch.float64, device=device)
    for chunk in chunks:
        for weight, values, replicas in _iter_values(chunk):
            if param_is_not_shared(weight) and param_is_not_tensor_parallel_duplicate(weight):
                sum_of_squares += values.detach().float().square().sum() / replicas
    dist.all_reduce(sum_of_squares)
    return math.sqrt(sum_of_squares.item())


def _iter_values(
    chunk: DistributedDataParallel,
) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor, int]]:
    """Yield each weight, the values of it that this rank keeps, and the number of ranks that keep
    the same.
    """
    if isinstance(chunk, ShardedDataParallel):
        replicas = int(chunk.ddp_config.num_distributed_optimizer_instances)
        for weight, shard in chunk.iter_weight_shards():
            yield weight, shard, replicas
        return
    for weight in chunk.parameters():
        yield weight, weight, _count_replicas(weight)


def _count_replicas(weight: torch.nn.Parameter) -> int:
    """Return the number of data-parallel ranks that hold a copy of ``weight``."""
    if getattr(weight, "allreduce", True):
        return int(parallel_state.get_data_parallel_world_size(with_context_parallel=True))
    return int(parallel_state.get_expert_data_parallel_world_size())
