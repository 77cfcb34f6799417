"""Global gradient norm and joint skipping of steps across different parallel layouts.

megatron.core's optimizer is a chain of optimizers, one for experts and one for the other layers,
because their parallel layouts differ. Each computes the gradient norm within its process groups. On
heterogeneous meshes, groups of ranks with different parallel sizes, one mesh could then skip a step
that the others take. Here all ranks and all optimizers of the chain use one norm.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state


def use_global_grad_norm(optimizer: Any, device: torch.device, *, is_hybrid: bool) -> None:
    """Make all chained optimizers of all ranks use one gradient norm and skip steps together.

    Args:
        optimizer: a ``ChainedOptimizer`` with the same number of optimizers on every rank.
        device: device of the gradients.
        is_hybrid: groups of ranks have a replica of all gradients each (hybrid sharding).
    """
    group = dist.group.WORLD
    if is_hybrid:
        group = parallel_state.get_intra_distributed_optimizer_instance_group()
    for chained in optimizer.chained_optimizers:
        chained.grad_stats_parallel_group = group
    optimizer.get_grad_norm = partial(_compute_global_norm, optimizer, device, group)


@torch.no_grad()
def _compute_global_norm(optimizer: Any, device: torch.device, group: Any) -> torch.Tensor:
    """Return the L2 norm of the whole model's gradients, equal on all ranks.

    A weight that several ranks hold counts once: each replica contributes an equal fraction.
    """
    sum_of_squares = torch.zeros((), dtype=torch.float32, device=device)
    for chained in optimizer.chained_optimizers:
        squares = _sum_squares(chained.get_main_grads_for_grad_norm())
        if squares is not None:
            sum_of_squares += squares / _count_replicas(chained)
    dist.all_reduce(sum_of_squares, group=group)
    return sum_of_squares.sqrt()


def _sum_squares(gradients: Iterable[torch.Tensor]) -> torch.Tensor | None:
    norms = list(torch._foreach_norm(list(gradients), dtype=torch.float32)) if gradients else []
    return torch.stack(norms).square().sum() if norms else None


def _count_replicas(chained: Any) -> int:
    """Return the number of ranks that hold the same gradients of a chained optimizer."""
    if chained.config.use_distributed_optimizer:
        return 1
    if any(group.get("is_expert_parallel") for group in chained.param_groups):
        return int(parallel_state.get_expert_data_parallel_world_size())
    return int(parallel_state.get_data_parallel_world_size(with_context_parallel=True))
