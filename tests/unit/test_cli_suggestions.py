"""Commands and options of other programs are answered with those of this one."""

from __future__ import annotations

import sys
from subprocess import run

import pytest

from flagscale import cli
from flagscale.cli_suggestions import OTHER_VERBS, suggest_command, suggest_option, suggest_override
from flagscale.config.actions import ACTIONS, actions_by_command

COMMANDS = (*ACTIONS, *cli._TOOLS, *cli._PATCH_COMMANDS)


@pytest.mark.parametrize(
    ("word", "command"),
    [
        ("status", "query"),
        ("launch", "run"),
        ("start", "run"),
        ("resume", "run"),
        ("list", "runs"),
        ("ps", "runs"),
        ("kill", "stop"),
        ("tail", "logs CONFIG --follow"),
        ("validate", "check"),
        ("new", "init"),
        ("autocomplete", "completion"),
        ("traim", "train"),
        ("Status", "query"),
        ("qurey", "query"),
        ("chek", "check"),
        ("statu", "query"),
        ("lauch", "run"),
        ("dryrnu", "dryrun"),
        ("patch-statsu", "patch-status"),
    ],
)
def test_verb_suggests_command(word: str, command: str) -> None:
    assert f"no command {word!r}; did you mean `flagscale {command}`?" in suggest_command(
        word, COMMANDS
    )


def test_yaml_suggests_run() -> None:
    message = suggest_command("conf/train.yaml", COMMANDS)
    assert message.endswith("did you mean `flagscale run conf/train.yaml`?")


def test_nothing_similar_suggests_nothing() -> None:
    assert suggest_command("xyzzy", COMMANDS) == "no command 'xyzzy'"


def test_verbs_stand_for_commands_and_are_none() -> None:
    assert {text.split()[0] for text in OTHER_VERBS.values()} <= {*COMMANDS, "--help"}
    assert set(OTHER_VERBS) & set(COMMANDS) == set()


@pytest.mark.parametrize(
    ("option", "words", "hint"),
    [
        ("--lr", ["1e-4"], "settings are overrides: train.model.lr=1e-4"),
        ("--lr=1e-4", [], "settings are overrides: train.model.lr=1e-4"),
        ("--nproc-per-node", ["8"], "settings are overrides: experiment.runner.nproc_per_node=8"),
        ("--max_steps", ["10"], "is a name of Hugging Face; write `train.model.train_iters=10`"),
        ("--num-layers", ["--follow"], "settings are overrides: train.model.num_layers=VALUE"),
        ("--no-such", [], None),
    ],
)
def test_option_suggests_override(option: str, words: list[str], hint: str | None) -> None:
    assert suggest_override(option, words) == hint


@pytest.mark.parametrize(
    ("option", "command", "hint"),
    [
        ("--folow", "query", "did you mean --follow?"),
        ("--tail=3", "logs", "write --lines N"),
        ("--dryrun", "run", "`flagscale dryrun …` prints the plan and starts nothing"),
        ("--lr", "run", None),
    ],
)
def test_option_suggests_option(option: str, command: str, hint: str | None) -> None:
    options = [cli._flag_of(name) for name in ACTIONS[command].options]
    assert suggest_option(option, command, options) == hint


def test_preparing_data_is_a_tool() -> None:
    assert "python tools/data/preprocess.py" in suggest_command("preprocess", COMMANDS)


def test_number_of_hosts_of_program_is_their_names() -> None:
    hint = "give the hosts of a program by name: --hosts a,b"
    assert suggest_option("--nnodes", "run", (), has_program=True) == hint
    assert suggest_option("--nnodes", "run", ()) is None


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["status", "x"], ["error: no command 'status'; did you mean `flagscale query`?"]),
        (["run", "x.yaml", "--lr=3"], ["unknown option --lr\n", "hint: settings are overrides"]),
        (["run", "x.yaml", "--nope"], ["unknown option --nope", "hint: flagscale run -h"]),
    ],
)
def test_command_line_prints_suggestion(words: list[str], parts: list[str]) -> None:
    command = [sys.executable, "-m", "flagscale.cli", *words]
    result = run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert all(part in result.stderr for part in parts)


def test_every_command_of_the_parser_is_accepted() -> None:
    actions = [action for action in cli._create_parser()._actions if action.dest == "command"]
    commands = (*actions_by_command(), *cli._TOOLS, *cli._PATCH_COMMANDS)
    assert tuple(actions[0].choices or ()) == commands
