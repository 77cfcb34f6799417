"""Table of actions: its contents, and that one row is enough to add an action."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from flagscale.config.actions import ACTIONS, OPTIONS, Action
from flagscale.config.schema import Options, documented_fields

if TYPE_CHECKING:
    from conftest import Workspace

PROJECT = Path(__file__).resolve().parents[3]

# Program that adds one action with an experiment and one without, as a plugin would.
PLUGIN_PROGRAM = """\
import json, sys
from flagscale.config.actions import ACTIONS, Action

def ping(experiment, options):
    print(json.dumps(["pong", experiment.name, options.rank, options.json]))
    return 7

def hosts(options):
    print(json.dumps(["hosts", options.json]))
    return 8

if __name__ == "__main__":
    ACTIONS["ping"] = Action("ping", "say pong", "find", "outside:ping", ("json", "rank"))
    ACTIONS["hosts"] = Action("hosts", "name them", None, "outside:hosts", ("json",))
    from flagscale import cli
    from flagscale.launcher import entry
    door = {"flagscale": cli, "run.py": entry}[sys.argv[1]]
    door.main(sys.argv[2:])
"""
CONFIG_FLAGS = ("--config-path", "conf", "--config-name", "train")


@pytest.mark.parametrize("action", ACTIONS.values(), ids=ACTIONS)
def test_action_row_is_complete(action: Action) -> None:
    module, _, name = action.function.partition(":")
    assert callable(getattr(import_module(module), name))
    assert set(action.options) <= set(OPTIONS)
    assert "\n" not in action.help


def test_every_option_is_used_and_typed() -> None:
    options = {name for action in ACTIONS.values() for name in action.options}
    assert options == set(OPTIONS) == set(documented_fields(Options)) - {"action"}


def _run_plugin_program(workspace: Workspace, *argv: str) -> subprocess.CompletedProcess[str]:
    workspace.write("outside.py", PLUGIN_PROGRAM)
    return subprocess.run(
        [sys.executable, "outside.py", *argv],
        cwd=workspace.root,
        env={**os.environ, "PYTHONPATH": f"{PROJECT}{os.pathsep}{workspace.root}"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("argv", "code", "printed"),
    [
        pytest.param(
            ("run.py", *CONFIG_FLAGS, "action=ping", "rank=3"),
            7,
            ["pong", "demo", 3, False],
            id="run.py",
        ),
        pytest.param(
            ("flagscale", "ping", "conf/train.yaml", "--json", "--rank", "0"),
            7,
            ["pong", "demo", 0, True],
            id="flagscale",
        ),
        pytest.param(("flagscale", "hosts", "--json"), 8, ["hosts", True], id="no-experiment"),
    ],
)
def test_plugin_action_runs(
    workspace: Workspace, argv: tuple[str, ...], code: int, printed: list[object]
) -> None:
    # Arguments are not checked, because the purpose in the row is to find a run.
    workspace.replace("conf/train/tiny.yaml", "num_layers: 4", "num_layres: 4")
    result = _run_plugin_program(workspace, *argv)
    assert (result.returncode, result.stderr) == (code, "")
    assert json.loads(result.stdout) == printed


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        pytest.param(("run.py", "--help"), "\nping say pong (json=true, rank=0)\n", id="run.py"),
        pytest.param(("flagscale", "--help"), "\nping say pong\n", id="flagscale"),
        pytest.param(("flagscale", "--help"), "\nhosts name them\n", id="no-experiment"),
        pytest.param(("flagscale", "ping", "--help"), "--rank RANK only this rank's", id="options"),
        pytest.param(("flagscale", "explain", "action"), "`ping`: say pong.", id="explain"),
        pytest.param(("flagscale", "explain", "rank"), "`logs` and `ping`: only", id="takers"),
        pytest.param(("run.py", *CONFIG_FLAGS, "action=pin"), "did you mean 'ping'?", id="near"),
        pytest.param(
            ("run.py", *CONFIG_FLAGS, "action=hosts"), "logs, stop, ping, found", id="choices"
        ),
        pytest.param(
            ("flagscale", "hosts", "conf/train.yaml"), "unknown option conf/train.yaml", id="config"
        ),
    ],
)
def test_plugin_action_is_listed_in_messages(
    workspace: Workspace, argv: tuple[str, ...], expected: str
) -> None:
    result = _run_plugin_program(workspace, *argv)
    assert expected in re.sub(r"(?m)^ +| (?= )", "", result.stdout + result.stderr)


def test_help_of_experiment_omits_actions_without_experiment(workspace: Workspace) -> None:
    assert "hosts" not in _run_plugin_program(workspace, "run.py", "--help").stdout
