"""Compilation of single functions with ``torch.compile``, on devices on which it is faster."""

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
# Looked up once: torch.compile cannot trace the search through installed packages for adapters.
_COMPILED_DEVICE_TYPES = frozenset(kind.torch_type for kind in list_accelerators() if kind.compiles)


@functools.cache
def explain_missing_compiler() -> str | None:
    """Return the reason why this host cannot compile for a device, or None.

    Triton builds a small Python extension with a C compiler for every kernel it launches.
    """
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if not any(shutil.which(name) for name in (os.environ.get("CC", ""), "gcc", "clang")):
        return "there is no C compiler (gcc, clang, or $CC)"
    include = sysconfig.get_paths()["include"]
    if not (Path(include) / "Python.h").is_file():
        return f"Python's headers are not installed ({include}/Python.h)"
    return None


def _limit_recompiles(max_recompiles: int | None) -> AbstractContextManager[None]:
    if max_recompiles is None:
        return nullcontext()
    context: AbstractContextManager[None] = torch._dynamo.config.patch(
        recompile_limit=max_recompiles
    )
    return context


def specialized_integers() -> AbstractContextManager[None]:
    """Return a context manager in which compilation takes integers as constants.

    With ``dynamic=True`` they would be variables of 64 bits, of which Triton cannot reinterpret an
    expression of 32 bits.
    """
    context: AbstractContextManager[None] = torch._dynamo.config.patch(specialize_int=True)
    return context


def compiled_if_faster(
    *, dynamic: bool = False, max_shapes: int | None = None
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Return a decorator that compiles a function for devices on which this is faster.

    The device of the first argument decides. On a CPU compilation takes longer than it saves. The
    function runs uncompiled there, on a host without a compiler (:func:`explain_missing_compiler`)
    and if compilation is disabled.

    Args:
        dynamic: compile once for all shapes instead of once per shape.
        max_shapes: maximum number of shapes for which the function is compiled. torch raises an
            error if there are more. None uses torch's limit of 8.
    """

    def decorator(function: Callable[_P, _R]) -> Callable[_P, _R]:
        if compile_disabled():
            return function  # avoids loading torch's compiler
        compiled = torch.compile(function, fullgraph=True, dynamic=dynamic)

        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            tensor = args[0]
            is_on_compiled_device = (
                isinstance(tensor, torch.Tensor) and tensor.device.type in _COMPILED_DEVICE_TYPES
            )
            if is_on_compiled_device and explain_missing_compiler() is None:
                with _limit_recompiles(max_shapes):
                    return compiled(*args, **kwargs)
            return function(*args, **kwargs)

        return call

    return decorator
