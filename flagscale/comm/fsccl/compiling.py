"""Compiles the C++ sources."""

from __future__ import annotations

import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from flagscale.errors import FlagscaleError

MODULE = "_fsccl"
FILE = f"{MODULE}.so"
"""What a build is called in its directory."""
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


def compile_into(library: Path, machine: str) -> None:
    """Compile ``library``, unless another process has meanwhile, for the processors that the flag
    ``machine`` says.

    Raises:
        BuildError: no compiler, a failed compilation, or a directory that cannot be written.
    """
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{library.parent}.lock", timeout=_LOCK_SECONDS):
            if not library.exists():
                _compile(library, machine)
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


def _compile(library: Path, machine: str) -> None:
    _check_tools()
    work = library.parent / "work"
    shutil.rmtree(work, ignore_errors=True)  # of a build that was killed
    work.mkdir()
    from torch.utils import cpp_extension

    try:
        with (
            _environment(
                PATH=search_path(),
                MAX_JOBS=os.environ.get("MAX_JOBS") or str(min(8, os.cpu_count() or 1)),
            ),
            _quoted_libraries(cpp_extension),
        ):
            cpp_extension.load(
                name=MODULE,
                sources=[str(path) for path in _sources()],
                extra_cflags=[*_FLAGS, machine],
                build_directory=str(work),
                is_python_module=False,
                is_standalone=False,
            )
    except (RuntimeError, subprocess.SubprocessError) as error:
        raise BuildError(
            f"compiling fsccl failed with {compiler()}:\n{_tail(str(error).splitlines())}",
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


def search_path() -> str:
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
    if shutil.which(compiler(), path=search_path()) is None:
        raise BuildError(
            f"fsccl is compiled on first use, and there is no C++ compiler {compiler()!r} on PATH",
            hint="install g++, or set CXX; distributed_backend: gloo needs none",
        )
    if shutil.which("ninja", path=search_path()) is None:
        raise BuildError(
            "fsccl is compiled on first use, and there is no 'ninja' on PATH",
            hint="pip install ninja; distributed_backend: gloo needs none",
        )
    if not header().exists():
        raise BuildError(
            f"fsccl is compiled on first use, and there is no {header()}",
            hint="install the headers of this Python (Debian: python3-dev); "
            "distributed_backend: gloo needs none",
        )


def _tail(lines: Sequence[str]) -> str:
    """The end of a compiler's output, from its first error on if that is near."""
    errors = [i for i, line in enumerate(lines) if ": error:" in line or "fatal error:" in line]
    start = errors[0] if errors else max(0, len(lines) - _OUTPUT_LINES)
    return "\n".join(lines[start : start + _OUTPUT_LINES])


@functools.cache
def sources_digest() -> bytes:
    """Of the sources and how they are compiled."""
    digest = hashlib.sha256("\0".join(_FLAGS).encode())
    for path in sorted(p for p in _SOURCES.rglob("*") if p.suffix in {".h", ".cpp", ".cu"}):
        digest.update(str(path.relative_to(_SOURCES)).encode() + b"\0" + path.read_bytes())
    return digest.digest()


def processor_flags() -> str:
    """The processor's instruction sets, as the kernel lists them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def compiler() -> str:
    return os.environ.get("CXX") or "c++"


def header() -> Path:
    """Of this Python, which a distribution may keep in a package of its own."""
    return Path(sysconfig.get_path("include"), "Python.h")


def _sources() -> list[Path]:
    """The translation units: what needs torch's headers, the core, and the NVLink engine's host
    side, which needs no CUDA."""
    parts = ("torch/extension.cpp", "core/core.cpp", "nvlink/nvlink.cpp")
    return [_SOURCES / part for part in parts]
