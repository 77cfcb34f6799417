"""One gradient norm and one decision to skip a step over parameters that are laid out unlike.

Experts lie on other ranks than the rest of a layer, and heterogeneous meshes are all unlike each
other. megatron.core asks each part of its optimizer for a norm within that part's own groups, and
on unlike meshes one could skip a step that the others take.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state


def join(optimizer: Any, device: torch.device) -> None:
    """Let all parts of the optimizer of all ranks find one norm and skip a step together.

    Args:
        optimizer: a ``ChainedOptimizer``, with as many parts on every rank.
        device: of the gradients.
    """
    for part in optimizer.chained_optimizers:
        part.grad_stats_parallel_group = dist.group.WORLD
    optimizer.get_grad_norm = partial(_norm, optimizer, device)


@torch.no_grad()
def _norm(optimizer: Any, device: torch.device) -> torch.Tensor:
    """L2 norm of the whole model's gradients as one vector, equal on all ranks. A weight that
    several ranks hold counts once: each replica of its gradient as its share of one."""
    total = torch.zeros((), dtype=torch.float32, device=device)
    for part in optimizer.chained_optimizers:
        squares = _squares(part.get_main_grads_for_grad_norm())
        if squares is not None:
            total += squares / _replicas(part)
    dist.all_reduce(total)
    return total.sqrt()


def _squares(gradients: Iterable[torch.Tensor]) -> torch.Tensor | None:
    norms = torch._foreach_norm(list(gradients)) if gradients else []
    return torch.stack([norm.float() for norm in norms]).square().sum() if norms else None


def _replicas(part: Any) -> int:
    """How many ranks have the gradients that a part of the optimizer has."""
    if part.config.use_distributed_optimizer:
        return 1
    if any(group.get("is_expert_parallel") for group in part.param_groups):
        return int(parallel_state.get_expert_data_parallel_world_size())
    return int(parallel_state.get_data_parallel_world_size(with_context_parallel=True))
