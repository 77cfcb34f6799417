"""Compilation of the NVLink engine's CUDA kernels (csrc/nvlink/kernels.cu) at run time.

nvlink.py calls it before it uses a GPU. Results are cached by the content of the sources and the
GPU's compute capability. The kernels are compiled in units, in parallel, because all together take
a compiler a minute. The compiler is NVRTC, which is part of torch's CUDA wheels, or ``nvcc`` if
NVRTC is missing.
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

_SOURCE_DIRECTORY = Path(__file__).parent / "csrc" / "nvlink"
_KERNELS_SOURCE = _SOURCE_DIRECTORY / "kernels.cu"
# --fmad=false: a fused a*b+c is rounded once, which could make the results of two algorithms differ
# that must be bitwise identical.
_COMPILER_FLAGS = ("--std=c++17", "--fmad=false")
# Compilation units, with the C++ class (csrc/nvlink/element.h) of the elements that the unit's
# kernels reduce. The kernels of "copy" copy bytes.
UNITS = {
    "copy": "",
    "u8": "BuiltinElement<u8>",
    "i8": "BuiltinElement<signed char>",
    "u16": "BuiltinElement<u16>",
    "i16": "BuiltinElement<short>",
    "u32": "BuiltinElement<u32>",
    "i32": "BuiltinElement<int>",
    "u64": "BuiltinElement<u64>",
    "i64": "BuiltinElement<long long>",
    "f16": "Float16",
    "bf16": "BFloat16",
    "f32": "BuiltinElement<float>",
    "f64": "BuiltinElement<double>",
}
_LOCK_TIMEOUT_SECONDS = 900.0
_COMPILE_TIMEOUT_SECONDS = 600.0
_MAX_LOG_CHARACTERS = 4000

Compiler = Callable[[list[str], Path], bytes]
"""Function that takes compiler options, and a path next to which it may write temporary files, and
returns the compiled code.
"""


def compile_kernels(capability: tuple[int, int]) -> dict[str, Path]:
    """Compile the kernels, unless they are cached, and return the files of machine code (cubins) by
    unit.

    Args:
        capability: the compute capability of the GPU, such as ``(9, 0)``.

    Raises:
        BuildError: there is neither NVRTC nor nvcc, or the compilation failed.
    """
    directory = builds_directory()
    directory.mkdir(parents=True, exist_ok=True)
    architecture = f"sm_{capability[0]}{capability[1]}"
    path_stem = directory / f"nvlink-{_sources_key()}-{architecture}"
    paths = {unit: Path(f"{path_stem}-{unit}.cubin") for unit in UNITS}
    with FileLock(f"{path_stem}.lock", timeout=_LOCK_TIMEOUT_SECONDS):
        if missing_units := [unit for unit, path in paths.items() if not path.exists()]:
            compiler = _find_compiler()

            def compile_unit(unit: str) -> None:
                path = paths[unit]
                code = compiler(_compiler_options(unit, architecture), path)
                # Written to another name first, so that the file is complete once it exists.
                temporary_path = path.with_suffix(f".{os.getpid()}")
                temporary_path.write_bytes(code)
                temporary_path.rename(path)

            with ThreadPoolExecutor(os.cpu_count()) as pool:
                list(pool.map(compile_unit, missing_units))
    return paths


def _sources_key() -> str:
    digest = hashlib.sha256(repr((_COMPILER_FLAGS, UNITS)).encode())
    for path in sorted([_KERNELS_SOURCE, *_SOURCE_DIRECTORY.glob("*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _compiler_options(unit: str, architecture: str) -> list[str]:
    element = UNITS[unit]
    definitions = [f"-DFSCCL_SUFFIX={unit}", f"-DFSCCL_ELEMENT={element}"] if element else []
    return [f"-arch={architecture}", f"-I{_SOURCE_DIRECTORY}", *_COMPILER_FLAGS, *definitions]


def _find_compiler() -> Compiler:
    if nvrtc := _find_nvrtc():
        return lambda options, _: _compile_with_nvrtc(nvrtc, options)
    if nvcc := _find_nvcc():
        return lambda options, path: _compile_with_nvcc(nvcc, options, path)
    raise BuildError(
        "the NVLink engine compiles its kernels on first use, and there is neither NVRTC nor nvcc",
        hint="torch's CUDA wheels include NVRTC; CUDA_HOME selects a CUDA toolkit; FSCCL_NVLINK=0 "
        "disables the engine",
    )


def _find_nvcc() -> str | None:
    cuda_home = os.environ.get("CUDA_HOME")
    return shutil.which("nvcc") or (
        shutil.which("nvcc", path=f"{cuda_home}/bin") if cuda_home else None
    )


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
    """Load the second library of NVRTC, libnvrtc-builtins.

    NVRTC opens it by its file name only, which does not find it in the directory of a wheel unless
    it is already loaded.
    """
    for line in Path("/proc/self/maps").read_text().splitlines():
        mapped_file = Path(line.split(maxsplit=5)[-1])
        if mapped_file.name.startswith("libnvrtc.so"):
            for builtins_library in mapped_file.parent.glob("libnvrtc-builtins.so.*"):
                ctypes.CDLL(str(builtins_library))
            return


def _compile_with_nvrtc(nvrtc: ctypes.CDLL, options: list[str]) -> bytes:
    program = ctypes.c_void_p()
    source = _KERNELS_SOURCE.read_bytes()
    _raise_nvrtc_error(
        nvrtc,
        nvrtc.nvrtcCreateProgram(
            ctypes.byref(program), source, _KERNELS_SOURCE.name.encode(), 0, None, None
        ),
    )
    try:
        c_options = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if nvrtc.nvrtcCompileProgram(program, len(options), c_options) != 0:
            log = _read_result(nvrtc, program, "ProgramLog").decode(errors="replace").strip("\0")
            raise BuildError(
                f"NVRTC cannot compile the NVLink kernels ({' '.join(options)}):\n"
                f"{log[:_MAX_LOG_CHARACTERS]}"
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
    cubin_path = path.with_suffix(f".{os.getpid()}.nvcc")
    command = [nvcc, "-cubin", *options, str(_KERNELS_SOURCE), "-o", str(cubin_path)]
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_SECONDS, check=False
        )
        if process.returncode != 0:
            raise BuildError(f"{' '.join(command)} failed:\n{process.stderr[:_MAX_LOG_CHARACTERS]}")
        return cubin_path.read_bytes()
    finally:
        cubin_path.unlink(missing_ok=True)
