"""Tests of the code of a start: commits, uncommitted changes, and what is no secret in them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.waiting import PATIENCE_SECONDS

from flagscale import api
from flagscale.cli import main
from flagscale.config.schema import Experiment, Task
from flagscale.errors import ConfigError
from flagscale.launcher import code_version
from flagscale.launcher.code_version import (
    CheckoutState,
    CodeVersion,
    describe_code_changes,
    read_checkouts,
    read_code_versions,
    require_clean,
)


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
    monkeypatch.setattr(code_version, "PROJECT", tmp_path / "installed")
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


# -- uncommitted changes -----------------------------------------------------------------------


def _git(directory: Path, *words: str) -> str:
    return subprocess.check_output(["git", *words], cwd=directory, text=True)


def _read(checkout: Path, exp_dir: Path | None = None) -> CheckoutState:
    (state,) = read_checkouts(_task("entrypoint", checkout / "src" / "train.py"), exp_dir)
    return state


def test_recorded_changes_restore_the_code(checkout: Path, tmp_path: Path) -> None:
    """The diff has changes of tracked files, staged or not, and new code, for ``git apply``."""
    program, new_module = checkout / "src" / "train.py", checkout / "src" / "neu ü.py"
    program.write_text("pass\nprint(1)\n")
    new_module.write_text("x = 1\ny = 2")
    (checkout / "empty.py").touch()
    (checkout / "staged.py").write_text("z = 3\n")
    _git(checkout, "add", "staged.py")
    (checkout / "weights.bin").write_bytes(b"\0" * 10)
    state = _read(checkout)
    assert state.version.files == (
        "src/train.py", "staged.py", "empty.py", "src/neu ü.py", "weights.bin",
    )  # fmt: skip
    copy = tmp_path / "copy"
    _git(tmp_path, "clone", "--quiet", str(checkout), str(copy))
    patch = tmp_path / "changes.diff"
    patch.write_text(state.format_diff())
    _git(copy, "apply", str(patch))
    for path in (program, new_module, checkout / "empty.py", checkout / "staged.py"):
        assert (copy / path.relative_to(checkout)).read_text() == path.read_text()
    assert not (copy / "weights.bin").exists(), "no code"


def test_digest_follows_tracked_files_and_new_code(checkout: Path) -> None:
    digests = {_read(checkout).version.changes}
    for name, text in (
        ("src/train.py", "print(1)\n"),
        ("src/new.py", "1"),
        ("src/new.py", "2"),
        ("src/other.py", "2"),
    ):
        (checkout / name).write_text(text)
        digests.add(_read(checkout).version.changes)
    assert len(digests) == 5
    (checkout / "data.bin").write_text("not code")
    assert _read(checkout).version.changes in digests


def test_outputs_of_runs_are_no_changes(checkout: Path) -> None:
    for name in (
        "here/logs/x.py",
        "there/logs/state.json",
        "there/a.py",
        "sweep/sweep.json",
        "sweep/b.py",
    ):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).touch()
    assert _read(checkout, checkout / "here").version.files == ()
    assert _read(checkout).version.files == ("here/logs/x.py",)
    (checkout / "logs").mkdir()
    (checkout / "logs" / "state.json").touch()  # a run in the checkout itself
    (checkout / "new.py").touch()
    assert "new.py" in _read(checkout, checkout).version.files


def test_large_changes_are_recorded_in_part(checkout: Path) -> None:
    program = checkout / "src" / "train.py"
    program.write_text("x = 1\n" * 100_000)
    state = _read(checkout)
    assert len(state.diff) < 300_000
    assert state.diff.endswith("\n+x = 1\n# the rest is left out: more than 256 KiB\n")
    program.write_text("x = 1\n" * 100_001)
    assert _read(checkout).version != state.version, "the digest is of all changes"


def test_a_search_without_end_is_given_up(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A Git that hangs delays a start by its timeout, and the code counts as unknown."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "git"
    git = shutil.which("git")
    program.write_text(f'#!/bin/sh\ncase "$*" in *=all*|*diff*) sleep 60;; esac\nexec {git} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    stream_git = code_version._stream_git

    def stream_git_in_time(consume: Any, path: Path, *arguments: str) -> bool:
        """Give the commands that end the time that they may need on a busy machine."""
        hangs = any("=all" in word or "diff" in word for word in arguments)
        limit = 0.3 if hangs else PATIENCE_SECONDS
        monkeypatch.setattr(code_version, "_GIT_TIMEOUT_SECONDS", limit)
        return stream_git(consume, path, *arguments)

    monkeypatch.setattr(code_version, "_stream_git", stream_git_in_time)
    (checkout / "src" / "train.py").write_text("print(1)\n")
    state = _read(checkout)
    assert (state.version.changes, state.version.files) == ("unknown", ("src/train.py",))


def test_secrets_are_left_out(checkout: Path) -> None:
    (checkout / ".env").write_text("A=first\n")
    _git(checkout, "add", ".env")
    _git(checkout, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x")
    (checkout / ".env").write_text("A=hunter2\n")
    (checkout / "secrets.yaml").write_text("anything: hunter2\n")
    (checkout / "src" / "train.py").write_text('password = "hunter2"\nkey = project(x)\n')
    state = _read(checkout)
    assert "hunter2" not in state.diff
    assert "+password = <hidden>\n+key = project(x)\n" in state.diff
    assert "# left out: the name is that of a file with secrets" in state.diff
    assert {".env", "secrets.yaml"} <= set(state.version.files)


# -- require_clean -----------------------------------------------------------------------------


def _experiment(checkout: Path) -> Experiment:
    task = {"type": "command", "command": ["python", str(checkout / "src" / "train.py")]}
    exp_dir = str(checkout / "out")
    config = {"experiment": {"exp_name": "x", "exp_dir": exp_dir, "task": task, "runner": {}}}
    return api.load(config, [], "launch")


def test_clean_code_is_accepted(checkout: Path) -> None:
    (checkout / "out").mkdir()
    (checkout / "out" / "x.py").touch()
    require_clean(_experiment(checkout))


def test_unknown_code_is_refused_with_its_files(checkout: Path, tmp_path: Path) -> None:
    (checkout / "src" / "train.py").write_text("print(1)\n")
    for number in range(30):
        (checkout / f"new_{number:02d}.txt").touch()
    with pytest.raises(ConfigError) as error:
        require_clean(_experiment(checkout))
    text = str(error.value)
    assert "user code: 31 files changed or untracked:\n    src/train.py\n    new_00.txt" in text
    assert "\n    and 11 more" in text
    assert error.value.exit_code == 2
    (tmp_path / "elsewhere" / "src").mkdir(parents=True)
    (tmp_path / "elsewhere" / "src" / "train.py").touch()
    with pytest.raises(ConfigError, match="elsewhere/src: is not part of a Git checkout"):
        require_clean(_experiment(tmp_path / "elsewhere"))


@pytest.mark.parametrize(
    "words", [["test"], ["run"], ["check"], ["run", "-m", "experiment.runner.tee=1,2"]]
)
def test_option_refuses_to_start(
    checkout: Path, words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    program = checkout / "src" / "train.py"
    program.write_text("print(1)\n")
    task = {"type": "command", "command": [str(program)]}
    experiment = {"exp_name": "x", "exp_dir": "out", "task": task, "runner": {"preflight": False}}
    Path("x.yaml").write_text(json.dumps({"experiment": experiment}))
    with pytest.raises(SystemExit) as end:
        main([words[0], "x.yaml", "--require-clean", *words[1:]])
    output = "".join(capfd.readouterr())
    assert (end.value.code, "src/train.py" in output) == (2, True), output
    assert not list(Path().rglob("state.json"))
