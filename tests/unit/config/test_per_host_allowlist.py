"""Allowlist of arguments that may differ between hosts; all others are rejected."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from flagscale.config import per_host_allowlist
from flagscale.config.arguments.compat.names import UNSUPPORTED
from flagscale.config.arguments.spec.registry import arguments, lookup, registry
from flagscale.config.arguments.spec.train_arguments import read_arguments
from flagscale.config.checks import experiment_notes
from flagscale.config.load import load
from flagscale.config.schema import PROJECT, Experiment
from flagscale.config.train_reader import check_host_arguments
from flagscale.errors import ConfigError
from flagscale.hosts.hostfile import read_hostfile
from flagscale.launcher.plan_builder import find_unknown_names

if TYPE_CHECKING:
    from conftest import Workspace

EXTERNAL = ["experiment.task.entrypoint=mine.py"]


def find_problems(experiment: Experiment, name: str, value: Any = None) -> list[str]:
    reading = read_arguments({name: value}, "device_type_specific.B.")
    external = experiment.task.external
    problems = check_host_arguments(reading.arguments, reading.errors, external=external)
    return [str(problem) for problem in problems]


@pytest.mark.parametrize("overrides", [[], EXTERNAL], ids=["own", "external"])
def test_every_argument_is_in_allowlist_or_rejected(
    workspace: Workspace, overrides: list[str]
) -> None:
    """Every name and alias is checked; null unsets an argument and is checked like any value."""
    workspace.write("mine.py", "")
    experiment = workspace.load(*overrides)
    assert per_host_allowlist.ARGUMENTS.keys() <= arguments().keys()
    assert all(per_host_allowlist.ARGUMENTS.values())
    names = [*registry(), *(f"no_{a.name}" for a in arguments().values() if a.kind == "bool")]
    meanings = {name: match for name in names if (match := lookup(name)) is not None}
    for name, (argument, alias) in meanings.items():
        target = alias.target if alias else argument.name
        problems = find_problems(experiment, name)
        if target in per_host_allowlist.ARGUMENTS:
            assert problems == [], name
        else:
            (message,) = problems
            assert "has to be the same on every host of a job, else" in message, name
            assert message.endswith(f"set it in `train.{argument.section}`"), name
    assert {"use_flash_attn", "no_manual_gc", "tokenizer_model"} <= meanings.keys()


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_argument_is_rejected_per_host(workspace: Workspace, name: str) -> None:
    workspace.write("mine.py", "")
    for overrides in ([], EXTERNAL):
        (message,) = find_problems(workspace.load(*overrides), name, 1)
        assert f"B.{name}: is not supported: " in message


CORRUPTING_ARGUMENTS = {
    **{"lr": 2e-3, "adam_beta1": 0.5, "weight_decay": 0.2, "clip_grad": 2, "optimizer": "sgd"},
    **{"bf16": False, "eval_interval": 3, "log_interval": 5, "data_path": "x", "num_experts": 2},
    **{"ffn_hidden_size": 8, "virtual_pipeline_model_parallel_size": 2, "batch_size": 4},
    **{"check_for_nan_in_loss_and_grad": False, "async_save": True, "no_bias_gelu_fusion": True},
}


@pytest.mark.parametrize(("name", "value"), CORRUPTING_ARGUMENTS.items(), ids=CORRUPTING_ARGUMENTS)
def test_corrupting_argument_is_rejected_with_location(
    workspace: Workspace, name: str, value: Any
) -> None:
    section = yaml.safe_dump({"device_type_specific": {"B": {"model": {name: value}}}})
    workspace.replace("conf/train.yaml", "action: run\n", f"action: run\n{section}")
    with pytest.raises(ConfigError) as error:
        workspace.load()
    (problem,) = error.value.problems
    assert problem.key == f"device_type_specific.B.model.{name}"
    assert problem.where == "conf/train.yaml:18"
    assert "has to be the same" in problem.message
    assert error.value.exit_code == 2


def test_heterogeneous_micro_batches_get_hint(workspace: Workspace) -> None:
    (message,) = find_problems(workspace.load(), "micro_batch_size", 2)
    assert "hetero_mode: dp supports different micro-batch sizes" in message


def test_invalid_value_is_reported(workspace: Workspace) -> None:
    (message,) = find_problems(workspace.load(), "num_workers", "many")
    assert "expected a whole number not less than 0, found 'many'" in message


def test_argument_of_external_program_is_noted(workspace: Workspace) -> None:
    workspace.write("mine.py", "")
    section = "node_specific: {h1: {temperature: 1, more: {label: null}, num_workers: 1}}"
    workspace.replace("conf/train.yaml", "action: run", f"action: run\n{section}")
    (note,) = (text for text in experiment_notes(workspace.load(*EXTERNAL), 2) if "differ" in text)
    assert note == (
        "node_specific.h1.temperature, node_specific.h1.more.label: not checked whether ranks may "
        "differ in them; only mine.py defines them"
    )
    with pytest.raises(ConfigError, match="temperature: unknown argument"):
        workspace.load()


def test_commented_example_is_valid(tmp_path: Path) -> None:
    """The commented example in examples/llama3/conf/train.yaml is valid with its hostfile."""
    conf = PROJECT / "examples" / "llama3" / "conf"
    lines = (conf / "train.yaml").read_text().splitlines()
    begin = lines.index("# device_type_specific:")
    uncommented = "\n".join(line.removeprefix("# ") for line in lines[begin : begin + 4])
    text = "\n".join([*lines[:begin], uncommented, *lines[begin + 4 :]])
    shutil.copytree(conf, tmp_path / "conf")
    (tmp_path / "conf" / "train.yaml").write_text(text)
    overrides = [f"experiment.runner.hostfile={conf.parent / 'hostfile'}"]
    experiment = load(tmp_path / "conf", "train", overrides, "plan").experiment
    assert experiment.by_type["BI"].arguments.entries
    assert experiment.by_host["node04"].conda == "train"
    hosts = read_hostfile(conf.parent / "hostfile")
    assert not find_unknown_names(experiment, hosts)
