"""Compilation of the NVLink engine's kernels for a kind of GPU, cached by content of the sources.

The kernels are compiled in units, in parallel, because together they take a compiler a minute.
NVRTC, which is part of torch's CUDA wheels, suffices; ``nvcc`` is used where it is missing.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from filelock import FileLock

from flagscale.comm.fsccl.build import BuildError, builds_directory

_SOURCES = Path(__file__).parent / "csrc" / "nvlink"
_KERNELS = _SOURCES / "kernels.cu"
# Rounding a*b+c once could differ between two algorithms that must agree bit by bit.
_FLAGS = ("--std=c++17", "--fmad=false")
# Units of compilation, with the C++ class of their element: reductions are compiled per element.
UNITS = {
    "movers": "",
    "u8": "Plain<u8>",
    "i8": "Plain<signed char>",
    "u16": "Plain<u16>",
    "i16": "Plain<short>",
    "u32": "Plain<u32>",
    "i32": "Plain<int>",
    "u64": "Plain<u64>",
    "i64": "Plain<long long>",
    "f16": "Float16",
    "bf16": "BFloat16",
    "f32": "Plain<float>",
    "f64": "Plain<double>",
}
_LOCK_SECONDS = 900.0
_COMPILE_SECONDS = 600.0
_LOG_CHARACTERS = 4000

Compiler = Callable[[list[str], Path], bytes]
"""Function from options, and the path at which the code will be stored, to the code."""


def compile_kernels(capability: tuple[int, int]) -> dict[str, Path]:
    """Return the files of machine code (cubins), by unit.

    Args:
        capability: the compute capability of the GPU, such as ``(9, 0)``.

    Raises:
        BuildError: there is neither NVRTC nor nvcc, or the compilation failed.
    """
    directory = builds_directory()
    directory.mkdir(parents=True, exist_ok=True)
    architecture = f"sm_{capability[0]}{capability[1]}"
    stem = directory / f"nvlink-{_key()}-{architecture}"
    paths = {unit: Path(f"{stem}-{unit}.cubin") for unit in UNITS}
    with FileLock(f"{stem}.lock", timeout=_LOCK_SECONDS):
        if missing := [unit for unit, path in paths.items() if not path.exists()]:
            compiler = _find_compiler()

            def compile_unit(unit: str) -> None:
                path = paths[unit]
                code = compiler(_options(unit, architecture), path)
                # Written to another name first, so that the file is complete once it exists.
                part = path.with_suffix(f".{os.getpid()}")
                part.write_bytes(code)
                part.rename(path)

            with ThreadPoolExecutor(os.cpu_count()) as pool:
                list(pool.map(compile_unit, missing))
    return paths


def _key() -> str:
    digest = hashlib.sha256(repr((_FLAGS, UNITS)).encode())
    for path in sorted([_KERNELS, *_SOURCES.glob("*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _options(unit: str, architecture: str) -> list[str]:
    element = UNITS[unit]
    definitions = [f"-DFSCCL_SUFFIX={unit}", f"-DFSCCL_ELEMENT={element}"] if element else []
    return [f"-arch={architecture}", f"-I{_SOURCES}", *_FLAGS, *definitions]


def _find_compiler() -> Compiler:
    if nvrtc := _find_nvrtc():
        return lambda options, _: _compile_with_nvrtc(nvrtc, options)
    if nvcc := _find_nvcc():
        return lambda options, path: _compile_with_nvcc(nvcc, options, path)
    raise BuildError(
        "the NVLink engine compiles its kernels on first use, and there is neither NVRTC nor nvcc",
        hint="torch's CUDA wheels bring NVRTC; CUDA_HOME names a toolkit; FSCCL_NVLINK=0 does "
        "without the engine",
    )


def _find_nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME")
    return shutil.which("nvcc") or (shutil.which("nvcc", path=f"{home}/bin") if home else None)


def _nvrtc_candidates() -> Iterator[str]:
    for major in (13, 12):
        yield f"libnvrtc.so.{major}"
    for entry in [*sys.path, os.environ.get("CUDA_HOME") or "/usr/local/cuda"]:
        for pattern in ("nvidia/*/lib/libnvrtc.so.??", "lib64/libnvrtc.so.??"):
            yield from (str(path) for path in Path(entry).glob(pattern))


def _find_nvrtc() -> ctypes.CDLL | None:
    for name in _nvrtc_candidates():
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        _load_builtins()
        return library
    return None


def _load_builtins() -> None:
    """Load the second library of NVRTC.

    NVRTC opens it by its bare name, without searching the wheel's directory; a library that is
    loaded already is found.
    """
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = Path(line.split(maxsplit=5)[-1])
        if path.name.startswith("libnvrtc.so"):
            for builtins in path.parent.glob("libnvrtc-builtins.so.*"):
                ctypes.CDLL(str(builtins))
            return


def _compile_with_nvrtc(nvrtc: ctypes.CDLL, options: list[str]) -> bytes:
    program = ctypes.c_void_p()
    source = _KERNELS.read_bytes()
    _raise_nvrtc_error(
        nvrtc,
        nvrtc.nvrtcCreateProgram(
            ctypes.byref(program), source, _KERNELS.name.encode(), 0, None, None
        ),
    )
    try:
        array = (ctypes.c_char_p * len(options))(*(word.encode() for word in options))
        if nvrtc.nvrtcCompileProgram(program, len(options), array) != 0:
            log = _read_result(nvrtc, program, "ProgramLog").decode(errors="replace").strip("\0")
            raise BuildError(
                f"NVRTC cannot compile the NVLink kernels ({' '.join(options)}):\n"
                f"{log[:_LOG_CHARACTERS]}"
            )
        return _read_result(nvrtc, program, "CUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _read_result(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, name: str) -> bytes:
    size = ctypes.c_size_t()
    _raise_nvrtc_error(nvrtc, getattr(nvrtc, f"nvrtcGet{name}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _raise_nvrtc_error(nvrtc, getattr(nvrtc, f"nvrtcGet{name}")(program, buffer))
    return buffer.raw


def _raise_nvrtc_error(nvrtc: ctypes.CDLL, result: int) -> None:
    if result == 0:
        return
    nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
    text = nvrtc.nvrtcGetErrorString(result).decode()
    raise BuildError(f"NVRTC failed while it compiled the NVLink kernels: {text}")


def _compile_with_nvcc(nvcc: str, options: list[str], path: Path) -> bytes:
    out = path.with_suffix(f".{os.getpid()}.nvcc")
    command = [nvcc, "-cubin", *options, str(_KERNELS), "-o", str(out)]
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, timeout=_COMPILE_SECONDS, check=False
        )
        if process.returncode != 0:
            raise BuildError(f"{' '.join(command)} failed:\n{process.stderr[:_LOG_CHARACTERS]}")
        return out.read_bytes()
    finally:
        out.unlink(missing_ok=True)
