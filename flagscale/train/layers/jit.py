"""Functions that are compiled where it pays and is possible."""

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

from flagscale.accelerators.registry import every
from flagscale.train.device import uncompiled

_P = ParamSpec("_P")
_R = TypeVar("_R")
# Looked up once: what torch compiles cannot follow a search through installed packages.
_COMPILING = frozenset(kind.torch_type for kind in every() if kind.compiles)


@functools.cache
def why_not_here() -> str | None:
    """Why this machine cannot compile for a device; None where it can.

    Triton builds a small extension of Python for every kernel it starts, with a C compiler.
    """
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if not any(shutil.which(name) for name in (os.environ.get("CC", ""), "gcc", "clang")):
        return "there is no C compiler (gcc, clang, or what CC names)"
    include = sysconfig.get_paths()["include"]
    if not (Path(include) / "Python.h").is_file():
        return f"Python's headers are not installed ({include}/Python.h)"
    return None


def _at_most(sizes: int | None) -> AbstractContextManager[None]:
    if sizes is None:
        return nullcontext()
    allowed: AbstractContextManager[None] = torch._dynamo.config.patch(recompile_limit=sizes)
    return allowed


def compiled_if_faster(
    *, dynamic: bool = False, sizes: int | None = None
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Compile a function where its first argument is a tensor of a device that gains by it: on a
    CPU compiling takes longer than it saves.

    Args:
        dynamic: once for all sizes, not once for each.
        sizes: how many there may be; more is an error. Without it torch's own limit, which is 8.
    """

    def compiling(function: Callable[_P, _R]) -> Callable[_P, _R]:
        if uncompiled():
            return function  # and torch need not load its compiler
        fast = torch.compile(function, fullgraph=True, dynamic=dynamic)

        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            first = args[0]
            pays = isinstance(first, torch.Tensor) and first.device.type in _COMPILING
            if pays and why_not_here() is None:
                with _at_most(sizes):
                    return fast(*args, **kwargs)
            return function(*args, **kwargs)

        return call

    return compiling
