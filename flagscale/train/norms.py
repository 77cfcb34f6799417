"""The norm of all weights."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared


@torch.no_grad()
def parameters_norm(chunks: list[DistributedDataParallel]) -> float:
    """L2 norm of the whole model's weights as one vector. All ranks call it; waits for the device.

    A weight that several ranks hold counts once.
    """
    device = next(chunks[0].parameters()).device
    total = torch.zeros((), dtype=torch.float64, device=device)
    for chunk in chunks:
        for weight in chunk.parameters():
            if param_is_not_shared(weight) and param_is_not_tensor_parallel_duplicate(weight):
                total += weight.detach().float().square().sum() / _replicas(weight)
    dist.all_reduce(total)
    return math.sqrt(total.item())


def _replicas(weight: torch.nn.Parameter) -> int:
    """How many data-parallel ranks have the same."""
    if getattr(weight, "allreduce", True):
        return int(parallel_state.get_data_parallel_world_size(with_context_parallel=True))
    return int(parallel_state.get_expert_data_parallel_world_size())
