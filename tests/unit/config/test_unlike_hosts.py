"""Which arguments may differ between hosts: a list of those proved harmless, and no other."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from flagscale.config import per_host_allowlist
from flagscale.config.arguments.foreign import REFUSED
from flagscale.config.arguments.registry import arguments, lookup, registry
from flagscale.config.checks import notes
from flagscale.config.host_overrides import specific_problems
from flagscale.config.load import load
from flagscale.config.schema import PROJECT, Experiment, Specific
from flagscale.errors import ConfigError
from flagscale.hosts.hostfile import read_hostfile
from flagscale.launcher.plan_builder import unknown_names

if TYPE_CHECKING:
    from conftest import Workspace

EXTERNAL = ["experiment.task.entrypoint=mine.py"]


def complaints(experiment: Experiment, name: str, value: Any = None) -> list[str]:
    of_one_type = {"B": Specific(arguments={name: value})}
    return [str(p) for p in specific_problems(replace(experiment, by_type=of_one_type))]


@pytest.mark.parametrize("overrides", [[], EXTERNAL], ids=["own", "external"])
def test_every_argument_is_harmless_for_a_reason_or_refused(
    workspace: Workspace, overrides: list[str]
) -> None:
    """By each of its names; null takes an argument away and is judged like any value."""
    workspace.write("mine.py", "")
    experiment = workspace.load(*overrides)
    assert per_host_allowlist.ARGUMENTS.keys() <= arguments().keys()
    assert all(per_host_allowlist.ARGUMENTS.values())
    names = [*registry(), *(f"no_{a.name}" for a in arguments().values() if a.kind == "bool")]
    meanings = {name: found for name in names if (found := lookup(name)) is not None}
    for name, (argument, alias) in meanings.items():
        target = alias.target if alias else argument.name
        found = complaints(experiment, name)
        if target in per_host_allowlist.ARGUMENTS:
            assert found == [], name
        else:
            (message,) = found
            assert "has to be the same on every host of a job, else" in message, name
            assert message.endswith(f"give it in `train.{argument.section}`"), name
    assert {"use_flash_attn", "no_manual_gc", "tokenizer_model"} <= meanings.keys()


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_given_at_all_cannot_be_given_to_a_host(
    workspace: Workspace, name: str
) -> None:
    workspace.write("mine.py", "")
    for overrides in ([], EXTERNAL):
        (message,) = complaints(workspace.load(*overrides), name, 1)
        assert f"B.{name}: cannot be given: " in message


SEEN_TO_CORRUPT = {
    **{"lr": 2e-3, "adam_beta1": 0.5, "weight_decay": 0.2, "clip_grad": 2, "optimizer": "sgd"},
    **{"bf16": False, "eval_interval": 3, "log_interval": 5, "data_path": "x", "num_experts": 2},
    **{"ffn_hidden_size": 8, "virtual_pipeline_model_parallel_size": 2, "batch_size": 4},
    **{"check_for_nan_in_loss_and_grad": False, "async_save": True, "no_bias_gelu_fusion": True},
}


@pytest.mark.parametrize(("name", "value"), SEEN_TO_CORRUPT.items(), ids=SEEN_TO_CORRUPT)
def test_what_corrupts_training_is_refused_with_its_place(
    workspace: Workspace, name: str, value: Any
) -> None:
    more = yaml.safe_dump({"device_type_specific": {"B": {"model": {name: value}}}})
    workspace.replace("conf/train.yaml", "action: run\n", f"action: run\n{more}")
    with pytest.raises(ConfigError) as error:
        workspace.load()
    (problem,) = error.value.problems
    assert problem.key == f"device_type_specific.B.model.{name}"
    assert problem.where == "conf/train.yaml:18"
    assert "has to be the same" in problem.message
    assert error.value.exit_code == 2


def test_unlike_batches_are_for_what_can_weigh_them(workspace: Workspace) -> None:
    (message,) = complaints(workspace.load(), "micro_batch_size", 2)
    assert "hetero_mode: dp weighs unlike micro-batches" in message


def test_a_value_that_does_not_fit_is_told(workspace: Workspace) -> None:
    (message,) = complaints(workspace.load(), "num_workers", "many")
    assert "expected a whole number not less than 0, found 'many'" in message


def test_anothers_argument_passes_with_a_note(workspace: Workspace) -> None:
    workspace.write("mine.py", "")
    more = "node_specific: {h1: {temperature: 1, more: {label: null}, num_workers: 1}}"
    workspace.replace("conf/train.yaml", "action: run", f"action: run\n{more}")
    (note,) = (text for text in notes(workspace.load(*EXTERNAL), 2) if "differ" in text)
    assert note == (
        "node_specific.h1.temperature, node_specific.h1.more.label: whether its ranks may differ "
        "in them is for mine.py to say"
    )
    with pytest.raises(ConfigError, match="temperature: unknown argument"):
        workspace.load()


def test_the_examples_own_example_is_right(tmp_path: Path) -> None:
    """What examples/llama3/conf/train.yaml shows as comments, with its hostfile, is accepted."""
    conf = PROJECT / "examples" / "llama3" / "conf"
    lines = (conf / "train.yaml").read_text().splitlines()
    begin = lines.index("# device_type_specific:")
    shown = "\n".join(line.removeprefix("# ") for line in lines[begin : begin + 4])
    text = "\n".join([*lines[:begin], shown, *lines[begin + 4 :]])
    shutil.copytree(conf, tmp_path / "conf")
    (tmp_path / "conf" / "train.yaml").write_text(text)
    overrides = [f"experiment.runner.hostfile={conf.parent / 'hostfile'}"]
    experiment = load(tmp_path / "conf", "train", overrides, "plan").experiment
    assert experiment.by_type["BI"].arguments
    assert experiment.by_host["node04"].conda == "train"
    listed = read_hostfile(conf.parent / "hostfile")
    assert not unknown_names(experiment, listed)
