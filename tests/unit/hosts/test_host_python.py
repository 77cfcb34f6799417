"""Tests of workers that another Python of a host runs, after its environment is activated."""

from __future__ import annotations

import os
import shlex
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest

from flagscale.config.schema import PROJECT
from flagscale.hosts.local import LocalConnection
from flagscale.hosts.workers.remote import HostPython, run_on_host
from flagscale.hosts.workers.task import WorkerTask


@dataclass(frozen=True)
class Question:
    variable: str


def answer(question: Question) -> int:
    """Print where the worker runs and what it was given."""
    print(repr((str(Path.cwd()), sys.executable, os.environ.get(question.variable))))
    return 0


def run_answer(tmp_path: Path, executable: str, setup: str) -> tuple[int, str, str]:
    """Run :func:`answer` in a module of ``tmp_path``, with ``executable`` after ``setup``."""
    (tmp_path / "answering.py").write_text(Path(__file__).read_text(encoding="utf-8"))
    task = WorkerTask.create("answering:answer", Question("WORKER"))
    # A Python outside of this environment has no pytest, which this module imports.
    paths = os.pathsep.join((str(tmp_path), sysconfig.get_path("purelib")))
    setup = f"export PYTHONPATH={shlex.quote(paths)}\n{setup}"
    python = HostPython(executable, setup, PROJECT)
    result = run_on_host(LocalConnection("here"), task, timeout=60, python=python)
    return result.exit_status, result.text.strip(), result.error_text


@pytest.mark.parametrize("value", ["plain", 'it\'s "$HOME" `id` \\ ;', "two\nlines"])
def test_setup_is_evaluated_before_the_worker(tmp_path: Path, value: str) -> None:
    quoted = value.replace("'", "'\\''")
    code, output, error = run_answer(
        tmp_path, sys.executable, f"echo noise\nexport WORKER='{quoted}'"
    )
    assert (code, output) == (0, repr(("/", sys.executable, value))), error


def test_python_is_found_in_the_activated_path(tmp_path: Path) -> None:
    directory = tmp_path / "a bin"
    directory.mkdir()
    (directory / "own-python").symlink_to(sys.executable)
    code, output, error = run_answer(tmp_path, "own-python", f'export PATH="{directory}:$PATH"')
    assert code == 0, error
    assert str(directory / "own-python") in output


def test_setup_that_fails_ends_the_worker(tmp_path: Path) -> None:
    code, output, _ = run_answer(tmp_path, sys.executable, "false")
    assert (code, output) == (1, "")
