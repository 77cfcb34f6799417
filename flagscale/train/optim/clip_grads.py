"""Gradient norm and clipping without synchronization of the host.

megatron.core's fallbacks read one number per tensor on the host. These functions process all
tensors at once and keep the norm on the device. They have the signatures of the functions of
``megatron.core.optimizer.clip_grads`` that they replace.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from flagscale.accelerators.device import current_device

_EPSILON = 1.0e-6
"""Added to the norm, as in megatron.core, so that a norm of zero is no division by zero."""


@torch.no_grad()
def compute_grad_norm(
    grads_for_norm: Sequence[torch.Tensor] | torch.Tensor,
    norm_type: float = 2,
    grad_stats_parallel_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Return the norm of all gradients as one vector, over the ranks of the group.

    Returns:
        Scalar fp32 tensor on the gradients' device, equal on all ranks of the group.
    """
    grads = [grads_for_norm] if isinstance(grads_for_norm, torch.Tensor) else list(grads_for_norm)
    order = float(norm_type)
    reduction = dist.ReduceOp.MAX if order == float("inf") else dist.ReduceOp.SUM
    if grads:
        norms = torch.stack(torch._foreach_norm(grads, order, dtype=torch.float32))
        total = norms.max() if order == float("inf") else norms.pow(order).sum()
    else:
        total = torch.zeros((), dtype=torch.float32, device=_current_device())
    dist.all_reduce(total, op=reduction, group=grad_stats_parallel_group)
    return total if order == float("inf") else total.pow(1.0 / order)


@torch.no_grad()
def clip_grads_by_norm(
    parameters: Iterable[torch.Tensor] | torch.Tensor,
    max_norm: float,
    total_norm: float | torch.Tensor,
    use_decoupled_grad: bool = False,
) -> None:
    """Scale the gradients of ``parameters`` in place to a norm of at most ``max_norm``."""
    parameter_list = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    attribute = "decoupled_grad" if use_decoupled_grad else "grad"
    optional_grads = [getattr(parameter, attribute, None) for parameter in parameter_list]
    grads = [grad.detach() for grad in optional_grads if grad is not None]
    if not grads:
        return
    norm = torch.as_tensor(total_norm, dtype=torch.float32, device=grads[0].device)
    factor = torch.clamp(max_norm / (norm + _EPSILON), max=1.0)
    torch._foreach_mul_(grads, factor)


def _current_device() -> torch.device:
    """Return the device for the zero contribution of a pipeline stage without gradients."""
    return current_device().torch_device
