"""Composition with Hydra: overrides, groups, source locations of keys, errors."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from omegaconf import OmegaConf

from flagscale.config import compose as composing
from flagscale.config.compose import config_file
from flagscale.config.overrides import normalize_overrides
from flagscale.config.sources import trace_sources
from flagscale.errors import ConfigError

if TYPE_CHECKING:
    from conftest import Workspace
    from omegaconf import DictConfig


def compose(conf: Path, name: str, overrides: Sequence[str]) -> DictConfig:
    return composing.compose(trace_sources(config_file(conf, name), overrides))


def _compose_value(workspace: Workspace, key: str, *overrides: str) -> Any:
    return OmegaConf.select(compose(workspace.conf, "train", overrides), key)


@pytest.mark.parametrize(
    ("key", "overrides", "value"),
    [
        ("train.model.num_layers", [], 4),
        ("train.model.num_layers", ["train.model.num_layers=2"], 2),
        ("train.model.kv_channels", ["train.model.kv_channels=32"], 32),
        ("train.model.norm_epsilon", ["train.model.norm_epsilon=1e-6"], 1e-6),
        ("train.model.anything", ["+train.model.anything=2"], 2),
        ("train.model.num_layers", ["~train.model.num_layers"], None),
        ("train.model.num_layers", ["train=other"], 7),
        ("train.model.hidden_size", ["train=other"], None),
        ("follow", ["follow=true"], True),
        ("rank", ["rank=3"], 3),
        (
            "experiment.envs.CUDA_VISIBLE_DEVICES",
            ["experiment.envs.CUDA_VISIBLE_DEVICES=2,3"],
            "2,3",
        ),
        ("experiment.envs.NEW", ["experiment.envs.NEW=010"], "010"),
        ("experiment.envs.NEW", ['experiment.envs.NEW=a\'b "c" $D \\'], 'a\'b "c" $D \\'),
        ("experiment.envs.NEW", ["experiment.envs.NEW=\\'"], "\\'"),
        ("experiment.envs.NEW", ["experiment.envs.NEW='quoted'"], "quoted"),
        ("experiment.envs.NEW", ["experiment.envs.NEW=${experiment.exp_name}"], "demo"),
        ("experiment.envs.NEW", ["experiment.envs.NEW="], ""),
        ("experiment.runner.foreground", ["experiment.runner.foreground=true"], True),
        ("experiment.runner.monitor_interval", ["experiment.runner.monitor_interval=1"], 1),
        ("train.data.split", ["train.data.split=90,5,5"], "90,5,5"),
        ("train.data.data_path", ["train.data.data_path=[0.3,a,0.7,b]"], [0.3, "a", 0.7, "b"]),
    ],
)
def test_override_sets_value(
    workspace: Workspace, key: str, overrides: list[str], value: Any
) -> None:
    workspace.write("conf/train/other.yaml", "model:\n  num_layers: 7\n")
    assert _compose_value(workspace, key, *overrides) == value


def test_hydra_section_is_resolved_and_removed(workspace: Workspace) -> None:
    workspace.replace("conf/train.yaml", "exp_name: demo", "exp_name: ${hydra:job.config_name}")
    config = compose(workspace.conf, "train.yaml", [])
    assert "hydra" not in config
    assert config.experiment.exp_name == "train"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train=huge"], "train: no huge.yaml in conf/train; there are tiny"),
        (["train=tyny"], "did you mean 'tiny'"),
        (["train.model.nmu_layers=2"], "override: train.model.nmu_layers: no such key; did you"),
        (["experiment.exp_nmae=x"], "did you mean 'exp_name'"),
        (["experiment.runner.nnode=2"], "did you mean 'nnodes'"),
        (["actoin=run"], "did you mean 'action'"),
        (
            ["experiment.runer.x=1"],
            "override: experiment.runer: no such key; did you mean 'runner'",
        ),
        (["experiment.runner.notfy.command=x"], "did you mean 'notify'"),
        (["experiment.env.X=1"], "did you mean 'envs'"),
        (["node_specifc.a.x=1"], "did you mean 'node_specific'"),
        (["train.modle.num_layers=2"], None),
        (["nonsense"], "nonsense: expected key=value"),
        (["lr", "=", "1e-4"], "override: lr: write lr=1e-4 without spaces around ="),
        (["lr", "=", "action=run"], "override: lr: write lr=VALUE without spaces around ="),
        (["dp=2"], "override: dp: is a name of other trainers; leave it out: it is the number of"),
        (["lora=true"], "write `train.model.peft_type=lora`"),
        (["+x=1,2"], "a comma for a sweep"),
        (["action=[1"], "override: action: Hydra cannot read this value ("),
        (["+train.model.num_layers=1"], "train.model.num_layers: is set already; leave out the +"),
        (["train.system.num_workers=a b&c$"], "quote it: 'train.system.num_workers="),
        ([f"+x={'[' * 3000}{']' * 3000}", "action=run"], "override: x: nests too deep"),
    ],
)
def test_invalid_override_is_one_line_error(
    workspace: Workspace, overrides: list[str], message: str | None
) -> None:
    if message is None:  # loading, not composing, checks a new section
        compose(workspace.conf, "train", overrides)
        return
    with pytest.raises(ConfigError) as error:
        compose(workspace.conf, "train", overrides)
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_suggestion_for_unknown_argument_is_accepted(workspace: Workspace) -> None:
    with pytest.raises(ConfigError) as error:
        compose(workspace.conf, "train", ["train.model.nun_layers=3"])
    assert str(error.value).endswith("no such key; did you mean 'num_layers' or 'mtp_num_layers'?")
    workspace.write("theirs.py", "")
    workspace.replace("conf/train.yaml", "type: train", "entrypoint: theirs.py")
    with pytest.raises(ConfigError, match=r"\(`\+train.model.nun_layers=...` adds a new one\)"):
        compose(workspace.conf, "train", ["train.model.nun_layers=3"])
    assert "nun_layers" in workspace.load("+train.model.nun_layers=3").train.spelled


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        pytest.param(
            ["train.model.num_layer=3", "experiment.runer.x=1", "action=run", "foo=2"],
            ["train.model.num_layer", "experiment.runer", "foo"],
            id="unknown",
        ),
        pytest.param(["foo=1", "foo=2", "bar.foo=1"], ["foo", "bar"], id="twice"),
        pytest.param(
            ["action=[1", "+x=1,2", "+train.model.num_layers=1"],
            ["action", "x", "train.model.num_layers"],
            id="unreadable",
        ),
        pytest.param(["~foo", "~bar"], ["", ""], id="nothing-to-delete"),
        pytest.param(["train=huge", "foo=1"], ["train"], id="what-is-in-a-missing-group"),
    ],
)
def test_all_invalid_overrides_are_reported_at_once(
    workspace: Workspace, overrides: list[str], keys: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        compose(workspace.conf, "train", overrides)
    assert [problem.key for problem in error.value.problems] == keys


def test_errors_of_all_files_are_reported_at_once(workspace: Workspace) -> None:
    workspace.replace("conf/train.yaml", "  - train: tiny\n", "  - train: tiny\n  - other: x\n")
    workspace.write("conf/other/x.yaml", "a: 1\na: 2\n")
    workspace.write("conf/train/tiny.yaml", "model:\n\tnum_layers: 2\n")
    with pytest.raises(ConfigError) as error:
        compose(workspace.conf, "train", [])
    places = [p.where for p in error.value.problems]
    assert places == ["conf/train/tiny.yaml:2", "conf/other/x.yaml:2"]


def test_missing_config_file_and_directory_are_reported(workspace: Workspace) -> None:
    workspace.write("conf/.hidden.yaml", "a: 1\n")
    with pytest.raises(ConfigError, match=r"^no trian.yaml in conf; it has train; did you mean"):
        config_file(workspace.conf, "trian")
    with pytest.raises(
        ConfigError, match=r"^no x.yaml in the current directory; it has no YAML files"
    ):
        config_file(Path(), "x")
    with pytest.raises(ConfigError, match=r"^no directory nowhere"):
        config_file(workspace.root / "nowhere", "train")
    workspace.write("conf/old.yml", "a: 1\n")
    with pytest.raises(ConfigError, match=r"old.yml must be called old.yaml"):
        config_file(workspace.conf, "old")


def test_missing_group_in_defaults_list_is_reported(workspace: Workspace) -> None:
    workspace.replace("conf/train.yaml", "train: tiny", "train: 9b")
    with pytest.raises(ConfigError, match=r"train: no 9b\.yaml in conf/train; there are tiny"):
        compose(workspace.conf, "train", [])


@pytest.mark.parametrize("text", ["/a b'c$d", 'x; y "$z" (1)', "a,b", "${oc.env:HOME}/x"])
@pytest.mark.parametrize(
    "key", ["experiment.exp_dir", "experiment.cmds.before_start", "experiment.task.entrypoint"]
)
def test_string_override_is_not_reinterpreted(workspace: Workspace, key: str, text: str) -> None:
    config = compose(workspace.conf, "train", [f"{key}={text}"])
    value = OmegaConf.select(config, key)
    assert value == text.replace("${oc.env:HOME}", os.environ["HOME"])


def test_environment_section_can_be_overridden(workspace: Workspace) -> None:
    config = compose(workspace.conf, "train", ["experiment.envs={A: 1}"])
    assert config.experiment.envs.A == 1


def test_overrides_have_location_override(workspace: Workspace) -> None:
    sources = trace_sources(workspace.conf / "train.yaml", ["action=stop", "rank=1", "train=tiny"])
    assert (sources.location("action"), sources.location("rank")) == ("override", "override")
    assert sources.location("train") != "override"


def test_normalize_keeps_hydra_syntax() -> None:
    for text in ["train=tiny", "~a.b", "+a=1", "++a=1", "hydra.verbose=true", "train@x=y"]:
        assert normalize_overrides([text]) == [text]
    overrides = ["json=true", "experiment.runner.slurm={nodes: 1}"]
    assert normalize_overrides(overrides) == [f"++{text}" for text in overrides]


def test_source_locations_of_keys(workspace: Workspace) -> None:
    sources = trace_sources(workspace.conf / "train.yaml", ["train.model.seq_length=9", "+a.b=1"])
    assert sources.locations["train.model.num_layers"] == "conf/train/tiny.yaml:6"
    assert sources.locations["experiment.exp_dir"] == "conf/train.yaml:6"
    assert sources.locations["train.model.seq_length"] == "override"
    assert sources.texts["experiment.envs.CUDA_VISIBLE_DEVICES"] == "0,1"
    assert sources.location("experiment.runner.unheard.of") == "conf/train.yaml:9"


def test_source_locations_in_groups_and_packages(workspace: Workspace) -> None:
    workspace.write("conf/base.yaml", "shared: 1\nboth: 1\n")
    workspace.write("conf/host/big.yaml", "# @package _global_\nglobal: 1\n")
    workspace.write("conf/train/part/x.yaml", "deep: 1\n")
    workspace.write("conf/train/tiny.yaml", "defaults:\n  - part: x\nmodel: {}\n")
    workspace.write(
        "conf/train.yaml",
        "defaults:\n  - base\n  - host@elsewhere.here: big\n  - optional nothing: x\n"
        "  - train: tiny\n  - _self_\nboth: 2\n",
    )
    sources = trace_sources(workspace.conf / "train.yaml", [])
    assert sources.locations["shared"] == "conf/base.yaml:1"
    assert sources.locations["both"] == "conf/train.yaml:7"
    assert sources.locations["elsewhere.here.global"] == "conf/host/big.yaml:2"
    assert sources.locations["train.part.deep"] == "conf/train/part/x.yaml:1"


@pytest.mark.parametrize(
    ("override", "name", "value"),
    [
        pytest.param("train.model.lr=3e-4", "lr", 3e-4, id="flat"),
        pytest.param("train.system.lr=3e-4", "lr", 3e-4, id="of-another-section"),
        pytest.param("train.model.optimizer.lr=3e-4", "lr", 3e-4, id="of-a-section-above"),
        pytest.param("++train.model.lr=3e-4", "lr", 3e-4, id="forced"),
        pytest.param("train.system.bf16=null", "bf16", False, id="null"),
        pytest.param("~train.system.bf16", "bf16", False, id="removed"),
        pytest.param("train.model.sequence-length=64", "seq_length", 64, id="alias"),
        pytest.param("train.data.tokenizer_path=/t", "tokenizer_path", "/t", id="text"),
        pytest.param("train.system.seed=7", "seed", 7, id="not-in-the-yaml"),
    ],
)
def test_flat_override_replaces_nested_key_of_yaml(
    workspace: Workspace, override: str, name: str, value: Any
) -> None:
    experiment = workspace.load(override, purpose="plan")
    assert experiment.train[name] == value
    assert experiment.overrides == (override,)
    assert sum(entry.argument == name for entry in experiment.train) <= 1


def test_error_of_flat_override_names_nested_key(workspace: Workspace) -> None:
    with pytest.raises(ConfigError) as error:
        workspace.load("train.model.lr=fast", purpose="plan")
    (problem,) = error.value.problems
    assert (problem.key, problem.where) == ("train.model.optimizer.lr_scheduler.lr", "override")


@pytest.mark.parametrize("section", ["system", "model", "data"])
def test_override_of_duplicated_key_counts(workspace: Workspace, section: str) -> None:
    workspace.replace("conf/train/tiny.yaml", "data:\n", "data:\n  lr: 1.0e-3\n")
    experiment = workspace.load(f"train.{section}.lr=3e-4", purpose="plan")
    assert experiment.train["lr"] == 3e-4
    assert {entry.canonical for entry in experiment.train if entry.argument == "lr"} == {3e-4}


def test_a_directory_in_place_of_a_yaml_is_named_with_its_files(workspace: Workspace) -> None:
    with pytest.raises(ConfigError, match=r"^.*conf is a directory: name a YAML file") as error:
        config_file(workspace.conf.parent, "conf")
    assert "conf/train.yaml" in str(error.value.hint)
