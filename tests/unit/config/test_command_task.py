"""``experiment.task.type: command``: which words run, and what is said of the rest of a YAML."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from flagscale.config.checks import notes
from flagscale.config.load import load
from flagscale.config.schema import PROJECT
from flagscale.errors import ConfigError
from flagscale.launcher.runners.base import runner_for

if TYPE_CHECKING:
    from conftest import Workspace


def task(workspace: Workspace, text: str, runner: str = "") -> None:
    """Make the experiment one of a command; the section ``train`` stays."""
    workspace.replace("conf/train.yaml", "    type: train\n", f"    type: command\n{text}")
    workspace.replace("conf/train.yaml", "    nproc_per_node: 2\n", runner)


@pytest.mark.parametrize(
    ("given", "words", "started"),
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
def test_what_runs(
    workspace: Workspace, given: str, words: tuple[str, ...], started: tuple[str, ...]
) -> None:
    task(workspace, f"    command: {given}\n")
    experiment = workspace.load()
    assert experiment.task.command == words
    plan = runner_for(experiment).plan(experiment)
    assert [(host.nproc, host.program) for host in plan.hosts] == [(1, started)]
    assert plan.external


def test_the_yaml_of_a_training_will_do(workspace: Workspace) -> None:
    task(workspace, "    command: date\n    entrypoint: nowhere.py\n")
    workspace.replace("conf/train/tiny.yaml", "data/text", "data/none")
    experiment = workspace.load()
    assert notes(experiment, 1) == [
        "train and experiment.task.entrypoint have no effect: experiment.task.type is command"
    ]
    plan = runner_for(experiment).plan(experiment)
    assert "--num-layers" not in (*plan.hosts[0].starter, *plan.hosts[0].program)


def test_an_override_keeps_its_commas(workspace: Workspace) -> None:
    workspace.write("eval.py", "")
    listed = workspace.load("experiment.task.type=command", "experiment.task.command=[a,1e-4,010]")
    assert listed.task.command == ("a", "1e-4", "010")
    with pytest.raises(ConfigError):
        workspace.load("experiment.task.type=command", f"experiment.task.command={'[' * 60_000}")
    command = "experiment.task.command=eval.py --on a,b 'c d'"
    found = workspace.load("experiment.task.type=command", command)
    assert found.task.command == (str(workspace.root / "eval.py"), "--on", "a,b", "c d")


@pytest.mark.parametrize(
    ("text", "runner", "said"),
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
            "numa_binding: is torchrun's",
            id="option",
        ),
        pytest.param(
            "    command: date\n", "    tee: 4\n", "tee: expected 0, 1, 2, 3 or RANK", id="streams"
        ),
        pytest.param("    command: date\n", "    rdzv_id: x\n", "rdzv_id: is torchrun's", id="id"),
    ],
)
def test_what_is_refused(workspace: Workspace, text: str, runner: str, said: str) -> None:
    task(workspace, text, runner)
    with pytest.raises(ConfigError, match=said.replace("(", r"\(")):
        workspace.load()


def test_a_command_beside_training_is_refused(workspace: Workspace) -> None:
    workspace.replace("conf/train.yaml", "type: train\n", "type: train\n    command: date\n")
    with pytest.raises(ConfigError, match=r"task\.command: needs `type: command`"):
        workspace.load()


def test_the_example(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PROJECT)
    conf = Path("examples/command/conf").absolute()
    experiment = load(conf, "preprocess", ["action=dryrun"]).experiment
    (host,) = runner_for(experiment).plan(experiment).hosts
    assert host.program[1:3] == (str(PROJECT / "tools/data/preprocess.py"), "--input")
