"""Tests of copies of a run's code: their content, the plan with them, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flagscale import api
from flagscale.config.arguments.spec.train_arguments import read_arguments
from flagscale.config.schema import PROJECT, Experiment, Task
from flagscale.errors import ConfigError
from flagscale.launcher import code_snapshot
from flagscale.launcher.code_snapshot import CodeSnapshot, use_snapshot
from flagscale.launcher.launch_record import RecordedSnapshot, make_launch_record
from flagscale.launcher.layout import Layout
from flagscale.launcher.runners.base import runner_for_experiment

Configure = Callable[..., Experiment]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small project in place of this one."""
    root = tmp_path / "project"
    (root / "flagscale" / "__pycache__").mkdir(parents=True)
    (root / "flagscale" / "a.py").write_text("a = 1\n")
    (root / "flagscale" / "run.sh").write_text("true\n")
    (root / "flagscale" / "run.sh").chmod(0o755)
    (root / "third_party" / "Megatron-LM").mkdir(parents=True)
    (root / "third_party" / "Megatron-LM" / "b.py").write_text("b = 1\n")
    (root / "outputs").mkdir()
    (root / "outputs" / "x").touch()
    monkeypatch.setattr(code_snapshot, "PROJECT", root)
    return root


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A program in a Git checkout that has ignored data and outputs of another run."""
    root = tmp_path / "user code"
    for name, text in (
        ("train.py", "import lib.m\nprint(lib.m.x)\n"),
        ("lib/__init__.py", ""),
        ("lib/m.py", "x = 'then'\n"),
        ("data/big.bin", "data"),
        (".gitignore", "data/\n"),
        ("out/logs/state.json", "{}"),
        ("out/y.py", ""),
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "link.py").symlink_to("train.py")
    (root / "links").symlink_to("lib")
    (root / "node_modules").mkdir()
    (root / "node_modules" / "z.js").touch()
    subprocess.run(["git", "init", "--quiet"], cwd=root, check=True)
    subprocess.run(["git", "add", "train.py", "link.py"], cwd=root, check=True)
    return root / "train.py"


@pytest.fixture
def configure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Configure:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)

    def load(*command: object, **runner: Any) -> Experiment:
        task = {"type": "command", "command": [*map(str, command or ("hostname",))]}
        runner = {"snapshot": True, **runner}
        exp = {"exp_name": "x", "exp_dir": str(tmp_path / "exp"), "task": task, "runner": runner}
        return api.load({"experiment": exp}, [], "plan")

    return load


def _names(directory: Path) -> list[str]:
    return sorted(
        str(path.relative_to(directory))
        for path in directory.rglob("*")
        if path.is_symlink() or not path.is_dir()
    )


def _copies(snapshot: CodeSnapshot) -> RecordedSnapshot:
    assert snapshot.copies is not None
    return snapshot.copies


def test_project_is_copied_once_per_content(project: Path, configure: Configure) -> None:
    experiment = configure()
    planned = use_snapshot(experiment, create=False)
    assert not experiment.exp_dir.exists(), "a plan writes nothing"
    first = use_snapshot(experiment, create=True)
    assert first == planned
    copy = Path(_copies(first).project)
    assert copy.parent == Layout(experiment.exp_dir).code
    assert first.experiment.runner.build_dir == copy
    assert _names(copy) == ["flagscale/a.py", "flagscale/run.sh", "third_party/Megatron-LM/b.py"]
    assert (copy / "flagscale" / "a.py").stat().st_mode & 0o777 == 0o400
    assert os.access(copy / "flagscale" / "run.sh", os.X_OK)
    assert use_snapshot(experiment, create=True) == first
    (project / "flagscale" / "a.py").write_text("a = 2\n")
    second = use_snapshot(experiment, create=True)
    assert second != first
    assert (copy / "flagscale" / "a.py").read_text() == "a = 1\n"
    assert len([*copy.parent.iterdir()]) == 2
    text = "hostname is not part of the copy: it is no file of yours"
    assert first.notes == [f"experiment.runner.snapshot: {text}"]


def test_without_the_key_nothing_changes(project: Path, configure: Configure) -> None:
    experiment = configure(snapshot=False)
    assert use_snapshot(experiment, create=True) == CodeSnapshot(experiment)


def test_a_copy_that_was_changed_is_refused(project: Path, configure: Configure) -> None:
    experiment = configure()
    copy = Path(_copies(use_snapshot(experiment, create=True)).project)
    (copy / "flagscale" / "a.py").unlink()
    with pytest.raises(ConfigError, match="this copy of the code is incomplete or was changed"):
        use_snapshot(experiment, create=True)


@pytest.mark.parametrize("form", ["absolute", "relative", "script"])
def test_program_and_its_modules_are_those_of_the_start(
    project: Path, program: Path, configure: Configure, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.chdir(program.parent)
    word = program if form == "absolute" else "train.py"
    command = (word, "data/big.bin") if form == "script" else ("python", word, "data/big.bin")
    snapshot = use_snapshot(configure(*command), create=True)
    copies, task = _copies(snapshot), snapshot.experiment.task
    copy = Path(copies.copy)
    assert (copies.origin, copies.program) == (str(program.parent), str(program))
    assert {*_names(copy)} == {
        *(".gitignore", "lib/__init__.py", "lib/m.py", "link.py", "links"),
        *("node_modules/z.js", "train.py"),
    }
    expected = [str(copy / "train.py"), "data/big.bin"]
    assert [*task.command][-2:] == expected, "files that are no code stay where they are"
    if form == "script":
        assert task.entrypoint == copy / "train.py"
    (program.parent / "lib" / "m.py").write_text("x = 'now'\n")
    output = subprocess.check_output([sys.executable, *expected], text=True)
    assert output == "then\n"


def test_search_path_is_that_of_the_copy(
    project: Path, program: Path, configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{program.parent}/lib:/elsewhere")
    snapshot = use_snapshot(configure("python", program), create=True)
    assert snapshot.experiment.task.packages == (Path(_copies(snapshot).copy) / "lib",)


def test_earlier_copies_are_copied_again(
    project: Path, program: Path, configure: Configure, tmp_path: Path
) -> None:
    """A rerun has its own copies, of the code that the first run had."""
    experiment = configure("python", program)
    first = _copies(use_snapshot(experiment, create=True))
    record = make_launch_record(experiment, [], snapshot=first)
    (program.parent / "lib" / "m.py").write_text("x = 'now'\n")
    experiment = replace(experiment, exp_dir=tmp_path / "exp_rerun_1")
    again = _copies(use_snapshot(experiment, create=True, record=record))
    assert (again.origin, again.program) == (first.origin, first.program)
    assert Path(again.copy).name == Path(first.copy).name
    assert Path(again.copy).parent == tmp_path / "exp_rerun_1" / "logs" / "code"


def test_a_changed_copy_is_not_copied_again(
    project: Path, program: Path, configure: Configure, tmp_path: Path
) -> None:
    experiment = configure("python", program)
    first = _copies(use_snapshot(experiment, create=True))
    record = make_launch_record(experiment, [], snapshot=first)
    module = Path(first.copy, "lib", "m.py")
    module.chmod(0o600)
    module.write_text("x = 'edited'\n")
    experiment = replace(experiment, exp_dir=tmp_path / "exp_rerun_1")
    with pytest.raises(ConfigError, match=r"user code-\w+: this copy of the code .* was changed"):
        use_snapshot(experiment, create=True, record=record)


def test_script_runs_the_copies(project: Path, program: Path, configure: Configure) -> None:
    """Also if the directory of the experiment is in the project."""
    experiment = replace(configure("python", program), exp_dir=project / "outputs" / "exp")
    snapshot = use_snapshot(experiment, create=True)
    plan = runner_for_experiment(snapshot.experiment).plan(snapshot.experiment)
    (host,) = plan.hosts
    assert host.program[-1] == f"{_copies(snapshot).copy}/train.py"
    assert host.python_path[-1] == _copies(snapshot).project


def test_code_that_is_not_copied_is_noted(
    project: Path, program: Path, configure: Configure, tmp_path: Path
) -> None:
    subprocess.run(["git", "init", "--quiet", "inner"], cwd=program.parent, check=True)
    (program.parent / "inner" / "i.py").touch()
    notes = use_snapshot(configure("python", program), create=True).notes
    text = "inner/ is a Git repository of its own, which is not part of the copy"
    assert notes == [f"experiment.runner.snapshot: {text}"]
    (tmp_path / "mine.py").touch()
    values = {"dataloader_type": "external", "external_data": f"{tmp_path}/mine.py:make"}
    own = replace(configure(), task=Task(), train=read_arguments(values).arguments)
    (note,) = use_snapshot(own, create=True).notes
    assert note.endswith(f"external_data {tmp_path}/mine.py:make is not part of the copy")


def _refusals(
    tmp_path: Path, program: Path
) -> dict[str, tuple[tuple[object, ...], dict[str, Any]]]:
    return {
        "`-m MODULE` is imported from": (("python", "-m", "lib.m", "train.py"), {}),
        "build_dir names another directory": ((), {"build_dir": "/opt/x"}),
        "the hosts share no files": (
            ("python", program),
            {"no_shared_fs": True, "hosts": ["a", "b"]},
        ),
    }


@pytest.mark.parametrize("message", [*_refusals(Path(), Path())])
def test_what_cannot_be_copied_is_refused(
    project: Path, program: Path, configure: Configure, tmp_path: Path, message: str
) -> None:
    command, runner = _refusals(tmp_path, program)[message]
    with pytest.raises(ConfigError, match=f"experiment.runner.snapshot: .*{message}"):
        use_snapshot(configure(*command, **runner), create=True)


def test_data_is_no_code(
    project: Path, configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "train.py").write_text("x = 1\n")
    monkeypatch.setattr(code_snapshot, "_MAX_BYTES", 10)
    use_snapshot(configure("python", tmp_path / "home" / "train.py"), create=True)
    (tmp_path / "home" / "big.bin").write_bytes(b"0" * 20)
    with pytest.raises(ConfigError, match="home has too much to be code: 26 bytes"):
        use_snapshot(configure("python", tmp_path / "home" / "train.py"), create=True)


def test_this_project_can_be_launched_from_its_copy(configure: Configure) -> None:
    """The copy has everything that the launcher reads."""
    copy = _copies(use_snapshot(configure(), create=True)).project
    program = "import flagscale.launcher.entry as e; print(e.__file__); e.main()"
    arguments = ["--config-path", str(PROJECT / "examples/llama3/conf"), "--config-name", "train"]
    result = subprocess.run(
        [sys.executable, "-c", program, *arguments, "action=dryrun"],
        env={**os.environ, "PYTHONPATH": copy},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"{copy}/flagscale/launcher/entry.py\n")
