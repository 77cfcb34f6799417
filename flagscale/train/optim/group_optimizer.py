"""Base class of optimizers that update one parameter group after the other."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar, overload

import torch

_Method = TypeVar("_Method")


def _unwrap_method(method: _Method) -> _Method:
    """Return the original function of a method that torch has wrapped."""
    unwrapped: _Method = inspect.unwrap(method)  # type: ignore[arg-type]
    return unwrapped


class GroupOptimizer(torch.optim.Optimizer):
    """Optimizer with one step count per parameter group."""

    # Without torch's wrappers that exclude them from compilation. Nothing compiles these methods,
    # and the wrappers would load the compiler, which takes half a second.
    add_param_group = _unwrap_method(torch.optim.Optimizer.add_param_group)
    zero_grad = _unwrap_method(torch.optim.Optimizer.zero_grad)
    state_dict = _unwrap_method(torch.optim.Optimizer.state_dict)
    load_state_dict = _unwrap_method(torch.optim.Optimizer.load_state_dict)

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
                self._update_group(group)
        return loss

    @abstractmethod
    def _update_group(self, group: dict[str, Any]) -> None:
        """Update the parameters of a group."""
