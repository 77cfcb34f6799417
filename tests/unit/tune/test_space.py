"""Tests of the enumeration: exactly the layouts that the rules of a launch accept, and fit."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from typing import Any

import pytest
from support.tuning import MIXTURE, is_legal, make_problem, model_values

from flagscale.config.arguments.check import RepeatedCheck
from flagscale.config.arguments.derive import derive_arguments
from flagscale.config.arguments.layout_choices import (
    CHOICES,
    CHOSEN_ARGUMENTS,
    RECOMPUTED,
    enumerate_settings,
    neutral_settings,
)
from flagscale.tune.space import SearchProblem, describe_setting, enumerate_space

MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "dense": (4, {}),
    "mixture": (4, MIXTURE),
    "three-layers": (6, {"num_layers": 3, "global_batch_size": 12}),
    "sgd": (2, {"optimizer": "sgd"}),
    "adapters": (2, {"peft_type": "lora", "lora_target_modules": ["linear_qkv"]}),
}


LARGE_MODEL: dict[str, Any] = {
    "hidden_size": 4096,
    "ffn_hidden_size": 14336,
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "num_layers": 32,
    "seq_length": 8192,
    "bf16": True,
}


def all_settings(problem: SearchProblem) -> list[dict[str, Any]]:
    return list(enumerate_settings(CHOICES, problem.choice_context))


@pytest.mark.parametrize(("ranks", "changes"), MODELS.values(), ids=MODELS)
def test_remembered_results_are_those_of_the_rules(ranks: int, changes: dict[str, Any]) -> None:
    problem = make_problem(ranks, **changes)
    rules = RepeatedCheck(problem.neutral, CHOSEN_ARGUMENTS, ranks)
    settings = all_settings(problem)
    # Sizes that the ranks do not allow, too.
    settings += [{**setting, "tensor_model_parallel_size": 8} for setting in settings[::7]]
    accepted = [rules.accepts(setting) for setting in settings]
    assert accepted == [is_legal({**problem.neutral, **setting}, ranks) for setting in settings]
    assert any(accepted)
    assert not all(accepted)


@pytest.mark.parametrize(("ranks", "changes"), MODELS.values(), ids=MODELS)
def test_every_candidate_can_be_launched(ranks: int, changes: dict[str, Any]) -> None:
    problem = make_problem(ranks, **changes)
    candidates = enumerate_space(problem).candidates
    for layout in candidates:
        args = derive_arguments(Namespace(**{**problem.values, **layout.setting}), ranks)
        assert args.global_batch_size == problem.values["global_batch_size"]
        resolved = problem.resolve(layout.setting)
        names = ("data_parallel_size", "num_microbatches", "virtual_pipeline_model_parallel_size")
        assert [getattr(args, n) for n in names] == [getattr(resolved, n) for n in names]
    seconds = [layout.prediction.seconds for layout in candidates]
    assert seconds == sorted(seconds)
    assert len({layout.key for layout in candidates}) == len(candidates)


def test_no_legal_sizes_are_missing() -> None:
    problem = make_problem(4)
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "micro_batch_size")
    expected = {
        tuple(setting[name] for name in sizes)
        for setting in all_settings(problem)
        if is_legal({**problem.neutral, **setting}, 4)
    }
    candidates = enumerate_space(problem).candidates
    assert {tuple(layout.setting[name] for name in sizes) for layout in candidates} == expected


def test_memory_is_saved_only_where_it_is_needed() -> None:
    problem = make_problem(8, "H100", **LARGE_MODEL)
    space = enumerate_space(problem)
    assert space.too_large
    assert all(not layout.prediction.memory.excess_bytes for layout in space.candidates)
    saving = [o for o in space.candidates if o.setting["recompute_granularity"]]
    assert saving
    for layout in saving:
        bare = {**layout.setting, **dict.fromkeys(RECOMPUTED)}
        assert problem.predict_memory(bare).excess_bytes
    for large_layout in space.too_large:
        assert (
            large_layout.memory_bytes
            > max(layout.prediction.memory.bytes for layout in space.candidates)
            or problem.predict_memory(large_layout.setting).excess_bytes
        )


def test_each_way_to_save_memory_is_considered() -> None:
    settings = [
        layout.setting
        for layout in enumerate_space(make_problem(8, "H100", **LARGE_MODEL)).candidates
    ]
    for name, values in {
        "recompute_modules": {None, ("layernorm",)},
        "use_precision_aware_optimizer": {False, True},
        "optimizer_cpu_offload": {False, True},
        "data_parallel_sharding_strategy": {"no_shard", "optim_grads_params"},
    }.items():
        assert {setting[name] for setting in settings} >= values, name
    assert any(setting["cpu_offloading_num_layers"] for setting in settings)


@pytest.mark.parametrize(
    "changes", [LARGE_MODEL, {**LARGE_MODEL, **MIXTURE}], ids=["dense", "mixture"]
)
def test_no_prediction_is_below_its_lower_bound(changes: dict[str, Any]) -> None:
    problem = make_problem(8, "H100", **changes)
    candidates = enumerate_space(problem).candidates
    for layout in candidates:
        bound = problem.lower_bound(layout.setting)
        assert 0 < bound <= layout.prediction.seconds, layout
    # It is close, or it would leave out little.
    assert problem.lower_bound(candidates[0].setting) > 0.8 * candidates[0].prediction.seconds


RESTRICTED: dict[str, tuple[dict[str, tuple[Any, ...]], str, set[Any]]] = {
    "size": ({"tensor_model_parallel_size": (2,)}, "tensor_model_parallel_size", {2}),
    "micro-batch": ({"micro_batch_size": (1, 2)}, "micro_batch_size", {1, 2}),
    "replicas": ({"data_parallel_size": (4,)}, "pipeline_model_parallel_size", {1}),
    "recomputed": ({"use_recompute": (True,)}, "recompute_granularity", {"full"}),
    "layers": ({"recompute_num_layers": (None, 3)}, "recompute_num_layers", {None}),
    "sequences": ({"sequence_parallel": (False,)}, "sequence_parallel", {False}),
}


@pytest.mark.parametrize(("requested", "name", "values"), RESTRICTED.values(), ids=RESTRICTED)
def test_requested_values_restrict_the_space(
    requested: dict[str, Any], name: str, values: set[Any]
) -> None:
    candidates = enumerate_space(make_problem(4, requested=requested)).candidates
    assert {layout.setting[name] for layout in candidates} == values


def test_a_choice_of_one_more_argument_is_one_row() -> None:
    assert set(neutral_settings()) <= set(CHOSEN_ARGUMENTS)
    assert len(CHOSEN_ARGUMENTS) == len(set(CHOSEN_ARGUMENTS))


def test_seventy_billion_parameters_on_512_devices_keep_their_batch() -> None:
    problem = make_problem(
        512,
        "H100",
        num_layers=80,
        hidden_size=8192,
        ffn_hidden_size=28672,
        num_attention_heads=64,
        num_query_groups=8,
        seq_length=8192,
        global_batch_size=1024,
        bf16=True,
        requested={"context_parallel_size": (1, 2, 4), "use_distributed_optimizer": (True,)},
    )
    space = enumerate_space(problem)
    best = space.candidates[0]
    assert best.setting["tensor_model_parallel_size"] <= 8
    assert best.prediction.memory.bytes < 79 * 2**30
    assert all(1024 % o.setting["micro_batch_size"] == 0 for o in space.candidates)


DESCRIPTIONS = {
    "neutral": ({}, "tp1 pp1 mbs1"),
    "sizes": ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, "tp2 pp1 mbs1"),
    "no-sp": ({"tensor_model_parallel_size": 2, "sequence_parallel": False}, "tp2 pp1 mbs1 nosp"),
    "block": (
        {
            "recompute_granularity": "full",
            "recompute_method": "block",
            "recompute_num_layers": 3,
        },
        "tp1 pp1 mbs1 recompute=3",
    ),
    "uniform": (
        {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
            "optimizer_cpu_offload": True,
        },
        "tp1 pp1 mbs1 offload recompute=all",
    ),
}


@pytest.mark.parametrize(("changes", "text"), DESCRIPTIONS.values(), ids=DESCRIPTIONS)
def test_layout_is_described_by_its_differences(changes: dict[str, Any], text: str) -> None:
    setting = {name: neutral_settings().get(name, False) for name in CHOSEN_ARGUMENTS}
    assert describe_setting({**setting, **changes}) == text


def test_measurements_of_one_host_predict_many() -> None:
    problem = make_problem(8, "H100", bf16=True, global_batch_size=64)
    setting = {name: problem.values[name] for name in CHOSEN_ARGUMENTS}
    many = replace(problem, machine=problem.machine.with_hosts(4))
    assert many.machine.ranks == 32
    one, four = problem.predict_seconds(setting), many.predict_seconds(setting)
    # The same batch on more devices takes less time, but communication takes more.
    assert four["compute"] < one["compute"]
    assert four["data"] > one.get("data", 0.0)


def test_instances_communicate_less_between_hosts() -> None:
    sharding = {"data_parallel_sharding_strategy": "optim_grads_params"}
    seconds = []
    for instances in (1, 4):
        hybrid = {"num_distributed_optimizer_instances": instances}
        problem = make_problem(8, "H100", **LARGE_MODEL, **sharding, **hybrid, global_batch_size=64)
        setting = {name: problem.values[name] for name in CHOSEN_ARGUMENTS}
        setting["use_distributed_optimizer"] = True
        many = replace(problem, machine=problem.machine.with_hosts(4))
        seconds.append(many.predict_seconds(setting)["data"])
    assert seconds[1] < seconds[0]


def test_instances_of_the_experiment_are_kept() -> None:
    problem = make_problem(8, num_distributed_optimizer_instances=2, use_distributed_optimizer=True)
    settings = [layout.setting for layout in enumerate_space(problem).candidates]
    assert {setting["num_distributed_optimizer_instances"] for setting in settings} == {1, 2}
    for setting in settings:
        if not setting["use_distributed_optimizer"]:
            assert setting["num_distributed_optimizer_instances"] == 1


def test_unknown_memory_limits_nothing() -> None:
    problem = make_problem(2, "H100", bf16=True)
    unlimited = replace(problem, machine=replace(problem.machine, memory_gib=None))
    assert not enumerate_space(unlimited).too_large
    assert model_values()["global_batch_size"] == 8
