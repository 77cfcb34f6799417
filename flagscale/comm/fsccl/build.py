"""The compiled library: this machine's own build, made on first use, or one that came along."""

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
    compiler,
    header,
    processor_flags,
    search_path,
    sources_digest,
)

__all__ = ["BuildError", "builds_directory", "how", "load_extension", "unavailable"]

COMPILED = "compiled on first use"


def unavailable() -> str | None:
    """Why this machine can neither use a finished build nor make one; None when it can."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    if how() != COMPILED:
        return None
    path = search_path()
    missing = [tool for tool in (compiler(), "ninja") if shutil.which(tool, path=path) is None]
    if not header().exists():
        missing.append(str(header()))
    if not missing:
        return None
    reason = f"fsccl is compiled on first use, and this machine has no {' and no '.join(missing)}"
    return f"{reason}, nor a prebuilt one for torch {_torch_version()}"


def how() -> str:
    """Where this machine's library comes from: ``built here``, ``prebuilt``, or :data:`COMPILED`
    when it is wanted."""
    if _library().exists():
        return "built here"
    return "prebuilt" if prebuilt.find() else COMPILED


@functools.cache
def load_extension() -> ModuleType:
    """The compiled module: this machine's own build, else a prebuilt one, else it is built now.
    Safe when many ranks call it at once.

    Environment: ``FSCCL_BUILD_DIR`` is where builds are kept (default:
    ``$XDG_CACHE_HOME/flagscale/fsccl``), ``CXX`` the compiler, ``MAX_JOBS`` how many files are
    compiled at once.

    Raises:
        BuildError: no compiler, a failed compilation, or a directory that cannot be written.
    """
    library = _library()
    if not library.exists():
        if found := prebuilt.find():
            return _import(found)
        _build(library)
    return _import(library)


def builds_directory() -> Path:
    """Where builds are kept; it need not exist."""
    root = os.environ.get("FSCCL_BUILD_DIR")
    return (Path(root) if root else files.cache_directory() / "fsccl").absolute()


def _library() -> Path:
    return builds_directory() / _key() / FILE


@functools.cache
def _key() -> str:
    """Names a build: anything that changes its result changes it."""
    import torch

    digest = hashlib.sha256(sources_digest())
    for part in (torch.__version__, str(torch.version.git_version), sys.version):
        digest.update(part.encode() + b"\0")
    # The instruction set, as a home directory may be shared by unlike machines.
    processor = platform.machine() + processor_flags()
    digest.update(compiler().encode() + processor.encode())
    return digest.hexdigest()[:20]


def _torch_version() -> str:
    import torch

    return torch.__version__


def _build(library: Path) -> None:
    """Compile for this machine."""
    compile_into(library, "-mcpu=native" if platform.machine() == "aarch64" else "-march=native")


def _import(library: Path) -> ModuleType:
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
