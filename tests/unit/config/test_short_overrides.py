"""Overrides by short names: the keys that they replace, and the names that stay unknown."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from flagscale.config.compose import config_file
from flagscale.config.explain import explain
from flagscale.config.load import load
from flagscale.config.overrides import normalize_overrides, option_override, relocate_overrides
from flagscale.config.sources import trace_sources
from flagscale.errors import ConfigError

if TYPE_CHECKING:
    from conftest import Workspace


LR = "train.model.optimizer.lr_scheduler.lr"
NNODES = "experiment.runner.nnodes"

RELOCATED = {
    "argument": ("lr=3e-4", f"{LR}=3e-4"),
    "argument-in-its-usual-section": ("train.model.lr=3e-4", f"{LR}=3e-4"),
    "argument-without-section": ("train.lr=3e-4", f"{LR}=3e-4"),
    "argument-in-another-section": ("train.data.lr=3e-4", f"{LR}=3e-4"),
    "end-of-the-key": ("lr_scheduler.lr=3e-4", f"{LR}=3e-4"),
    "section-of-the-key": ("optimizer.lr=3e-4", f"{LR}=3e-4"),
    "null": ("train.system.lr=null", f"{LR}=null"),
    "deletion": ("~lr", f"~{LR}"),
    "forced": ("++lr=3e-4", f"++{LR}=3e-4"),
    "dashes": ("num-layers=3", "train.model.num_layers=3"),
    "value-with-an-equals-sign": ("data_path=a=b", "train.data.data_path=a=b"),
    "not-in-the-yaml": ("min_lr=0", "train.model.min_lr=0"),
    "section-not-in-the-yaml": (
        "system.logging.log_interval=1",
        "train.system.logging.log_interval=1",
    ),
    "argument-named-like-a-section": ("optimizer=sgd", "train.model.optimizer.optimizer=sgd"),
    "full-key-named-like-a-section": (
        "train.model.optimizer=sgd",
        "train.model.optimizer.optimizer=sgd",
    ),
    "backend-option": ("system.comm.tail=bounded", "train.system.comm.tail=bounded"),
    "experiment": ("nnodes=2", f"{NNODES}=2"),
    "experiment-section": ("runner.nnodes=2", f"{NNODES}=2"),
    "experiment-variable": ("envs.NCCL_DEBUG=INFO", "experiment.envs.NCCL_DEBUG=INFO"),
    "slurm-with-its-section": ("slurm.nodes=2", "experiment.runner.slurm.nodes=2"),
    "experiment-section-alone": ("slurm={partition: p}", "experiment.runner.slurm={partition: p}"),
}
UNCHANGED = [
    f"{LR}=3e-4",
    f"{NNODES}=2",
    "+lr=3e-4",
    "train=8b",
    "train@train=8b",
    "action=run",
    "rank=3",
    "type=slurm",
    "foo.lr=3",
    "nodes=2",
    "unknown=3",
    "train.model.unknown=3",
    "train.system.comm.tail=bounded",
    "train.model.optimizer={lr: 3}",
    "train.model.optimizer=null",
    "hydra.run.dir=x",
    "node_specific.h0.lr=3",
]


@pytest.mark.parametrize(("typed", "expected"), RELOCATED.values(), ids=RELOCATED)
def test_short_name_replaces_the_key_of_the_yaml(
    workspace: Workspace, typed: str, expected: str
) -> None:
    sources = trace_sources(config_file(workspace.conf, "train"), [typed])
    assert sources.relocated == (expected,)


@pytest.mark.parametrize("typed", UNCHANGED)
def test_other_names_stay(workspace: Workspace, typed: str) -> None:
    assert trace_sources(config_file(workspace.conf, "train"), [typed]).relocated == (typed,)


def test_values_have_an_effect(workspace: Workspace) -> None:
    experiment = workspace.load("lr=3e-4", "num_layers=8", "exp_name=other", "nproc_per_node=1")
    assert (experiment.train["lr"], experiment.train["num_layers"]) == (3e-4, 8)
    assert (experiment.name, experiment.runner.nproc_per_node) == ("other", 1)


def test_users_own_key_keeps_its_name(workspace: Workspace) -> None:
    workspace.replace("conf/train.yaml", "action: run\n", "action: run\nlr: 7\nmy: {lr: 8}\n")
    for typed in ("lr=3", "my.lr=3"):
        sources = trace_sources(config_file(workspace.conf, "train"), [typed])
        assert sources.relocated == (typed,)


def test_name_of_a_config_group_selects_a_file(workspace: Workspace) -> None:
    workspace.write("conf/optimizer/adam.yaml", "{}\n")
    sources = trace_sources(config_file(workspace.conf, "train"), ["optimizer=adam"])
    assert sources.relocated == ("optimizer=adam",)


def test_group_of_a_defaults_list_may_be_elsewhere(workspace: Workspace) -> None:
    workspace.replace(
        "conf/train.yaml", "  - train: tiny\n", "  - train: tiny\n  - optimizer: sgd\n"
    )
    sources = trace_sources(config_file(workspace.conf, "train"), ["optimizer=adam"])
    assert sources.relocated == ("optimizer=adam",)


def test_argument_in_two_sections_is_replaced_in_both() -> None:
    keys = ["train.model.lr", "train.model.optimizer.lr"]
    assert relocate_overrides(["lr=3"], keys) == [f"{key}=3" for key in keys]
    assert relocate_overrides(["train.model.lr=3"], keys) == ["train.model.lr=3"]


@pytest.mark.parametrize("override", ["lr=3", "model.lr=3", "num_layers=3"])
def test_arguments_of_training_have_no_short_names_for_a_command(
    workspace: Workspace, override: str
) -> None:
    """A command reads no arguments, so the override would have no effect."""
    typed = ["task.type=command", "experiment.task.command=true", override]
    with pytest.raises(ConfigError, match="a command takes no arguments of training"):
        load(workspace.conf, "train", typed)


@pytest.mark.parametrize(
    ("override", "suggestion"),
    [
        ("type=slurm", "'experiment.task.type' or 'experiment.runner.type'"),
        ("num_layer=3", "'num_layers'"),
        ("nnode=3", "'nnodes'"),
        ("acton=run", "'action'"),
        ("nodes=2", "'experiment.runner.slurm.nodes'"),
        ("gpus=8", "'nproc_per_node' or 'device'"),
        ("tp=2", "'tensor_model_parallel_size'"),
    ],
)
def test_unknown_short_name_is_answered(
    workspace: Workspace, override: str, suggestion: str
) -> None:
    with pytest.raises(ConfigError) as error:
        workspace.load(override)
    assert f"no such key; did you mean {suggestion}" in str(error.value)


@pytest.mark.parametrize(
    ("key", "overrides", "line"),
    [
        ("lr", [], f"conf/train/tiny.yaml:14: {LR}: 1.0e-3"),
        ("lr", ["lr=2"], f"override: {LR}: 2"),
        ("train.model.lr", [], f"conf/train/tiny.yaml:14: {LR}: 1.0e-3"),
        ("nnodes", [], f"conf/train.yaml:10: {NNODES}: 1"),
        ("min_lr", [], "conf/train.yaml does not have it"),
    ],
)
def test_explain_shows_the_place_in_a_yaml(
    workspace: Workspace, key: str, overrides: list[str], line: str
) -> None:
    sources = trace_sources(config_file(workspace.conf, "train"), overrides)
    assert explain(key, sources).splitlines()[-1] == f"  {line}"


def test_keys_of_slurm_have_short_names_under_slurm(workspace: Workspace) -> None:
    typed = ["experiment.runner.type=slurm", "nodes=2", "partition=gpu"]
    sources = trace_sources(config_file(workspace.conf, "train"), typed)
    section = "experiment.runner.slurm"
    assert sources.relocated[1:] == (f"{section}.nodes=2", f"{section}.partition=gpu")


def test_sweep_over_short_names(workspace: Workspace) -> None:
    from flagscale.config.sweeps import expand_sweep, load_combinations

    sweep = expand_sweep(["exp_dir=sweep", "lr=1e-3,2e-3", "lr_decay_style=cosine,linear"])
    loaded = load_combinations(workspace.conf, "train", sweep, "find")
    names = [experiment.exp_dir.relative_to(workspace.root) for _, experiment in loaded]
    assert [str(name) for name in names] == [
        f"sweep/lr={lr}_lr_decay_style={style}"
        for lr in ("0.001", "0.002")
        for style in ("cosine", "linear")
    ]


@pytest.mark.parametrize(
    ("name", "value", "override"),
    [
        ("grep", "[0-9]+ steps", "grep='[0-9]+ steps'"),
        ("grep", "it's", r"grep='it\'s'"),
        ("grep", "'a'", r"grep='\'a\''"),
        ("lines", 3, "lines=3"),
        ("follow", True, "follow=true"),
    ],
)
def test_value_of_option_is_text(name: str, value: object, override: str) -> None:
    assert option_override(name, value) == override
    assert normalize_overrides([override])[0].endswith(override)
