"""Tests of the record of a start: the code of the checkouts that take part."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from flagscale.config.schema import Task
from flagscale.launcher import launch_record
from flagscale.launcher.launch_record import CodeVersion, describe_code_changes, read_code_versions


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Git checkout with a program in ``src``; this project is no checkout."""
    root = tmp_path / "user code"
    (root / "src").mkdir(parents=True)
    (root / "src" / "train.py").write_text("pass\n")
    for words in (
        ["init", "--quiet"],
        ["add", "."],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "-m", "first"],
    ):
        subprocess.run(["git", *words], cwd=root, check=True)
    monkeypatch.setattr(launch_record, "PROJECT", tmp_path / "installed")
    monkeypatch.chdir(tmp_path)
    return root


def _task(kind: str, program: Path) -> Task:
    if kind == "entrypoint":
        return Task(entrypoint=program, external=True)
    return Task(type="command", command=("python", str(program), "--lr", "1e-3"))


@pytest.mark.parametrize("kind", ["entrypoint", "command"])
def test_code_of_the_program_is_recorded(checkout: Path, kind: str) -> None:
    program = checkout / "src" / "train.py"
    (clean,) = read_code_versions(_task(kind, program))
    head = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=checkout, text=True).strip()
    assert clean == CodeVersion(str(checkout), head, "")
    program.write_text("print()\n")
    (changed,) = read_code_versions(_task(kind, program))
    assert (changed.commit, bool(changed.changes)) == (head, True)
    assert str(changed) == f"{head[:12]} with uncommitted changes"


def test_a_program_outside_of_a_checkout_has_no_version(checkout: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    assert read_code_versions(_task("command", tmp_path / "train.py")) == ()
    (tmp_path / ".git").mkdir()  # damaged
    assert read_code_versions(_task("command", tmp_path / "train.py")) == ()


AT_A, AT_B, CHANGED = (
    CodeVersion("/c", commit * 40, changes)
    for commit, changes in (("a", ""), ("b", ""), ("a", "1"))
)
OTHER_CHANGES = CodeVersion("/c", "a" * 40, "2")


@pytest.mark.parametrize(
    ("recorded", "current", "expected"),
    [
        pytest.param(AT_A, AT_A, [], id="same"),
        pytest.param(
            AT_A, AT_B, ["/c was at commit aaaaaaaaaaaa, and is at bbbbbbbbbbbb"], id="commit"
        ),
        pytest.param(
            CHANGED,
            AT_B,
            ["/c was at commit aaaaaaaaaaaa with uncommitted changes, and is at bbbbbbbbbbbb"],
            id="commit-and-changes",
        ),
        pytest.param(
            CHANGED,
            OTHER_CHANGES,
            ["/c: its uncommitted changes differ from those of then"],
            id="changes",
        ),
        pytest.param(
            AT_A,
            None,
            ["/c was at commit aaaaaaaaaaaa, and is no Git checkout any more"],
            id="gone",
        ),
    ],
)
def test_changes_of_code_are_described(
    recorded: CodeVersion, current: CodeVersion | None, expected: list[str]
) -> None:
    versions = () if current is None else (current,)
    assert [*describe_code_changes([recorded], versions)] == expected
