"""Programs without a YAML: where a program begins, and the configuration that it gets."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from flagscale import api, cli
from flagscale.commands.program import (
    PROGRAM_ACTIONS,
    VALUE_OPTIONS,
    program_config,
    program_name,
    split_program,
)
from flagscale.config.actions import ACTIONS
from flagscale.config.interpolation import escape_interpolations

NO_OPTIONS = argparse.Namespace(hosts=None, nproc=None, name=None, exp_dir=None, env=None)

SPLITS = {
    "separator": ("a=1 -- python x.py -v", "a=1", "python x.py -v"),
    "script": ("--nproc 4 train.py --nproc 8 a=1", "--nproc 4", "train.py --nproc 8 a=1"),
    "script alone": ("train.py", "", "train.py"),
    "option and program": ("--hosts a,b nvidia-smi -L", "--hosts a,b", "nvidia-smi -L"),
    "option of torchrun": ("--nproc-per-node 4 x.py", "--nproc-per-node 4", "x.py"),
    "option with equals sign": ("--hosts=a nvidia-smi", "--hosts=a", "nvidia-smi"),
    "separator of the program": ("x.py -- y", "", "x.py -- y"),
    "overrides": ("~a.b +c=x.py d=e x.py", "~a.b +c=x.py d=e", "x.py"),
    "value that ends in .py": ("--name a.py b.py", "--name a.py", "b.py"),
    "YAML": ("train.yaml -m a=1,2 --jobs 2", "train.yaml -m a=1,2 --jobs 2", ""),
    "YAML and separator": ("train.yaml -- python x", "train.yaml", "python x"),
    "YAML and option": ("--hosts a train.yaml", "--hosts a train.yaml", ""),
    "YAML without suffix": ("conf/train a=1", "conf/train a=1", ""),
    "FlagScale's form": ("-p conf -n x.py a=1", "-p conf -n x.py a=1", ""),
    "nothing": ("", "", ""),
}


@pytest.mark.parametrize(("line", "options", "program"), SPLITS.values(), ids=SPLITS)
def test_program_begins(line: str, options: str, program: str) -> None:
    assert split_program(line.split()) == (options.split(), program.split())


def test_options_with_values_are_those_of_the_parser() -> None:
    (commands,) = (a for a in cli._create_parser()._actions if isinstance(a.choices, dict))
    assert isinstance(commands.choices, dict)
    flags = {
        flag
        for name in PROGRAM_ACTIONS
        for action in commands.choices[name]._actions
        for flag in action.option_strings
        if action.nargs is None
    }
    assert flags == VALUE_OPTIONS


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("train.py --lr 1", "train"),
        ("python -u src/main.py", "main"),
        ("python3.11 -m pkg.mod", "pkg.mod"),
        ("-m pkg.mod a", "pkg.mod"),
        ("bash -c 'echo a | head'", "bash"),
        ("/usr/bin/nvidia-smi -L", "nvidia-smi"),
        ("'my tool.sh'", "my_tool.sh"),
        ("python", "python"),
        ("...", "program"),
    ],
)
def test_run_is_named_after_program(line: str, name: str) -> None:
    assert program_name(shlex.split(line)) == name


def run_main(line: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    with pytest.raises(SystemExit) as end:
        cli.main(shlex.split(line))
    assert isinstance(end.value.code, int)
    output = capsys.readouterr()
    return end.value.code, output.out + output.err


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    return tmp_path


def test_options_are_keys_of_the_configuration(directory: Path) -> None:
    options = argparse.Namespace(
        hosts="a,node[1-2,4] b",
        nproc="auto",
        name="my run",
        exp_dir="elsewhere",
        env=["A=x=${y}, z", "HF_TOKEN"],
    )
    experiment = api.load(program_config(["train.py", "--lr", "1e-4"], options), [], "plan")
    assert (experiment.name, experiment.exp_dir) == ("my run", directory / "elsewhere")
    assert experiment.runner.hosts == ("a", "node[1-2,4]", "b")
    assert experiment.runner.nproc_per_node == "auto"
    assert experiment.envs.common == {"A": "x=${y}, z", "HF_TOKEN": "hf_secret"}
    assert experiment.task.command == (str(directory / "train.py"), "--lr", "1e-4")


def test_dry_run_plans_hosts_and_writes_nothing(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "dryrun --hosts a,b --nproc 4 --env HF_TOKEN experiment.runner.tee=1 -- python x -v"
    code, output = run_main(line, capsys)
    assert code == 0
    assert "# x: 8 rank(s) on 2 host(s)" in output
    assert "note: scripts and logs are in ./outputs_x; --exp-dir DIR chooses another" in output
    assert "hf_secret" not in output
    assert [path.name for path in directory.iterdir()] == ["train.py"]


@pytest.mark.parametrize("action", PROGRAM_ACTIONS)
def test_actions_of_programs_start_or_plan(action: str) -> None:
    assert ACTIONS[action].purpose in ("launch", "plan")


ERRORS = {
    "nothing": ("run", "`flagscale run` needs a YAML or a program"),
    "no program": ("run a.yaml -- train.py", "a.yaml: expected key=value before the program train"),
    "sweep": ("run -m a=1,2 -- train.py", "-m and --jobs need a YAML"),
    "no file": ("test nowhere.py", "experiment.task.command: no file nowhere.py"),
    "number of hosts": ("run --nnodes 2 --nproc 2 train.py", "by name: --hosts a,b"),
    "unknown option": ("run --nope train.py", "unknown option --nope"),
    "unknown key": ("run experiment.nope=1 train.py", "experiment.nope: no such key"),
    "nproc": ("run --nproc 0 train.py", "--nproc: expected a whole number from 1 or auto"),
    "no hosts": ("run --hosts , train.py", "--hosts: expected names with commas"),
    "wrong host": ("dryrun --hosts a_ train.py", "experiment.runner.hosts: 'a_' is not a host"),
    "variable": ("run --env 1=2 train.py", "--env: expected NAME=VALUE or NAME, found '1=2'"),
    "unset variable": ("run --env NOPE train.py", "this machine has no variable NOPE"),
    "secret": ("run --env API_KEY=abcd train.py", "export API_KEY, and give --env API_KEY"),
    "secret argument": ("run train.py --api-key abcd", "api-key looks like a secret"),
    "YAML": ("run --hosts a x.yaml", "experiment.runner.hosts=[a]"),
    "option of a YAML": ("run -n 4 train.py", "-n 4 is for a YAML, and train.py is a program"),
    "bare program": ("run ls -l", "to run it without a YAML: flagscale run -- ls -l"),
}


@pytest.mark.parametrize(("line", "message"), ERRORS.values(), ids=ERRORS)
def test_wrong_command_line_is_answered(
    line: str, message: str, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, output = run_main(line, capsys)
    assert (code, message in output) == (2, True), output
    assert [path.name for path in directory.iterdir()] == ["train.py"]


@given(st.text(st.sampled_from("a1$\\{}'\"-:,. \né[]")))
def test_escaped_text_is_no_interpolation(text: str) -> None:
    assert OmegaConf.create({"key": escape_interpolations(text)})["key"] == text


def test_program_gets_its_words_as_typed(directory: Path) -> None:
    words = ["1e-4", "010", "yes", "a,b", "${x}", r"\${x}", r"\\${", "", "[a]", "{", "'", "\n", "é"]
    config = program_config(["echo", *words], NO_OPTIONS)
    assert api.load(config, [], "plan").task.command == ("echo", *words)
