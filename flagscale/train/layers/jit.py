"""Functions that are compiled where it pays."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")


def compiled_on_cuda(*, dynamic: bool = False) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Compile a function where its first argument is a tensor on CUDA. On a CPU compiling takes
    longer than it saves. ``dynamic``: once for all sizes, not once for each."""

    def compiling(function: Callable[_P, _R]) -> Callable[_P, _R]:
        fast = torch.compile(function, fullgraph=True, dynamic=dynamic)

        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            first = args[0]
            if isinstance(first, torch.Tensor) and first.is_cuda:
                return fast(*args, **kwargs)
            return function(*args, **kwargs)

        return call

    return compiling
