"""Compiles the kernels of the NVLink engine for a kind of GPU, once for each state of the sources.

They are made in parts, side by side, for together they take a compiler a minute. NVRTC, which comes
with torch's CUDA wheels, is enough; ``nvcc`` is used where it is missing.
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
# a*b+c rounded once could differ between two algorithms that must agree bit by bit.
_FLAGS = ("--std=c++17", "--fmad=false")
# What is compiled by itself, with the element's class: a reduction is made for each element.
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
"""Of options, and where the code will be kept: the code."""


def kernels(capability: tuple[int, int]) -> dict[str, Path]:
    """The machine code (files of cubins), by unit, for a compute capability such as ``(9, 0)``.

    Raises:
        BuildError: neither NVRTC nor nvcc is there, or the compilation failed.
    """
    directory = builds_directory()
    directory.mkdir(parents=True, exist_ok=True)
    architecture = f"sm_{capability[0]}{capability[1]}"
    stem = directory / f"nvlink-{_key()}-{architecture}"
    paths = {unit: Path(f"{stem}-{unit}.cubin") for unit in UNITS}
    with FileLock(f"{stem}.lock", timeout=_LOCK_SECONDS):
        if missing := [unit for unit, path in paths.items() if not path.exists()]:
            compiler = _compiler()

            def make(unit: str) -> None:
                path = paths[unit]
                code = compiler(_options(unit, architecture), path)
                # Whole or not at all: whoever finds the file may load it.
                part = path.with_suffix(f".{os.getpid()}")
                part.write_bytes(code)
                part.rename(path)

            with ThreadPoolExecutor(os.cpu_count()) as pool:
                list(pool.map(make, missing))
    return paths


def _key() -> str:
    digest = hashlib.sha256(repr((_FLAGS, UNITS)).encode())
    for path in sorted([_KERNELS, *_SOURCES.glob("*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _options(unit: str, architecture: str) -> list[str]:
    element = UNITS[unit]
    defined = [f"-DFSCCL_SUFFIX={unit}", f"-DFSCCL_ELEMENT={element}"] if element else []
    return [f"-arch={architecture}", f"-I{_SOURCES}", *_FLAGS, *defined]


def _compiler() -> Compiler:
    if nvrtc := _find_nvrtc():
        return lambda options, _: _with_nvrtc(nvrtc, options)
    if nvcc := _find_nvcc():
        return lambda options, path: _with_nvcc(nvcc, options, path)
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
            yield from (str(found) for found in Path(entry).glob(pattern))


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
    """NVRTC opens a second library by its bare name, which the wheel's folder is not searched for;
    one that is loaded already is found."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = Path(line.split(maxsplit=5)[-1])
        if path.name.startswith("libnvrtc.so"):
            for builtins in path.parent.glob("libnvrtc-builtins.so.*"):
                ctypes.CDLL(str(builtins))
            return


def _with_nvrtc(nvrtc: ctypes.CDLL, options: list[str]) -> bytes:
    program = ctypes.c_void_p()
    source = _KERNELS.read_bytes()
    _check(
        nvrtc,
        nvrtc.nvrtcCreateProgram(
            ctypes.byref(program), source, _KERNELS.name.encode(), 0, None, None
        ),
    )
    try:
        array = (ctypes.c_char_p * len(options))(*(word.encode() for word in options))
        if nvrtc.nvrtcCompileProgram(program, len(options), array) != 0:
            log = _read(nvrtc, program, "ProgramLog").decode(errors="replace").strip("\0")
            raise BuildError(
                f"NVRTC cannot compile the NVLink kernels ({' '.join(options)}):\n"
                f"{log[:_LOG_CHARACTERS]}"
            )
        return _read(nvrtc, program, "CUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _read(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _check(nvrtc, getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(nvrtc, getattr(nvrtc, f"nvrtcGet{what}")(program, buffer))
    return buffer.raw


def _check(nvrtc: ctypes.CDLL, result: int) -> None:
    if result == 0:
        return
    nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
    text = nvrtc.nvrtcGetErrorString(result).decode()
    raise BuildError(f"NVRTC failed while it compiled the NVLink kernels: {text}")


def _with_nvcc(nvcc: str, options: list[str], path: Path) -> bytes:
    out = path.with_suffix(f".{os.getpid()}.nvcc")
    command = [nvcc, "-cubin", *options, str(_KERNELS), "-o", str(out)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_COMPILE_SECONDS, check=False
        )
        if done.returncode != 0:
            raise BuildError(f"{' '.join(command)} failed:\n{done.stderr[:_LOG_CHARACTERS]}")
        return out.read_bytes()
    finally:
        out.unlink(missing_ok=True)
