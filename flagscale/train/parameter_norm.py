"""L2 norm of the model's parameters, for the log (``log_params_norm``)."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared


@torch.no_grad()
def compute_parameters_norm(chunks: list[DistributedDataParallel]) -> float:
    """Return the L2 norm of all weights of the model.

    Collective: all ranks call it. It synchronizes the device.

    A weight that several ranks hold counts once.
    """
    device = next(chunks[0].parameters()).device
    sum_of_squares = torch.zeros((), dtype=torch.float64, device=device)
    for chunk in chunks:
        for weight in chunk.parameters():
            if param_is_not_shared(weight) and param_is_not_tensor_parallel_duplicate(weight):
                sum_of_squares += weight.detach().float().square().sum() / _count_replicas(weight)
    dist.all_reduce(sum_of_squares)
    return math.sqrt(sum_of_squares.item())


def _count_replicas(weight: torch.nn.Parameter) -> int:
    """Return the number of data-parallel ranks that hold a copy of ``weight``."""
    if getattr(weight, "allreduce", True):
        return int(parallel_state.get_data_parallel_world_size(with_context_parallel=True))
    return int(parallel_state.get_expert_data_parallel_world_size())
