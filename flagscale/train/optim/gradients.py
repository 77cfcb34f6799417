"""Gradient norm and clipping that leave the host free.

megatron.core's fallbacks read one number a tensor back to the host. These work on all tensors at
once and keep the norm on the device, so that the host goes on to prepare the next step. They have
the signatures of the functions of ``megatron.core.optimizer.clip_grads`` that they replace.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from flagscale.accelerators.device import current

_EPSILON = 1.0e-6


@torch.no_grad()
def gradient_norm(
    grads_for_norm: Sequence[torch.Tensor] | torch.Tensor,
    norm_type: float = 2,
    grad_stats_parallel_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """The norm of all gradients as one vector, over the ranks of the group.

    Returns:
        A 0-dimensional fp32 tensor on the gradients' device, equal on all ranks of the group.
    """
    grads = [grads_for_norm] if isinstance(grads_for_norm, torch.Tensor) else list(grads_for_norm)
    order = float(norm_type)
    reduction = dist.ReduceOp.MAX if order == float("inf") else dist.ReduceOp.SUM
    if grads:
        norms = torch.stack([norm.float() for norm in torch._foreach_norm(grads, order)])
        total = norms.max() if order == float("inf") else norms.pow(order).sum()
    else:
        total = torch.zeros((), dtype=torch.float32, device=_current_device())
    dist.all_reduce(total, op=reduction, group=grad_stats_parallel_group)
    return total if order == float("inf") else total.pow(1.0 / order)


@torch.no_grad()
def clip(
    parameters: Iterable[torch.Tensor] | torch.Tensor,
    max_norm: float,
    total_norm: float | torch.Tensor,
    use_decoupled_grad: bool = False,
) -> None:
    """Scale the parameters' gradients in place so that their norm is at most ``max_norm``."""
    owners = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    attribute = "decoupled_grad" if use_decoupled_grad else "grad"
    found = [getattr(owner, attribute, None) for owner in owners]
    grads = [grad.detach() for grad in found if grad is not None]
    if not grads:
        return
    norm = torch.as_tensor(total_norm, dtype=torch.float32, device=grads[0].device)
    factor = torch.clamp(max_norm / (norm + _EPSILON), max=1.0)
    torch._foreach_mul_(grads, factor)


def _current_device() -> torch.device:
    """Where an empty stage's share of a reduction has to live."""
    return current().torch_device
