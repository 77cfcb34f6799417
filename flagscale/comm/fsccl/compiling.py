"""Compilation of the C++ sources in ``csrc`` to the extension module. Used by build.py and
prebuilt.py.
"""

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

MODULE_NAME = "_fsccl"
LIBRARY_FILE = f"{MODULE_NAME}.so"
"""File name of the compiled module in the directory of a build."""
_SOURCE_DIRECTORY = Path(__file__).parent / "csrc"
_LOCK_TIMEOUT_SECONDS = 900.0
_MAX_OUTPUT_LINES = 40

# -march=native vectorises the reductions. Contracting a*b+c could round differently in two
# algorithms whose results must be bitwise identical.
_COMPILER_FLAGS = (
    "-O2",
    "-ftree-vectorize",
    "-fvect-cost-model=dynamic",
    "-ffp-contract=off",
    "-fvisibility=hidden",
    "-Wall",
)


class BuildError(FlagscaleError):
    """fsccl could not be compiled or loaded."""


def compile_into(library: Path, processor_flag: str) -> None:
    """Compile the extension module to the file ``library``, unless it exists.

    Of processes that call it at the same time, one compiles and the others wait.

    Args:
        library: path of the compiled module.
        processor_flag: compiler flag that selects the processor, such as ``-march=native``.

    Raises:
        BuildError: no compiler, a failed compilation, or a directory that cannot be written.
    """
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{library.parent}.lock", timeout=_LOCK_TIMEOUT_SECONDS):
            if not library.exists():
                _run_compiler(library, processor_flag)
    except Timeout as error:
        raise BuildError(
            f"another process has been building fsccl for {_LOCK_TIMEOUT_SECONDS:g} s",
            hint=f"if it is gone, remove {library.parent}.lock",
        ) from error
    except OSError as error:
        raise BuildError(
            f"cannot write a build of fsccl to {library.parent}: {error}",
            hint="FSCCL_BUILD_DIR names another directory",
        ) from error


def _run_compiler(library: Path, processor_flag: str) -> None:
    _check_tools()
    work_directory = library.parent / "work"
    shutil.rmtree(work_directory, ignore_errors=True)  # left by a build that was killed
    work_directory.mkdir()
    from torch.utils import cpp_extension

    try:
        with (
            _set_environment(
                PATH=search_path(),
                MAX_JOBS=os.environ.get("MAX_JOBS") or str(min(8, os.cpu_count() or 1)),
            ),
            _quote_library_path(cpp_extension),
        ):
            cpp_extension.load(
                name=MODULE_NAME,
                sources=[str(path) for path in _translation_units()],
                extra_cflags=[*_COMPILER_FLAGS, processor_flag],
                build_directory=str(work_directory),
                is_python_module=False,
                is_standalone=False,
            )
    except (RuntimeError, subprocess.SubprocessError) as error:
        output = _extract_errors(str(error).splitlines())
        raise BuildError(
            f"compiling fsccl failed with {compiler_command()}:\n{output}",
            hint="it needs a C++17 compiler that torch supports (GCC 9 or newer)",
        ) from error
    # Atomic, because other processes load the library as soon as it exists.
    (work_directory / library.name).rename(library)
    shutil.rmtree(work_directory, ignore_errors=True)


@contextmanager
def _quote_library_path(cpp_extension: Any) -> Iterator[None]:
    """Context manager that quotes the path of torch's libraries, the only path that torch's
    cpp_extension writes to its ninja file unquoted.
    """
    path = cpp_extension.TORCH_LIB_PATH
    cpp_extension.TORCH_LIB_PATH = shlex.quote(path).replace("$", "$$")
    try:
        yield
    finally:
        cpp_extension.TORCH_LIB_PATH = path


def search_path() -> str:
    """Return ``PATH`` extended by the directory of this Python, where pip installs ninja.

    It is missing from ``PATH`` if a virtual environment's Python is called by its path.
    """
    python_directory = str(Path(sys.executable).parent)
    return os.pathsep.join([*filter(None, [os.environ.get("PATH")]), python_directory])


@contextmanager
def _set_environment(**values: str) -> Iterator[None]:
    """Context manager that sets environment variables for torch's cpp_extension."""
    previous = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in previous.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _check_tools() -> None:
    compiler = compiler_command()
    if shutil.which(compiler, path=search_path()) is None:
        raise BuildError(
            f"fsccl is compiled on first use, and there is no C++ compiler {compiler!r} on PATH",
            hint="install g++, or set CXX; distributed_backend: gloo needs none",
        )
    if shutil.which("ninja", path=search_path()) is None:
        raise BuildError(
            "fsccl is compiled on first use, and there is no 'ninja' on PATH",
            hint="pip install ninja; distributed_backend: gloo needs none",
        )
    if not python_header().exists():
        raise BuildError(
            f"fsccl is compiled on first use, and there is no {python_header()}",
            hint="install the headers of this Python (Debian: python3-dev); "
            "distributed_backend: gloo needs none",
        )


def _extract_errors(lines: Sequence[str]) -> str:
    """Return lines of a compiler's output: those from the first error on, or else the last ones."""
    errors = [i for i, line in enumerate(lines) if ": error:" in line or "fatal error:" in line]
    start = errors[0] if errors else max(0, len(lines) - _MAX_OUTPUT_LINES)
    return "\n".join(lines[start : start + _MAX_OUTPUT_LINES])


@functools.cache
def digest_sources() -> bytes:
    """Return the digest of the sources and of the compiler flags."""
    digest = hashlib.sha256("\0".join(_COMPILER_FLAGS).encode())
    for path in sorted(
        p for p in _SOURCE_DIRECTORY.rglob("*") if p.suffix in {".h", ".cpp", ".cu"}
    ):
        digest.update(str(path.relative_to(_SOURCE_DIRECTORY)).encode() + b"\0" + path.read_bytes())
    return digest.digest()


def processor_flags() -> str:
    """Return the processor's instruction sets as listed by the kernel."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def compiler_command() -> str:
    return os.environ.get("CXX") or "c++"


def python_header() -> Path:
    """Return the path of Python.h, which some distributions put in a separate package."""
    return Path(sysconfig.get_path("include"), "Python.h")


def _translation_units() -> list[Path]:
    """Return the translation units: the torch binding, the core, and the NVLink engine's host side,
    which does not need CUDA.
    """
    parts = ("torch/extension.cpp", "core/core.cpp", "nvlink/nvlink.cpp")
    return [_SOURCE_DIRECTORY / part for part in parts]
