"""Adam for megatron.core's distributed optimizer, based on torch's fused kernel.

Without Transformer Engine and Apex, megatron.core falls back to ``torch.optim.AdamW``, whose state
is not compatible: saving before the first step fails an assertion. After loading, all parameters
share one step tensor, so each step increments it once per parameter and the resumed run silently
diverges. Transformer Engine's ``FusedAdam`` keeps one integer ``step`` per parameter group and only
the two moments per parameter. This class follows that contract.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch

from flagscale.train.optim.group_optimizer import GroupOptimizer


class FusedAdam(GroupOptimizer):
    """Adam, or AdamW with ``adam_w_mode``, with one step count per parameter group."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
    ) -> None:
        self.adam_w_mode = adam_w_mode
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    def _update_group(self, group: dict[str, Any]) -> None:
        by_device_and_dtype: dict[Any, list[torch.Tensor]] = defaultdict(list)
        for parameter in group["params"]:
            if parameter.grad is not None:
                by_device_and_dtype[parameter.device, parameter.dtype].append(parameter)
        for parameters in by_device_and_dtype.values():
            states = [self._get_moments(parameter) for parameter in parameters]
            self._run_kernel(
                group,
                parameters,
                [parameter.grad for parameter in parameters],  # type: ignore[misc]
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
            )

    def _run_kernel(
        self,
        group: dict[str, Any],
        weights: list[torch.Tensor],
        gradients: list[torch.Tensor],
        first_moments: list[torch.Tensor],
        second_moments: list[torch.Tensor],
    ) -> None:
        """Update weights and moments, which are all on one device, with the options of a group."""
        kernel = torch._fused_adamw_ if self.adam_w_mode else torch._fused_adam_
        beta1, beta2 = group["betas"]
        # Filled on the device, because a copy from the host would synchronize.
        step = torch.full((), float(group["step"]), dtype=torch.float32, device=weights[0].device)
        kernel(
            weights,
            gradients,
            first_moments,
            second_moments,
            [],
            [step] * len(weights),
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )

    def _get_moments(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = self.state[parameter]
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return state
