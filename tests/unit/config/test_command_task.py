"""``experiment.task.type: command``: the command line, and notes on sections it ignores."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from flagscale.config.checks import experiment_notes
from flagscale.config.load import load
from flagscale.config.schema import PROJECT
from flagscale.errors import ConfigError
from flagscale.launcher.runners.base import runner_for_experiment

if TYPE_CHECKING:
    from conftest import Workspace


def set_command_task(workspace: Workspace, text: str, runner: str = "") -> None:
    """Change the experiment to run a command; the section ``train`` stays."""
    workspace.replace("conf/train.yaml", "    type: train\n", f"    type: command\n{text}")
    workspace.replace("conf/train.yaml", "    nproc_per_node: 2\n", runner)


@pytest.mark.parametrize(
    ("command", "words", "program"),
    [
        pytest.param("date -u", ("date", "-u"), ("date", "-u"), id="text"),
        pytest.param("['a b', $c, 1.50]", ("a b", "$c", "1.50"), ("a b", "$c", "1.50"), id="list"),
        pytest.param(
            "[a, 1e-4, 010, 1_000, 12:30:00, yes, '1e5', 2026-11-25]",
            ("a", "1e-4", "010", "1_000", "12:30:00", "yes", "1e5", "2026-11-25"),
            ("a", "1e-4", "010", "1_000", "12:30:00", "yes", "1e5", "2026-11-25"),
            id="items as they are written",
        ),
        pytest.param(
            "\"bash -c 'echo $RANK'\"",
            ("bash", "-c", "echo $RANK"),
            ("bash", "-c", "echo $RANK"),
            id="quotes",
        ),
        pytest.param(
            "python -V", ("python", "-V"), (sys.executable, "-V"), id="the Python of the host"
        ),
        pytest.param(
            "-m json.tool a",
            ("-m", "json.tool", "a"),
            (sys.executable, "-m", "json.tool", "a"),
            id="module",
        ),
        pytest.param(
            "tools/data/preprocess.py -h",
            (str(PROJECT / "tools/data/preprocess.py"), "-h"),
            (sys.executable, str(PROJECT / "tools/data/preprocess.py"), "-h"),
            id="program of this project",
        ),
    ],
)
def test_command_is_planned_on_each_host(
    workspace: Workspace, command: str, words: tuple[str, ...], program: tuple[str, ...]
) -> None:
    set_command_task(workspace, f"    command: {command}\n")
    experiment = workspace.load()
    assert experiment.task.command == words
    plan = runner_for_experiment(experiment).plan(experiment)
    assert [(host.nproc, host.program) for host in plan.hosts] == [(1, program)]
    assert plan.external


def test_training_yaml_can_run_a_command(workspace: Workspace) -> None:
    set_command_task(workspace, "    command: date\n    entrypoint: nowhere.py\n")
    workspace.replace("conf/train/tiny.yaml", "data/text", "data/none")
    experiment = workspace.load()
    assert experiment_notes(experiment, 1) == [
        "train and experiment.task.entrypoint have no effect: experiment.task.type is command"
    ]
    plan = runner_for_experiment(experiment).plan(experiment)
    assert "--num-layers" not in (*plan.hosts[0].starter, *plan.hosts[0].program)


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("echo $HOME && ls | head", "`$HOME`, `&&`, `|`"),
        ("make > log 2>&1", "`>`, `2>&1`"),
        ("cd x; ls", "`x;`"),
        ("echo ${RANK} $(id)", "`${RANK}`, `$(id)`"),
    ],
)
def test_shell_syntax_without_a_shell_is_noted(
    workspace: Workspace, command: str, shown: str
) -> None:
    text = command.replace("${", r"\${")
    set_command_task(workspace, f"    command: {json.dumps(text)}\n")
    workspace.replace("conf/train.yaml", "  - train: tiny\n", "")
    (note,) = experiment_notes(workspace.load(), 1)
    assert note == (
        f"experiment.task.command: {shown}: passed as typed, because no shell runs the command; "
        f"for a shell write [bash, -c, '{command}']"
    )


@pytest.mark.parametrize(
    "command",
    ["bash -c 'echo $HOME && ls'", "env A=1 sh -c 'ls | head'", "grep a|b x", "echo 5$ a;b"],
)
def test_command_of_a_shell_has_no_note(workspace: Workspace, command: str) -> None:
    set_command_task(workspace, f"    command: {json.dumps(command)}\n")
    workspace.replace("conf/train.yaml", "  - train: tiny\n", "")
    assert experiment_notes(workspace.load(), 1) == []


def test_override_of_command_keeps_commas(workspace: Workspace) -> None:
    workspace.write("eval.py", "")
    experiment_of_list = workspace.load(
        "experiment.task.type=command", "experiment.task.command=[a,1e-4,010]"
    )
    assert experiment_of_list.task.command == ("a", "1e-4", "010")
    with pytest.raises(ConfigError):
        workspace.load("experiment.task.type=command", f"experiment.task.command={'[' * 1000}")
    command = "experiment.task.command=eval.py --on a,b 'c d'"
    experiment = workspace.load("experiment.task.type=command", command)
    assert experiment.task.command == (str(workspace.root / "eval.py"), "--on", "a,b", "c d")


@pytest.mark.parametrize(
    ("text", "runner", "message"),
    [
        pytest.param("", "", "task.command: is required with `type: command`", id="nothing"),
        pytest.param("    command: ''\n", "", "command: is required with", id="empty"),
        pytest.param('    command: "echo \'a"\n', "", "cannot be split: No closing", id="quote"),
        pytest.param("    command: {a: b}\n", "", "expected a list, each item a text", id="map"),
        pytest.param("    command: nowhere/x.py\n", "", "no file nowhere/x.py", id="program"),
        pytest.param('    command: ["a\\0b"]\n', "", "NUL character", id="nul"),
        pytest.param(
            "    command: wandb login --api-key abc\n",
            "",
            "api-key looks like a secret",
            id="secret",
        ),
        pytest.param(
            "    command: curl https://me:pw@host\n",
            "",
            "a word looks like a secret",
            id="password",
        ),
        pytest.param(
            "    command: date\n",
            "    numa_binding: node\n",
            "numa_binding: is an option of torchrun",
            id="option",
        ),
        pytest.param(
            "    command: date\n", "    tee: 4\n", "tee: expected 0, 1, 2, 3 or RANK", id="streams"
        ),
        pytest.param(
            "    command: date\n", "    rdzv_id: x\n", "rdzv_id: is an option of torchrun", id="id"
        ),
    ],
)
def test_invalid_command_task_is_rejected(
    workspace: Workspace, text: str, runner: str, message: str
) -> None:
    set_command_task(workspace, text, runner)
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        workspace.load()


def test_command_with_training_task_is_rejected(workspace: Workspace) -> None:
    workspace.replace("conf/train.yaml", "type: train\n", "type: train\n    command: date\n")
    with pytest.raises(ConfigError, match=r"task\.command: needs `type: command`"):
        workspace.load()


def test_preprocess_example_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PROJECT)
    conf = Path("examples/command/conf").absolute()
    experiment = load(conf, "preprocess", ["action=dryrun"]).experiment
    (host,) = runner_for_experiment(experiment).plan(experiment).hosts
    assert host.program[1:3] == (str(PROJECT / "tools/data/preprocess.py"), "--input")
