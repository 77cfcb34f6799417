"""Adam as megatron.core's distributed optimizer expects it, on torch's fused kernel.

Without Transformer Engine and Apex, megatron.core falls back on ``torch.optim.AdamW``, whose
state does not fit the rest of it: saving before the first step fails an assertion, and after
loading, all parameters share one step tensor, so that Adam's step advances once for each
parameter and the resumed run silently diverges. Transformer Engine's ``FusedAdam`` instead keeps
one whole ``step`` a parameter group and no state but the two moments a parameter. This class has
that contract.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, overload

import torch

_Method = TypeVar("_Method")


def _plain(method: _Method) -> _Method:
    """A method that torch has wrapped, as it was."""
    plain: _Method = inspect.unwrap(method)  # type: ignore[arg-type]
    return plain


class FusedAdam(torch.optim.Optimizer):
    """Adam (or with ``adam_w_mode`` AdamW) with bias correction; the step lives in the group."""

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

    # Without what keeps torch's compiler out of them: nobody compiles them, and for that it would
    # be loaded, which takes half a second.
    add_param_group = _plain(torch.optim.Optimizer.add_param_group)
    zero_grad = _plain(torch.optim.Optimizer.zero_grad)
    state_dict = _plain(torch.optim.Optimizer.state_dict)
    load_state_dict = _plain(torch.optim.Optimizer.load_state_dict)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group["params"]:
                group["step"] = int(group.get("step", 0)) + 1
                self._update(group)
        return loss

    def _update(self, group: dict[str, Any]) -> None:
        kernel = torch._fused_adamw_ if self.adam_w_mode else torch._fused_adam_
        alike: dict[Any, list[torch.Tensor]] = defaultdict(list)
        for parameter in group["params"]:
            if parameter.grad is not None:
                alike[parameter.device, parameter.dtype].append(parameter)
        beta1, beta2 = group["betas"]
        for (device, _), parameters in alike.items():
            states = [self._moments(parameter) for parameter in parameters]
            # Filled on the device: a copy from the host would wait for it.
            step = torch.full((), float(group["step"]), dtype=torch.float32, device=device)
            kernel(
                parameters,
                [parameter.grad for parameter in parameters],  # type: ignore[misc]
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [step] * len(parameters),
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
            )

    def _moments(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = self.state[parameter]
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return state
