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
    dense: list[torch.Tensor] = []
    expert: list[torch.Tensor] = []
    for chunk in chunks:
        for weight in chunk.parameters():
            if param_is_not_shared(weight) and param_is_not_tensor_parallel_duplicate(weight):
                own = dense if getattr(weight, "allreduce", True) else expert
                own.append(weight.detach().float().square().sum())
    device = next(chunks[0].parameters()).device
    groups = [
        (dense, parallel_state.get_model_parallel_group()),
        (expert, parallel_state.get_expert_tensor_model_pipeline_parallel_group()),
    ]
    total = 0.0
    for squares, group in groups:
        share = torch.stack(squares).sum() if squares else torch.zeros((), device=device)
        dist.all_reduce(share, group=group)
        total += float(share.item())
    return math.sqrt(total)
