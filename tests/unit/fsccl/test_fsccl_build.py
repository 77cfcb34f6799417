"""Building the extension: what names a build: Any, and what is said when none can be made."""

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

    monkeypatch.setenv("FSCCL_BUILD_DIR", str(tmp_path / "a place with 'quotes' and $signs"))
    module._key.cache_clear()
    yield module
    module._key.cache_clear()


def test_no_compiler_is_said(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "this machine has no no-such-compiler" in (build.unavailable() or "")
    with pytest.raises(build.BuildError) as error:
        build._build(build._library())
    assert "there is no C++ compiler 'no-such-compiler' on PATH" in str(error.value)
    assert "set CXX" in str(error.value)


@pytest.fixture
def prebuilt(build: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The module, with a library of this environment's name that is none."""
    import flagscale.comm.fsccl.prebuilt as module

    monkeypatch.setenv("FSCCL_PREBUILT_DIR", str(tmp_path / "prebuilt"))
    module.library().parent.mkdir(parents=True)
    module.library().touch()
    return module


def test_a_prebuilt_library_needs_no_compiler(
    build: Any, prebuilt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build.how() == "prebuilt"
    assert build.unavailable() is None
    build._library().parent.mkdir(parents=True)
    build._library().touch()
    assert build.how() == "built here"


@pytest.mark.parametrize("lacks", ["instructions", "torch", "sources"])
def test_a_prebuilt_library_that_does_not_fit_is_passed_over(
    build: Any, prebuilt: Any, monkeypatch: pytest.MonkeyPatch, lacks: str
) -> None:
    assert prebuilt.find() == prebuilt.library()
    if lacks == "instructions":
        monkeypatch.setattr(compiling, "processor_flags", lambda: "flags : sse2 avx")
        assert "avx2" in prebuilt.missing() or "asimd" in prebuilt.missing()
    elif lacks == "torch":
        import torch

        monkeypatch.setattr(torch, "__version__", "0.0.1")
    else:
        monkeypatch.setattr(compiling, "sources_digest", lambda: b"others")
    prebuilt._key.cache_clear()
    assert prebuilt.find() is None
    assert build.how() == build.COMPILED
    monkeypatch.undo()
    prebuilt._key.cache_clear()


def test_missing_headers_are_said(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", sys.executable)  # a program that is there
    monkeypatch.setattr(compiling.sysconfig, "get_path", lambda name: f"/no {name}")
    assert "this machine has no /no include/Python.h" in build.unavailable()
    with pytest.raises(build.BuildError, match=r"no /no include/Python\.h") as error:
        build._build(build._library())
    assert "install the headers of this Python" in str(error.value)


@pytest.mark.compiler
def test_a_failed_compilation_shows_the_compilers_words(
    build: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    broken = tmp_path / "broken.cpp"
    broken.write_text("int main() { return nonsense; }\n")
    monkeypatch.setattr(compiling, "_sources", lambda: [broken])
    library = build._library()
    with pytest.raises(build.BuildError) as error:
        build._build(library)
    assert "compiling fsccl failed" in str(error.value)
    assert "nonsense" in str(error.value)
    assert not library.exists()


@pytest.mark.compiler
def test_torch_is_linked_from_any_place(
    build: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    from torch.utils import cpp_extension
    from torch.utils._cpp_extension_versioner import ExtensionVersioner

    libraries = tmp_path / "a place with 'quotes' and $signs"
    libraries.symlink_to(cpp_extension.TORCH_LIB_PATH)
    monkeypatch.setattr(cpp_extension, "TORCH_LIB_PATH", str(libraries))
    # It numbers what one process builds, and another test may have built here.
    monkeypatch.setattr(cpp_extension, "JIT_EXTENSION_VERSIONER", ExtensionVersioner())
    small = tmp_path / "small.cpp"
    small.write_text("int one() { return 1; }\n")
    monkeypatch.setattr(compiling, "_sources", lambda: [small])
    build._build(build._library())
    assert build._library().exists()
    assert str(libraries) == cpp_extension.TORCH_LIB_PATH


def test_an_unwritable_place_is_said(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSCCL_BUILD_DIR", "/proc/nowhere")
    with pytest.raises(build.BuildError) as error:
        build._build(build._library())
    assert "cannot write a build of fsccl to /proc/nowhere" in str(error.value)
    assert "FSCCL_BUILD_DIR" in str(error.value)


@pytest.mark.parametrize("change", ["CXX", "torch"])
def test_a_build_is_named_by_what_makes_it(
    build: Any,
    monkeypatch: pytest.MonkeyPatch,
    change: str,
) -> None:
    before = build._library()
    assert build._library() == before
    build._key.cache_clear()
    if change == "CXX":
        monkeypatch.setenv("CXX", "g++-99")
    else:
        import torch

        monkeypatch.setattr(torch, "__version__", "0.0.1")
    assert build._library() != before


def test_importing_does_not_compile(tmp_path: Path) -> None:
    text = (
        "import os; os.environ['FSCCL_BUILD_DIR'] = os.sys.argv[1]\n"
        "import flagscale.comm.fsccl, torch.distributed as dist\n"
        "assert 'FSCCL' in dist.Backend._plugins and 'fsccl' in dist.Backend.backend_list\n"
        "flagscale.comm.fsccl.register()\n"
    )
    subprocess.run([sys.executable, "-c", text, str(tmp_path)], check=True, timeout=120)
    assert list(tmp_path.iterdir()) == []
