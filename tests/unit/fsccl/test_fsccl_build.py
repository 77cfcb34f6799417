"""Tests of building the extension: the names of builds and the errors."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flagscale.comm.fsccl import compiling

pytestmark = pytest.mark.torch


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    import flagscale.comm.fsccl.build as module

    monkeypatch.setenv("FSCCL_BUILD_DIR", str(tmp_path / "a directory with 'quotes' and $signs"))
    module._build_key.cache_clear()
    yield module
    module._build_key.cache_clear()


def test_missing_compiler_is_reported(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "this machine has no no-such-compiler" in (build.unavailable_reason() or "")
    with pytest.raises(build.BuildError) as error:
        build._compile_for_this_machine(build._build_path())
    assert "there is no C++ compiler 'no-such-compiler' on PATH" in str(error.value)
    assert "set CXX" in str(error.value)


@pytest.fixture
def prebuilt(build: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Return the module prebuilt.py, with an empty file at the path of this machine's library."""
    import flagscale.comm.fsccl.prebuilt as module

    monkeypatch.setenv("FSCCL_PREBUILT_DIR", str(tmp_path / "prebuilt"))
    module.library_path().parent.mkdir(parents=True)
    module.library_path().touch()
    return module


def test_prebuilt_library_needs_no_compiler(
    build: Any, prebuilt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build.describe_origin() == "prebuilt"
    assert build.unavailable_reason() is None
    build._build_path().parent.mkdir(parents=True)
    build._build_path().touch()
    assert build.describe_origin() == "built here"


@pytest.mark.parametrize("mismatch", ["instructions", "torch", "sources"])
def test_incompatible_prebuilt_library_is_ignored(
    build: Any, prebuilt: Any, monkeypatch: pytest.MonkeyPatch, mismatch: str
) -> None:
    assert prebuilt.find_library() == prebuilt.library_path()
    if mismatch == "instructions":
        monkeypatch.setattr(compiling, "processor_flags", lambda: "flags : sse2 avx")
        assert (
            "avx2" in prebuilt.missing_instructions() or "asimd" in prebuilt.missing_instructions()
        )
    elif mismatch == "torch":
        import torch

        monkeypatch.setattr(torch, "__version__", "0.0.1")
    else:
        monkeypatch.setattr(compiling, "digest_sources", lambda: b"other sources")
    prebuilt._compatibility_key.cache_clear()
    assert prebuilt.find_library() is None
    assert build.describe_origin() == build.COMPILED_ON_FIRST_USE
    monkeypatch.undo()
    prebuilt._compatibility_key.cache_clear()


def test_missing_headers_are_reported(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", sys.executable)  # an existing program
    monkeypatch.setattr(compiling.sysconfig, "get_path", lambda name: f"/no {name}")
    assert "this machine has no /no include/Python.h" in build.unavailable_reason()
    with pytest.raises(build.BuildError, match=r"no /no include/Python\.h") as error:
        build._compile_for_this_machine(build._build_path())
    assert "install the headers of this Python" in str(error.value)


@pytest.mark.compiler
def test_failed_compilation_shows_the_compilers_output(
    build: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    invalid_source = tmp_path / "broken.cpp"
    invalid_source.write_text("int main() { return nonsense; }\n")
    monkeypatch.setattr(compiling, "_translation_units", lambda: [invalid_source])
    library = build._build_path()
    with pytest.raises(build.BuildError) as error:
        build._compile_for_this_machine(library)
    assert "compiling fsccl failed" in str(error.value)
    assert "nonsense" in str(error.value)
    assert not library.exists()


@pytest.mark.compiler
def test_torch_path_may_have_special_characters(
    build: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    from torch.utils import cpp_extension
    from torch.utils._cpp_extension_versioner import ExtensionVersioner

    libraries = tmp_path / "a directory with 'quotes' and $signs"
    libraries.symlink_to(cpp_extension.TORCH_LIB_PATH)
    monkeypatch.setattr(cpp_extension, "TORCH_LIB_PATH", str(libraries))
    # The versioner numbers the extensions of a process, and another test may have built one.
    monkeypatch.setattr(cpp_extension, "JIT_EXTENSION_VERSIONER", ExtensionVersioner())
    source_file = tmp_path / "small.cpp"
    source_file.write_text("int one() { return 1; }\n")
    monkeypatch.setattr(compiling, "_translation_units", lambda: [source_file])
    build._compile_for_this_machine(build._build_path())
    assert build._build_path().exists()
    assert str(libraries) == cpp_extension.TORCH_LIB_PATH


def test_unwritable_build_directory_is_reported(
    build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FSCCL_BUILD_DIR", "/proc/nowhere")
    with pytest.raises(build.BuildError) as error:
        build._compile_for_this_machine(build._build_path())
    assert "cannot write a build of fsccl to /proc/nowhere" in str(error.value)
    assert "FSCCL_BUILD_DIR" in str(error.value)


@pytest.mark.parametrize("change", ["CXX", "torch"])
def test_build_name_depends_on_compiler_and_torch(
    build: Any,
    monkeypatch: pytest.MonkeyPatch,
    change: str,
) -> None:
    before = build._build_path()
    assert build._build_path() == before
    build._build_key.cache_clear()
    if change == "CXX":
        monkeypatch.setenv("CXX", "g++-99")
    else:
        import torch

        monkeypatch.setattr(torch, "__version__", "0.0.1")
    assert build._build_path() != before


def test_importing_does_not_compile(tmp_path: Path) -> None:
    program = (
        "import os; os.environ['FSCCL_BUILD_DIR'] = os.sys.argv[1]\n"
        "import flagscale.comm.fsccl, torch.distributed as dist\n"
        "assert 'FSCCL' in dist.Backend._plugins and 'fsccl' in dist.Backend.backend_list\n"
        "flagscale.comm.fsccl.register()\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=120)
    assert list(tmp_path.iterdir()) == []
