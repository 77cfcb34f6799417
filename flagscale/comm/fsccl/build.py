"""Compiles the C++ sources on first use, once for each state of the sources, torch and machine."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from filelock import FileLock, Timeout

from flagscale import files
from flagscale.errors import FlagscaleError

_MODULE = "_fsccl"
_SOURCES = Path(__file__).parent / "csrc"
_LOCK_SECONDS = 900.0
_OUTPUT_LINES = 40

# The machine's own instructions vectorise the reductions. Contracting a*b+c could round
# differently in two algorithms that must agree bit by bit.
_FLAGS = (
    "-O2",
    "-ftree-vectorize",
    "-fvect-cost-model=dynamic",
    "-ffp-contract=off",
    "-fvisibility=hidden",
    "-Wall",
)


class BuildError(FlagscaleError):
    """fsccl could not be compiled or loaded."""


def unavailable() -> str | None:
    """Why this machine can neither use a finished build nor make one; None when it can."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    if _library().exists():
        return None
    path = _search_path()
    missing = [tool for tool in (_compiler(), "ninja") if shutil.which(tool, path=path) is None]
    if not _header().exists():
        missing.append(str(_header()))
    if not missing:
        return None
    return f"fsccl is compiled on first use, and this machine has no {' and no '.join(missing)}"


@functools.cache
def load_extension() -> ModuleType:
    """The compiled module, built first if need be. Safe when many ranks call it at once.

    Environment: ``FSCCL_BUILD_DIR`` is where builds are kept (default:
    ``$XDG_CACHE_HOME/flagscale/fsccl``), ``CXX`` the compiler, ``MAX_JOBS`` how many files are
    compiled at once.

    Raises:
        BuildError: no compiler, a failed compilation, or a directory that cannot be written.
    """
    library = _library()
    if not library.exists():
        _build(library)
    return _import(library)


def builds_directory() -> Path:
    """Where builds are kept; it need not exist."""
    root = os.environ.get("FSCCL_BUILD_DIR")
    return (Path(root) if root else files.cache_directory() / "fsccl").absolute()


def _library() -> Path:
    return builds_directory() / _key() / f"{_MODULE}.so"


def _compiler() -> str:
    return os.environ.get("CXX") or "c++"


def _header() -> Path:
    """Of this Python, which a distribution may keep in a package of its own."""
    return Path(sysconfig.get_path("include"), "Python.h")


def _sources() -> list[Path]:
    """The translation units: what needs torch's headers, the core, and the NVLink engine's host
    side, which needs no CUDA."""
    parts = ("torch/extension.cpp", "core/core.cpp", "nvlink/nvlink.cpp")
    return [_SOURCES / part for part in parts]


@functools.cache
def _key() -> str:
    """Names a build: anything that changes its result changes it."""
    import torch

    digest = hashlib.sha256()
    for part in (torch.__version__, str(torch.version.git_version), sys.version, *_FLAGS):
        digest.update(part.encode() + b"\0")
    digest.update(_compiler().encode() + _processor().encode())
    for path in sorted(p for p in _SOURCES.rglob("*") if p.suffix in {".h", ".cpp", ".cu"}):
        digest.update(str(path.relative_to(_SOURCES)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:20]


def _processor() -> str:
    """The instruction set, as a home directory may be shared by unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return platform.machine()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return platform.machine() + flags


def _build(library: Path) -> None:
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{library.parent}.lock", timeout=_LOCK_SECONDS):
            if not library.exists():
                _compile(library)
    except Timeout as error:
        raise BuildError(
            f"another process has been building fsccl for {_LOCK_SECONDS:g} s",
            hint=f"if it is gone, remove {library.parent}.lock",
        ) from error
    except OSError as error:
        raise BuildError(
            f"cannot write a build of fsccl to {library.parent}: {error}",
            hint="FSCCL_BUILD_DIR names another directory",
        ) from error


def _compile(library: Path) -> None:
    _check_tools()
    work = library.parent / "work"
    shutil.rmtree(work, ignore_errors=True)  # of a build that was killed
    work.mkdir()
    from torch.utils import cpp_extension

    machine = "-mcpu=native" if platform.machine() == "aarch64" else "-march=native"
    try:
        with (
            _environment(
                PATH=_search_path(),
                MAX_JOBS=os.environ.get("MAX_JOBS") or str(min(8, os.cpu_count() or 1)),
            ),
            _quoted_libraries(cpp_extension),
        ):
            cpp_extension.load(
                name=_MODULE,
                sources=[str(path) for path in _sources()],
                extra_cflags=[*_FLAGS, machine],
                build_directory=str(work),
                is_python_module=False,
                is_standalone=False,
            )
    except (RuntimeError, subprocess.SubprocessError) as error:
        raise BuildError(
            f"compiling fsccl failed with {_compiler()}:\n{_tail(str(error).splitlines())}",
            hint="it needs a C++17 compiler that torch supports (GCC 9 or newer)",
        ) from error
    # Whole or not at all: whoever finds the library may load it.
    (work / library.name).rename(library)
    shutil.rmtree(work, ignore_errors=True)


@contextmanager
def _quoted_libraries(cpp_extension: Any) -> Iterator[None]:
    """torch's builder quotes every path in what it writes for ninja but that of its libraries."""
    path = cpp_extension.TORCH_LIB_PATH
    cpp_extension.TORCH_LIB_PATH = shlex.quote(path).replace("$", "$$")
    try:
        yield
    finally:
        cpp_extension.TORCH_LIB_PATH = path


def _search_path() -> str:
    """``PATH``, and where pip puts ninja: a virtual environment's programs are not on the path of
    one who calls its python by name."""
    own = str(Path(sys.executable).parent)
    return os.pathsep.join([*filter(None, [os.environ.get("PATH")]), own])


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Environment variables that torch's builder reads, for as long as it works."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _check_tools() -> None:
    if shutil.which(_compiler(), path=_search_path()) is None:
        raise BuildError(
            f"fsccl is compiled on first use, and there is no C++ compiler {_compiler()!r} on PATH",
            hint="install g++, or set CXX; distributed_backend: gloo needs none",
        )
    if shutil.which("ninja", path=_search_path()) is None:
        raise BuildError(
            "fsccl is compiled on first use, and there is no 'ninja' on PATH",
            hint="pip install ninja; distributed_backend: gloo needs none",
        )
    if not _header().exists():
        raise BuildError(
            f"fsccl is compiled on first use, and there is no {_header()}",
            hint="install the headers of this Python (Debian: python3-dev); "
            "distributed_backend: gloo needs none",
        )


def _tail(lines: Sequence[str]) -> str:
    """The end of a compiler's output, from its first error on if that is near."""
    errors = [i for i, line in enumerate(lines) if ": error:" in line or "fatal error:" in line]
    start = errors[0] if errors else max(0, len(lines) - _OUTPUT_LINES)
    return "\n".join(lines[start : start + _OUTPUT_LINES])


def _import(library: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(_MODULE, library)
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
