"""Conditional compilation of functions."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch

from flagscale.accelerators.registry import list_accelerators
from flagscale.train.device import compile_disabled

_P = ParamSpec("_P")
_R = TypeVar("_R")
# Looked up once: torch.compile cannot trace a search through installed packages.
_COMPILED_DEVICE_TYPES = frozenset(kind.torch_type for kind in list_accelerators() if kind.compiles)


@functools.cache
def host_compile_obstacle() -> str | None:
    """Return the reason why this host cannot compile for a device, or None.

    Triton builds a small Python extension with a C compiler for every kernel it launches.
    """
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if not any(shutil.which(name) for name in (os.environ.get("CC", ""), "gcc", "clang")):
        return "there is no C compiler (gcc, clang, or what CC names)"
    include = sysconfig.get_paths()["include"]
    if not (Path(include) / "Python.h").is_file():
        return f"Python's headers are not installed ({include}/Python.h)"
    return None


def _limit_recompiles(limit: int | None) -> AbstractContextManager[None]:
    if limit is None:
        return nullcontext()
    context: AbstractContextManager[None] = torch._dynamo.config.patch(recompile_limit=limit)
    return context


def compiled_if_faster(
    *, dynamic: bool = False, max_shapes: int | None = None
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Compile a function for devices that benefit, according to the device of its first argument.

    On a CPU compilation takes longer than it saves.

    Args:
        dynamic: compile once for all shapes instead of once per shape.
        max_shapes: maximum number of shapes; more are an error. None uses torch's limit of 8.
    """

    def decorator(function: Callable[_P, _R]) -> Callable[_P, _R]:
        if compile_disabled():
            return function  # avoids loading torch's compiler
        compiled = torch.compile(function, fullgraph=True, dynamic=dynamic)

        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            first = args[0]
            benefits = (
                isinstance(first, torch.Tensor) and first.device.type in _COMPILED_DEVICE_TYPES
            )
            if benefits and host_compile_obstacle() is None:
                with _limit_recompiles(max_shapes):
                    return compiled(*args, **kwargs)
            return function(*args, **kwargs)

        return call

    return decorator
