"""Loading of fsccl's compiled extension module: a build for this machine, created on first use, or
a prebuilt library that is part of the package (prebuilt.py).
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
    LIBRARY_FILE,
    MODULE_NAME,
    BuildError,
    compile_into,
    compiler_command,
    digest_sources,
    processor_flags,
    python_header,
    search_path,
)

__all__ = [
    "BuildError",
    "builds_directory",
    "describe_origin",
    "load_extension",
    "unavailable_reason",
]

COMPILED_ON_FIRST_USE = "compiled on first use"


def unavailable_reason() -> str | None:
    """Return the reason why fsccl cannot be loaded or compiled on this machine; None if it can."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    if describe_origin() != COMPILED_ON_FIRST_USE:
        return None
    search_directories = search_path()
    missing_tools = [
        tool
        for tool in (compiler_command(), "ninja")
        if shutil.which(tool, path=search_directories) is None
    ]
    if not python_header().exists():
        missing_tools.append(str(python_header()))
    if not missing_tools:
        return None
    reason = (
        f"fsccl is compiled on first use, and this machine has no {' and no '.join(missing_tools)}"
    )
    return f"{reason}, nor a prebuilt one for torch {_torch_version()}"


def describe_origin() -> str:
    """Return the origin of the library that this machine uses: ``built here``, ``prebuilt``, or
    :data:`COMPILED_ON_FIRST_USE` if there is none yet.
    """
    if _build_path().exists():
        return "built here"
    return "prebuilt" if prebuilt.find_library() else COMPILED_ON_FIRST_USE


@functools.cache
def load_extension() -> ModuleType:
    """Return the compiled module: this machine's own build, a prebuilt one, or else a new build.

    Safe to call from many ranks at once. Environment: ``FSCCL_BUILD_DIR`` is the directory of
    builds (default: ``$XDG_CACHE_HOME/flagscale/fsccl``), ``CXX`` the compiler, ``MAX_JOBS`` the
    number of files compiled in parallel.

    Raises:
        BuildError: no compiler, a failed compilation, or a directory that cannot be written.
    """
    library_path = _build_path()
    if not library_path.exists():
        if prebuilt_library := prebuilt.find_library():
            return _import_library(prebuilt_library)
        _compile_for_this_machine(library_path)
    return _import_library(library_path)


def builds_directory() -> Path:
    """Return the directory of builds, which may not exist yet."""
    root = os.environ.get("FSCCL_BUILD_DIR")
    return (Path(root) if root else files.cache_directory() / "fsccl").absolute()


def _build_path() -> Path:
    return builds_directory() / _build_key() / LIBRARY_FILE


@functools.cache
def _build_key() -> str:
    """Return the name of a build, a digest of everything that affects its result."""
    import torch

    digest = hashlib.sha256(digest_sources())
    for version in (torch.__version__, str(torch.version.git_version), sys.version):
        digest.update(version.encode() + b"\0")
    # Includes the instruction set, because machines with different processors may share a home
    # directory.
    processor_description = platform.machine() + processor_flags()
    digest.update(compiler_command().encode() + processor_description.encode())
    return digest.hexdigest()[:20]


def _torch_version() -> str:
    import torch

    return torch.__version__


def _compile_for_this_machine(library_path: Path) -> None:
    """Compile for this machine's processor."""
    compile_into(
        library_path, "-mcpu=native" if platform.machine() == "aarch64" else "-march=native"
    )


def _import_library(library_path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(MODULE_NAME, library_path)
    if spec is None or spec.loader is None:
        raise BuildError(f"cannot load {library_path}")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        raise BuildError(
            f"cannot load {library_path}: {error}",
            hint=f"remove {library_path.parent} to build it again",
        ) from error
    return module
