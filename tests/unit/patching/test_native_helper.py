"""Tests of the compiled helper: built by the real compiler, or a warning with a remedy."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from flagscale.patching import native
from flagscale.patching.cli import main_unpatch
from flagscale.patching.manifest import read_manifest
from flagscale.patching.spec import load_spec

from .conftest import BACKEND, Project, write_file

SOURCE = """\
#include <Python.h>
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "helper", "a helper", -1, nullptr};
extern "C" PyObject* PyInit_helper() { return PyModule_Create(&module); }
"""


@pytest.fixture
def headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pybind11 package that contains only headers."""
    write_file(tmp_path / "site" / "pybind11" / "__init__.py", "")
    (tmp_path / "site" / "pybind11" / "include").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path / "site"))


def declare(project: Project) -> None:
    text = BACKEND + "native_module: tiny/helper\nnative_source: tiny/helper.cpp\n"
    (project.layout.definition / "backend.yaml").write_text(text)


@pytest.mark.compiler
@pytest.mark.usefixtures("headers")
def test_is_built_and_importable(project: Project) -> None:
    declare(project)
    write_file(project.source / "tiny/helper.cpp", SOURCE)
    manifest = project.unpatch().manifest
    assert manifest.native == "built with g++ and pybind11"
    assert manifest.warnings == ()
    (path,) = manifest.generated
    spec = importlib.util.spec_from_file_location("helper", project.tree / path)
    assert spec is not None
    assert importlib.util.module_from_spec(spec).__doc__ == "a helper"
    assert not project.unpatch().edits, "what we built is nobody's edit"


@pytest.mark.compiler
@pytest.mark.usefixtures("headers")
def test_compiler_errors_are_a_warning(project: Project) -> None:
    declare(project)
    write_file(project.source / "tiny/helper.cpp", "int broken(\n")
    (warning,) = project.unpatch().manifest.warnings
    assert "could not compile tiny/helper.cpp" in warning
    assert "expected" in warning


@pytest.mark.compiler
def test_missing_helper_is_built_when_possible(
    project: Project, headers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    declare(project)
    write_file(project.source / "tiny/helper.cpp", SOURCE)
    with monkeypatch.context() as without:
        without.setenv("CXX", "/bin/false")
        assert project.unpatch().manifest.generated == ()
    outcome = project.unpatch()
    assert not outcome.was_built
    assert len(outcome.manifest.generated) == 1
    assert read_manifest(project.layout.manifest) == outcome.manifest


def test_warning_is_printed(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    declare(project)  # the tree does not contain the helper's source
    options = ["--backend", "tiny", "--root", str(project.layout.root)]
    assert main_unpatch([*options, "--path", str(project.source), "--quiet"]) == 0
    assert "warning: helper" in capsys.readouterr().out


def test_backend_without_helper(project: Project) -> None:
    spec = load_spec(project.layout)
    assert native.provide_module(replace(spec, native_module=None), project.tree, "1") is None


def test_concurrent_commands_build_one_tree(project: Project) -> None:
    tool = Path(__file__).parents[3] / "tools" / "patch" / "unpatch.py"
    command = [sys.executable, str(tool), "--backend", "tiny", "--path", str(project.source)]
    command += ["--root", str(project.layout.root)]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    finished = [process.communicate() for process in running]
    assert [process.returncode for process in running] == [0, 0], finished
    assert sum("nothing to do" in out for out, _ in finished) == 1
