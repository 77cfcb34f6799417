"""Compiled module of a backend, which its wheel contains and its source archive does not."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from flagscale.patching.spec import BackendSpec

_COMPILER_FLAGS = ("-O3", "-Wall", "-shared", "-std=c++17", "-fPIC")


@dataclass(frozen=True)
class NativeModule:
    """Compiled module: its path in the tree, or None if it could not be provided. ``description``
    is the way in which it was provided, or the reason.
    """

    path: str | None
    description: str


def extension_suffix() -> str:
    """Return the suffix of this interpreter's compiled modules:
    ``.cpython-311-x86_64-linux-gnu.so``.
    """
    return str(sysconfig.get_config_var("EXT_SUFFIX"))


def provide_module(spec: BackendSpec, tree: Path, version: str) -> NativeModule | None:
    """Copy the module from an installed wheel of ``version`` into ``tree``, or build it.

    Returns None if the backend has no such module.
    """
    if spec.native_module is None:
        return None
    path = spec.native_module + extension_suffix()
    package = spec.sources.get("installed", {}).get("package", "")
    if original := _find_installed(package, version, path):
        shutil.copyfile(original, tree / path)
        return NativeModule(path, f"copied from the installed {package} {version}")
    problem = _compile_module(tree, spec.native_source or "", path)
    if problem is None:
        return NativeModule(path, "built with g++ and pybind11")
    return NativeModule(
        None,
        f"{Path(path).name} is missing, and without it no dataset can be indexed: {package} "
        f"{version} is not installed for this Python, and {problem}",
    )


def _find_installed(package: str, version: str, path: str) -> Path | None:
    if not package:
        return None
    for distribution in importlib.metadata.distributions(name=package):
        original = Path(str(distribution.locate_file(path)))
        if distribution.version == version and original.is_file():
            return original
    return None


def _compile_module(tree: Path, source: str, path: str) -> str | None:
    """Compile the module. Return the reason if that is impossible, otherwise None."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        return "there is no C++ compiler to build it with (install g++, or set CXX)"
    spec = importlib.util.find_spec("pybind11")
    if spec is None or spec.origin is None:
        return "pybind11, which it is built with, is not installed (pip install pybind11)"
    include = Path(spec.origin).parent / "include"
    if not source or not (tree / source).is_file():
        return f"its source {source or ''} is not in the tree"
    includes = [f"-I{include}", f"-I{sysconfig.get_path('include')}"]
    result = subprocess.run(
        [compiler, *_COMPILER_FLAGS, *includes, str(tree / source), "-o", str(tree / path)],
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if result.returncode != 0:
        last_lines = "\n".join(result.stderr.strip().splitlines()[-5:])
        return f"{compiler} could not compile {source}:\n{last_lines}"
    return None
