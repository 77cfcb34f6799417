"""Lion: the update of a weight is the sign of a momentum.

Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from flagscale.train.optim.group_optimizer import GroupOptimizer
from flagscale.train.optim.states import FIRST_MOMENT

LION_BETAS = "lion_betas"
"""Key of a parameter group: the decay rates of the momentum in the update, and of the momentum."""
_BATCH_ELEMENTS = 1 << 24
"""Elements of parameters that are updated at once, at least one parameter: their updates need
memory.
"""


class Lion(GroupOptimizer):
    """Lion with decoupled weight decay."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.95, 0.98),
        weight_decay: float = 0.0,
    ) -> None:
        """Create the optimizer.

        Args:
            params: parameter groups, as torch's optimizers take them.
            lr: learning rate.
            betas: decay rates, see :data:`LION_BETAS`.
            weight_decay: weight decay.
        """
        super().__init__(params, {"lr": lr, LION_BETAS: betas, "weight_decay": weight_decay})

    def initialize_states(self) -> None:
        """Allocate the state of each parameter that has none."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self._get_momentum(parameter)

    def _update_group(self, group: dict[str, Any]) -> None:
        beta1, beta2 = group[LION_BETAS]
        for weights in _split(group["params"]):
            gradients: list[Any] = [weight.grad for weight in weights]
            momenta = [self._get_momentum(weight) for weight in weights]
            torch._foreach_mul_(weights, 1.0 - group["lr"] * group["weight_decay"])
            updates = torch._foreach_lerp(momenta, gradients, 1.0 - beta1)
            torch._foreach_sign_(updates)
            torch._foreach_lerp_(momenta, gradients, 1.0 - beta2)
            torch._foreach_add_(weights, updates, alpha=-group["lr"])

    def _get_momentum(self, parameter: torch.Tensor) -> torch.Tensor:
        state: dict[str, torch.Tensor] = self.state[parameter]
        if FIRST_MOMENT not in state:
            state[FIRST_MOMENT] = torch.zeros_like(parameter)
        return state[FIRST_MOMENT]


def _split(parameters: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield the parameters that have gradients in batches of one device and a limited size."""
    batch: list[torch.Tensor] = []
    size = 0
    for parameter in parameters:
        if parameter.grad is None:
            continue
        is_full = size + parameter.numel() > _BATCH_ELEMENTS
        if batch and (is_full or parameter.device != batch[0].device):
            yield batch
            batch, size = [], 0
        batch.append(parameter)
        size += parameter.numel()
    if batch:
        yield batch
