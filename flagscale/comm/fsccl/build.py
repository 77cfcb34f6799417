"""Loading of the compiled library: this machine's own build, created on first use, or a prebuilt
one.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import platform
import shutil
import sys
from pathlib import Path
from types import ModuleType

from flagscale import files
from flagscale.comm.fsccl import prebuilt
from flagscale.comm.fsccl.compiling import (
    FILE,
    MODULE,
    BuildError,
    compile_into,
    compiler_command,
    digest_sources,
    processor_flags,
    python_header,
    search_path,
)

__all__ = ["BuildError", "builds_directory", "describe_origin", "load_extension", "unavailable"]

COMPILED = "compiled on first use"


def unavailable() -> str | None:
    """Return the reason why this machine has no build and cannot create one; None if it can use
    fsccl.
    """
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    if describe_origin() != COMPILED:
        return None
    path = search_path()
    missing = [
        tool for tool in (compiler_command(), "ninja") if shutil.which(tool, path=path) is None
    ]
    if not python_header().exists():
        missing.append(str(python_header()))
    if not missing:
        return None
    reason = f"fsccl is compiled on first use, and this machine has no {' and no '.join(missing)}"
    return f"{reason}, nor a prebuilt one for torch {_torch_version()}"


def describe_origin() -> str:
    """Return the origin of this machine's library: ``built here``, ``prebuilt``, or
    :data:`COMPILED` if it will be compiled when it is needed.
    """
    if _build_path().exists():
        return "built here"
    return "prebuilt" if prebuilt.find_library() else COMPILED


@functools.cache
def load_extension() -> ModuleType:
    """Return the compiled module: this machine's own build, a prebuilt one, or else a new build.

    Safe to call from many ranks at once. Environment: ``FSCCL_BUILD_DIR`` is the directory of
    builds (default: ``$XDG_CACHE_HOME/flagscale/fsccl``), ``CXX`` the compiler, ``MAX_JOBS`` the
    number of files compiled in parallel.

    Raises:
        BuildError: no compiler, a failed compilation, or a directory that cannot be written.
    """
    library = _build_path()
    if not library.exists():
        if prebuilt_library := prebuilt.find_library():
            return _import_library(prebuilt_library)
        _compile_for_this_machine(library)
    return _import_library(library)


def builds_directory() -> Path:
    """Return the directory of builds, which may not exist yet."""
    root = os.environ.get("FSCCL_BUILD_DIR")
    return (Path(root) if root else files.cache_directory() / "fsccl").absolute()


def _build_path() -> Path:
    return builds_directory() / _build_key() / FILE


@functools.cache
def _build_key() -> str:
    """Return the name of a build, a digest of everything that affects its result."""
    import torch

    digest = hashlib.sha256(digest_sources())
    for part in (torch.__version__, str(torch.version.git_version), sys.version):
        digest.update(part.encode() + b"\0")
    # Includes the instruction set, because machines with different processors may share a home
    # directory.
    processor = platform.machine() + processor_flags()
    digest.update(compiler_command().encode() + processor.encode())
    return digest.hexdigest()[:20]


def _torch_version() -> str:
    import torch

    return torch.__version__


def _compile_for_this_machine(library: Path) -> None:
    """Compile for this machine's processor."""
    compile_into(library, "-mcpu=native" if platform.machine() == "aarch64" else "-march=native")


def _import_library(library: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(MODULE, library)
    if spec is None or spec.loader is None:
        raise BuildError(f"cannot load {library}")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        raise BuildError(
            f"cannot load {library}: {error}", hint=f"remove {library.parent} to build it again"
        ) from error
    return module
