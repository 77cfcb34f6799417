"""Candidates for the word that is being typed, in a directory with an experiment and some runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flagscale import cli
from flagscale.commands import completion
from flagscale.commands.completion import complete
from flagscale.config.actions import ACTIONS
from flagscale.launcher.layout import registry_directory

PROJECT = Path(__file__).resolve().parents[3]
RUN = "20260101-120000-abcdef"


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / ".state"))
    monkeypatch.setenv("HOME", str(tmp_path / ".home"))
    shutil.copytree(PROJECT / "examples/llama3/conf", tmp_path / "conf")
    shutil.copytree(PROJECT / "examples/llama3", tmp_path / "examples/llama3")
    (tmp_path / "hosts.yaml").write_text("experiment: {runner: {hosts: ['node[1-2]']}}")
    (tmp_path / "train.py").touch()
    (tmp_path / "notes.txt").touch()
    (tmp_path / ".home/.ssh").mkdir(parents=True)
    (tmp_path / ".home/.ssh/config").write_text("Host gpu01 gpu02 *.lab\n  User me\nHost cpu\n")
    registry_directory().mkdir(parents=True)
    state = {
        "run_id": RUN,
        "name": "llama",
        "exp_dir": str(tmp_path / "outputs"),
        "hosts": [{"name": "a"}, {"name": "b"}],
    }
    record = json.dumps({"state": state, "ended": {"phase": "completed"}})
    (registry_directory() / f"{RUN}.json").write_text(record)
    (registry_directory() / "broken.json").write_text("{")
    return tmp_path


def values_of(line: str) -> list[str]:
    candidates = complete(line.split(" "), cli._create_parser(), cli._read_groups)
    return [candidate.value for candidate in candidates]


CASES = {
    "command": ("qu", ["query"]),
    "YAML and directory": ("check ", ["conf/", "examples/", "hosts.yaml", "train.py"]),
    "file in a directory": (
        "run conf/tr",
        ["conf/train/", "conf/train.yaml", "conf/train_hetero.yaml"],
    ),
    "run": ("stop 2026", [RUN]),
    "run or YAML": ("query ", [RUN, "conf/", "examples/", "hosts.yaml"]),
    "run of a report": ("report x.yaml 20", [RUN]),
    "run of the list": ("runs 20", [RUN]),
    "option": ("query --fo", ["--follow"]),
    "option of an action": ("dryrun --ho", ["--host", "--hosts"]),
    "host of a run": (f"dryrun {RUN} --host ", ["a", "b"]),
    "host of a YAML": ("dryrun hosts.yaml --host ", ["node1", "node2"]),
    "hosts of SSH": ("run --hosts gpu", ["gpu01", "gpu02"]),
    "next host": ("run --hosts gpu01,c", ["gpu01,cpu"]),
    "value after an equals sign": ("run --nproc=", ["--nproc=auto"]),
    "value of an option": ("run --nproc a", ["auto"]),
    "variable": ("run --env XDG_STATE_H", ["XDG_STATE_HOME"]),
    "action": ("run -p conf -n train -a dry", ["dryrun"]),
    "name of a YAML": ("run -n ", ["hosts"]),
    "sections": ("run conf/train.yaml ", ["train=", "experiment.", "train."]),
    "section": ("run conf/train.yaml experiment.c", ["experiment.cmds."]),
    "key": ("run conf/train.yaml train.model.num_query", ["train.model.num_query_groups="]),
    "key of a section": (
        "dryrun conf/train.yaml experiment.runner.slurm.container.im",
        ["experiment.runner.slurm.container.image="],
    ),
    "key with a mark": ("run conf/train.yaml ~experiment.cm", ["~experiment.cmds."]),
    "key before a program": ("run experiment.runner.max_r", ["experiment.runner.max_restarts="]),
    "choice": (
        "run conf/train.yaml experiment.runner.wait_for=",
        [f"experiment.runner.wait_for={word}" for word in ("none", "joined", "ready", "step")],
    ),
    "choice of an argument": (
        "run conf/train.yaml train.model.position_embedding_type=r",
        ["train.model.position_embedding_type=rope"],
    ),
    "choice in an own section": (
        "run conf/train.yaml train.model.mine.lr_decay_style=cos",
        ["train.model.mine.lr_decay_style=cosine"],
    ),
    "switch": (
        "run conf/train.yaml train.model.swiglu=",
        ["train.model.swiglu=true", "train.model.swiglu=false"],
    ),
    "file of a key": (
        "run conf/train.yaml train.data.data_path=no",
        ["train.data.data_path=notes.txt"],
    ),
    "file of a group": ("run conf/train.yaml train=1", ["train=1b"]),
    "key to explain": ("explain experiment.cmds.b", ["experiment.cmds.before_start"]),
    "model": ("train l", ["llama3"]),
    "group of a model": ("train llama3 train=1", ["train=1b"]),
    "model of a new experiment": ("init --model qwen3_3", ["qwen3_30b_a3b"]),
    "directory": ("init c", ["conf/"]),
    "shell": ("completion f", ["fish"]),
    "command of a group": ("comm li", ["list"]),
    "argument of a program": ("run train.py n", ["notes.txt"]),
    "argument after a separator": ("test -- python t", ["train.py"]),
    "unknown key": ("run conf/train.yaml train.nothing.", []),
    "nothing more": ("schema train t", []),
}


@pytest.mark.parametrize(("line", "expected"), CASES.values(), ids=CASES)
def test_word_is_completed(line: str, expected: list[str], directory: Path) -> None:
    assert values_of(line) == expected


def test_every_command_is_completed(directory: Path) -> None:
    assert values_of("") == [
        *(action.command for action in ACTIONS.values()),
        *cli._TOOLS,
        *cli._PATCH_COMMANDS,
    ]


def test_candidates_have_descriptions(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = {}
    for line in ("stop 20", "run conf/train.yaml train.model.num_l", "sto"):
        cli_words = [completion.COMPLETE, "zsh", *line.split(" ")]
        with pytest.raises(SystemExit):
            cli.main(cli_words)
        output = capsys.readouterr().out.splitlines()
        lines.update(text.split("\t") for text in output)
    assert lines[RUN].startswith(f"llama, completed, {directory}"[:70])
    assert lines["train.model.num_layers="].startswith("Number of transformer layers")
    assert lines["stop"] == "end this run, and nothing else"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("flagscale run conf/train.yaml experiment.runner.wait_for=re", ["ready"]),
        ("flagscale run conf/train.yaml experiment.runner.wait_for=", "none joined ready step"),
        ("flagscale run --nproc=a", ["auto"]),
        ("flagscale run 'conf/tra", ["conf/train/", "conf/train.yaml", "conf/train_hetero.yaml"]),
        ("flagscale sto", ["stop"]),
        ("flagscale run my\\ f", [r"my\ file.yaml"]),
        ("flagscale 'x", []),
    ],
)
def test_bash_gets_the_rest_of_a_word(
    line: str, expected: list[str] | str, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (directory / "my file.yaml").touch()
    breaks = " \t\n\"'@><=;|&(:"
    with pytest.raises(SystemExit):
        cli.main([completion.COMPLETE, "bash", line, breaks])
    output = capsys.readouterr().out.splitlines()
    words = expected.split() if isinstance(expected, str) else expected
    assert [text.partition("\t")[0] for text in output] == words


@pytest.mark.parametrize(
    "words", [[], ["bash"], ["zsh"], ["zsh", "nope", ""], ["fish", "run", "no/"]]
)
def test_nothing_is_printed_where_nothing_is_known(
    words: list[str], directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main([completion.COMPLETE, *words])
    assert (end.value.code, capsys.readouterr()) == (0, ("", ""))


def test_completing_imports_nothing_slow(directory: Path) -> None:
    program = (
        "import sys; from flagscale.cli import main\n"
        "try: main(['__complete', 'zsh', 'run', 'conf/train.yaml', 'train.model.'])\n"
        "except SystemExit: pass\n"
        "slow = {'torch', 'hydra', 'omegaconf', 'paramiko', 'rich', 'yaml'}\n"
        "print(sorted(slow & {*sys.modules}))"
    )
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    lines = result.stdout.splitlines()
    assert lines[-1] == "[]"
    assert len(lines) > 200
