"""Tests of the search problem of an experiment, and of experiments that have none."""

from __future__ import annotations

from pathlib import Path

import pytest

from flagscale.config.load import load
from flagscale.config.schema import PROJECT, Experiment
from flagscale.errors import ConfigError
from flagscale.sinks.registry import ENABLING_KEYS, SINKS_KEY
from flagscale.tune.problem import make_problem
from flagscale.tune.records import Trial
from flagscale.tune.space import enumerate_space
from flagscale.tune.trial import QUIET_ARGUMENTS, load_trial, setting_overrides

EXAMPLE = PROJECT / "examples" / "llama3" / "conf"


def load_example(*overrides: str) -> Experiment:
    return load(EXAMPLE, "train", [*overrides, "action=auto_tune"], "plan").experiment


def hostfile_override(directory: Path, text: str) -> list[str]:
    path = directory / "hostfile"
    path.write_text(text, encoding="utf-8")
    nnodes = text.count("\n")
    return [f"experiment.runner.hostfile={path}", f"nnodes={nnodes}", "nproc_per_node=8"]


def test_devices_are_those_of_the_hostfile(tmp_path: Path) -> None:
    hosts = hostfile_override(tmp_path, "a slots=8 type=H100\nb slots=8 type=H100\n")
    problem = make_problem(load_example("train=8b", *hosts), probing=False)
    machine = problem.machine
    assert (machine.ranks, machine.ranks_per_host, machine.hosts) == (16, 8, 2)
    assert machine.is_known
    assert machine.memory_gib == pytest.approx(79, abs=1)
    assert problem.vocabulary_size == 128256


def test_layout_of_the_yaml_need_not_fit_the_devices(tmp_path: Path) -> None:
    hosts = hostfile_override(tmp_path, "a slots=8 type=H100\n")
    overrides = ["tensor_model_parallel_size=4", "pipeline_model_parallel_size=4"]
    problem = make_problem(
        load_example("train=8b", *hosts, *overrides, "global_batch_size=64"), probing=False
    )
    assert problem.values["global_batch_size"] == 64
    with pytest.raises(ConfigError, match="global_batch_size: is required: the layout of the YAML"):
        make_problem(load_example(*hosts, *overrides), probing=False)


UNLIKE = {
    "types": ("a slots=8 type=H100\nb slots=8 type=A800\n", "hosts of type A800 and H100"),
    "ranks": ("a slots=8 type=H100\nb slots=4 type=H100\n", "hosts with 4 and 8 ranks"),
}


@pytest.mark.parametrize(("text", "message"), UNLIKE.values(), ids=UNLIKE)
def test_unlike_hosts_are_referred_to_meshes(tmp_path: Path, text: str, message: str) -> None:
    experiment = load_example("train=8b", *hostfile_override(tmp_path, text))
    with pytest.raises(ConfigError, match=message) as error:
        make_problem(experiment, probing=False)
    assert "hetero_process_meshes: auto" in str(error.value.hint)


def test_meshes_choose_by_themselves() -> None:
    experiment = load_example(
        "nproc_per_node=2", "++train.system.enable_hetero=true", "++train.system.hetero_mode=pp",
        "++train.system.hetero_process_meshes=[1,1,1,1,1,1,1,1,1,1]",
    )  # fmt: skip
    with pytest.raises(ConfigError, match="identical devices") as error:
        make_problem(experiment, probing=False)
    assert "hetero_pipeline_layer_split: auto" in str(error.value.hint)


def test_values_that_are_left_alone() -> None:
    experiment = load_example(
        "nproc_per_node=4",
        "global_batch_size=16",
        "++experiment.auto_tuner.keep=[micro_batch_size]",
        "++experiment.auto_tuner.space.pipeline_model_parallel_size=[1,2]",
    )
    requested = make_problem(experiment, probing=False).requested
    assert requested == {
        "micro_batch_size": (4,),
        "pipeline_model_parallel_size": (1, 2),
    }


WRONG = {
    "keep": ("keep=[micro_batch]", "did you mean 'micro_batch_size'"),
    "name": ("space.tensor_parallel_size=[1]", "unknown key"),
    "value": ("space.tensor_model_parallel_size=[two]", "expected a whole number .* or auto"),
    "meshes": ("space.hetero_process_meshes=[[1]]", "hetero_process_meshes: auto chooses"),
    "fractions": ("memory_model.gpu_utilization=[0.8,0.2]", "the smaller one first"),
    "algorithm": ("algo.name=random", "expected one of model, grid"),
}


@pytest.mark.parametrize(("override", "message"), WRONG.values(), ids=WRONG)
def test_wrong_keys_are_answered(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_example(f"++experiment.auto_tuner.{override}")


def test_overrides_of_a_layout_are_its_differences_from_the_yaml() -> None:
    experiment = load_example("nproc_per_node=2")
    setting = {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "pipeline_model_parallel_size": 1,
        "use_distributed_optimizer": True,
        "recompute_granularity": None,
    }
    assert setting_overrides(experiment, setting) == [
        "train.system.tensor_model_parallel_size=2",
        "train.system.sequence_parallel=true",
    ]


def test_modules_to_recompute_can_be_kept() -> None:
    modules = ("recompute_granularity=selective", "recompute_modules=[core_attn]")
    keep = "+experiment.auto_tuner.keep=[recompute_modules]"
    problem = make_problem(load_example(*modules, keep), probing=False)
    candidates = enumerate_space(problem).candidates
    assert candidates
    assert {layout.setting["recompute_modules"] for layout in candidates} == {("core_attn",)}


def test_a_trial_reports_to_no_sink_and_needs_no_evaluation() -> None:
    assert {*ENABLING_KEYS.values(), SINKS_KEY} <= {*QUIET_ARGUMENTS}
    given = (
        *("save_best=true", "early_stopping_patience=3", "non_persistent_save_interval=2"),
        *("replication=false", "mlflow_experiment=runs", "eval_iters=2"),
    )
    experiment = load_example(*given, "experiment.auto_tuner.control.train_iters=4")
    problem = make_problem(experiment, probing=False)
    layout = enumerate_space(problem).candidates[0]
    trial = load_trial(experiment, Trial(1, layout.setting), 8, 4, checking=False)
    values = trial.train.values
    assert not any(values[name] for name in (name.partition("=")[0] for name in given))
