"""Command lines of FlagScale 1.0: each becomes an action of ours on a YAML."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from flagscale import cli
from flagscale.commands.flagscale_forms import ActionCall

PROJECT = Path(__file__).resolve().parents[3]
YAML = Path("examples/llama3/conf/train.yaml")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[ActionCall]:
    """The actions that command lines call, in a directory with a model's example."""
    example = tmp_path / YAML
    example.parent.mkdir(parents=True)
    shutil.copy(PROJECT / YAML, example)
    monkeypatch.chdir(tmp_path)
    calls: list[ActionCall] = []

    def record(call: ActionCall) -> int:
        calls.append(call)
        return 0

    monkeypatch.setattr(cli, "_call_action", record)
    return calls


FORMS = {
    "model": ("train llama3", ("run", YAML, [])),
    "model and overrides": ("train llama3 train=8b a.b=c", ("run", YAML, ["train=8b", "a.b=c"])),
    "YAML": ("train conf/x.yaml --query", ("query", Path("conf/x.yaml"), [])),
    "config": ("train llama3 -c my.yaml --stop", ("stop", Path("my.yaml"), [])),
    "config as before 1.0": ("train llama3 my.yml a=1", ("run", Path("my.yml"), ["a=1"])),
    "flag first": ("train --dryrun llama3 a=1", ("dryrun", YAML, ["a=1"])),
    "test": ("train --test llama3", ("test", YAML, [])),
    "tune": ("train llama3 --tune", ("auto_tune", YAML, [])),
    "our option": ("train llama3 --query --follow", ("query", YAML, ["--follow"])),
    "run": ("run -p conf -n train", ("run", Path("conf/train.yaml"), [])),
    "values without a space": (
        "run -pconf -nx a=1",
        ("run", Path("conf/x.yaml"), ["a=1"]),
    ),
    "abbreviated": ("run -p conf --config-na x", ("run", Path("conf/x.yaml"), [])),
    "config without a space": ("train llama3 -cmy.yaml", ("run", Path("my.yaml"), [])),
    "run with suffix": ("run -p conf -n train.yaml", ("run", Path("conf/train.yaml"), [])),
    "run with action": (
        "run --config-path ./conf --config-name train --action stop",
        ("stop", Path("conf/train.yaml"), []),
    ),
    "run with overrides": (
        "run -p conf -n x -a dryrun a=1 ~b +c=2",
        ("dryrun", Path("conf/x.yaml"), ["a=1", "~b", "+c=2"]),
    ),
    "option with a value": (
        "run -p conf -n x -a logs --rank 0 --lines=5",
        ("logs", Path("conf/x.yaml"), ["--rank", "0", "--lines=5"]),
    ),
    "equals signs": (
        "run --config-path=conf --config-name=x a=1",
        ("run", Path("conf/x.yaml"), ["a=1"]),
    ),
    "order of words": (
        "train --config c.yaml llama3 --query --json a=1",
        ("query", Path("c.yaml"), ["--json", "a=1"]),
    ),
    "run in this directory": ("run -n x", ("run", Path("x.yaml"), [])),
}


@pytest.mark.parametrize(("line", "expected"), FORMS.values(), ids=FORMS)
def test_form_becomes_action(
    line: str, expected: tuple[str, Path, list[str]], calls: list[ActionCall]
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(line.split())
    assert (end.value.code, calls) == (0, [ActionCall(*expected)])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "train llama",
            "there are llama3; did you mean 'llama3'?\n  hint: give the path of a YAML",
        ),
        ("run -p conf", "-n NAME is missing"),
        ("run -a stop", "-p DIR -n NAME is missing"),
        ("train llama3 --stop --query", "not allowed with argument"),
        ("serve llama3", "no command 'serve': this project trains models; `flagscale convert`"),
        ("inference llama3", "this project trains models"),
        ("rl qwen3", "reinforcement learning is not supported"),
        ("compress qwen3", "compressing a model is not supported"),
    ],
)
def test_form_without_counterpart_is_answered(
    line: str, message: str, calls: list[ActionCall], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(line.split())
    assert (end.value.code, calls) == (2, [])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        "train examples/llama3/conf/train.yaml --tune dry=true",
        f"run -n {YAML.stem} -a auto_tune dry=true",
        "tune examples/llama3/conf/train.yaml --dry",
        "auto_tune examples/llama3/conf/train.yaml --dry",
    ],
)
def test_tuning_is_an_action(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(PROJECT / YAML.parent if line.startswith("run") else PROJECT)
    with pytest.raises(SystemExit) as end:
        cli.main([*line.split(), "experiment.runner.nproc_per_node=1", "device=cpu"])
    assert end.value.code == 0
    assert "tp1 pp1 mbs4" in capsys.readouterr().out
