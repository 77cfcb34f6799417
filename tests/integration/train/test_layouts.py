"""The parallel layout changes how a model is trained, not what it learns."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.layout_cases import (
    APART_CASES,
    CASES,
    EXAMPLES,
    FAMILIES,
    FSCCL_CASES,
    GRAPHS,
    PREDICTING,
    REFERENCES,
    ROOT,
    example,
    is_slow,
)
from support.layout_lab import WORKER, train, write_short_documents
from support.layout_meshes import DROPPED, MESHES
from support.layout_models import APART, COMPILED, LLAMA, OVERLAP, SHORT_DOCUMENTS, Case
from support.needs import why_no_compiler

from flagscale.config.arguments.parser import parse_arguments
from flagscale.config.arguments.resolve import resolve
from flagscale.estimate.forecast import forecast
from flagscale.estimate.memory import width_of

# What all its tests look at is trained within the first.
pytestmark = [pytest.mark.integration, pytest.mark.torch, pytest.mark.timeout(1100)]


LAYOUTS = (*CASES, *APART_CASES, *PREDICTING, *FAMILIES, *MESHES)


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What the worker tells of every case that a test is about, trained once for all tests."""
    here = [item for item in request.session.items if item.path == request.path]
    given = [getattr(item, "callspec", None) for item in here]
    values = [value for one in given if one is not None for value in one.params.values()]
    asked = {value.name if isinstance(value, Case) else value for value in values}
    if None in given:
        # Tests without parameters look at references.
        asked |= {case.name for case in REFERENCES}
    fsccl = () if why_no_compiler() else FSCCL_CASES
    every = (*REFERENCES, DROPPED, *LAYOUTS, *GRAPHS, *fsccl)
    asked |= {case.reference for case in every if case.name in asked}
    wanted = [case for case in every if case.name in asked]
    wanted += [example(name) for name in EXAMPLES if name in asked]
    return train(wanted, tmp_path_factory.mktemp("layouts"), timeout_s=1000)


def slow_or_not(name: str) -> Any:
    """A test's parameter: a case by its name."""
    (case,) = (one for one in (*REFERENCES, *LAYOUTS) if one.name == name)
    return pytest.param(name, marks=[pytest.mark.slow] if is_slow(case) else [])


def each(cases: Sequence[Case]) -> pytest.MarkDecorator:
    """A test for each of these cases, slow ones for those that are."""
    marks = {case: [pytest.mark.slow] if is_slow(case) else [] for case in cases}
    return pytest.mark.parametrize(
        "case", [pytest.param(case, id=case.name, marks=marks[case]) for case in cases]
    )


@each(CASES)
def test_a_layout_learns_what_one_rank_learns(case: Case, results: dict[str, Any]) -> None:
    expect_equal(case, results)


@each(APART_CASES)
def test_documents_are_apart_in_every_layout(case: Case, results: dict[str, Any]) -> None:
    expect_equal(case, results)


@each(PREDICTING)
def test_further_tokens_are_predicted_in_every_layout(case: Case, results: dict[str, Any]) -> None:
    expect_equal(case, results)


def test_further_tokens_leave_the_loss_of_the_head_as_it_is(results: dict[str, Any]) -> None:
    """Of the same weights it is the same; the gradient is of all losses."""
    found, alone = results["mtp"], results["apart"]
    assert found["loss"][0] == pytest.approx(alone["loss"][0], rel=1e-6)
    first = [found["norm"][0], *found["further"][:2]]
    assert found["by_hand"][1:] == pytest.approx(first, rel=1e-5)
    assert found["norm"][0] > 1.01 * alone["norm"][0]


@each(MESHES)
def test_unlike_meshes_learn_what_one_rank_learns(case: Case, results: dict[str, Any]) -> None:
    expect_equal(case, results)


@each(FAMILIES)
def test_another_family_learns_what_one_rank_learns(case: Case, results: dict[str, Any]) -> None:
    expect_equal(case, results)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_small_example_of_a_family_learns(name: str, results: dict[str, Any]) -> None:
    losses = results[f"example-{name}"]["loss"]
    assert losses[0] == pytest.approx(math.log(1000), rel=0.02)
    assert losses[1] < losses[0] - 0.01
    assert losses[2] < 1.02 * losses[0]  # of other tokens in part, drawn at random


# Of each rank and model chunk, how many layers of each micro-batch of a step are recomputed.
RECOMPUTED = {
    "recompute-full": [[[4, 4, 4, 4]]],
    "recompute-auto": [[[3, 3, 3, 3]]],
    "pp2-recompute-auto": [[[1, 1, 1, 1]], [[0, 0, 0, 0]]],
    "mesh-recompute-auto": [[[2, 2]], [[2, 2]], [[0, 0]], [[0, 0]]],
    "pp2-vpp2-recompute-by-stage": [
        [[1, 1, 1, 1], [1, 0, 0, 0]],
        [[0, 0, 1, 1], [1, 0, 0, 0]],
    ],
    "compiled-pp2-recompute-by-stage": [[[0, 2, 2, 2]], [[2, 2, 2, 2]]],
    "mesh-recompute-by-stage": [[[2, 1]], [[2, 1]], [[0, 1]], [[0, 1]]],
}


@pytest.mark.parametrize("name", [slow_or_not(name) for name in RECOMPUTED])
def test_the_layers_that_are_asked_for_are_recomputed(name: str, results: dict[str, Any]) -> None:
    ranks = results[name]["recomputed"]
    steps = len(results[name]["loss"])
    assert [[own["dropped"] for own in chunks] for chunks in ranks] == [
        [own * steps for own in chunks] for chunks in RECOMPUTED[name]
    ]
    assert all(own["again"] == sum(own["dropped"]) for chunks in ranks for own in chunks)


@pytest.mark.parametrize(
    "name",
    ["fp16-overflow", "mesh-fp16-overflow-in-the-last",
     slow_or_not("mesh-fp16-overflow-in-the-first-do")],
)  # fmt: skip
def test_an_overflow_on_one_rank_is_everyones(name: str, results: dict[str, Any]) -> None:
    """All ranks skip the step, halve the scale of the loss, and go on."""
    found = results[name]
    assert ["overflow" in why for why in found["skipped"]] == [False, True, False]
    assert all(scales == [4096, 2048, 2048] for scales in found["scales"])


@pytest.mark.slow
@pytest.mark.parametrize("name", [DROPPED.name])
def test_dropout_drops_something_on_meshes(name: str, results: dict[str, Any]) -> None:
    found, whole = results[name], results["llama"]
    assert found["weights"] == pytest.approx(whole["weights"], rel=1e-6)
    assert found["loss"] == pytest.approx(whole["loss"], rel=0.2)
    assert found["loss"][0] != pytest.approx(whole["loss"][0], rel=1e-4)


@each(LAYOUTS)
def test_as_many_weights_as_estimated(case: Case, results: dict[str, Any]) -> None:
    """On the first stage, or in all; where layers are chosen it is the even split's."""
    args = resolve(parse_arguments(f"{case.model} {case.layout}".split()), case.world)
    stage = forecast(args, results[case.name]["vocabulary"]).stages[0]
    found = results[case.name]
    if found["layers"] is None or found["layers"][0] == stage.layers:
        # Beside weights of 8-bit products lie copies in 8 bits; all their gradients are of 32.
        taken, width = stage.memory.weights, width_of(args)
        if args.fp8:
            taken, width = stage.memory.gradients, 4
        assert taken == found["own_weights"] * width


@each(GRAPHS)
def test_graphs_learn_what_one_rank_learns(case: Case, results: dict[str, Any]) -> None:
    expect_equal(case, results)
    assert results[case.name]["uncompiled"] == []
    assert results[case.name]["graphs"] > 0


@pytest.mark.compiler
@each(FSCCL_CASES)
def test_fsccl_trains_what_gloo_trains(case: Case, results: dict[str, Any]) -> None:
    expect_equal(case, results)


def expect_equal(case: Case, results: dict[str, Any]) -> None:
    assert case.name in results, results["stderr"][-4000:]
    ours, reference = results[case.name], results[case.reference]
    for quantity in ("weights", "loss", "norm", "validation", "further"):
        expected = pytest.approx(reference[quantity], rel=case.tolerance, abs=case.tolerance)
        assert ours[quantity] == expected, quantity
    assert ours["routers"] == pytest.approx(reference["routers"], rel=1e-4)


def test_the_losses_of_routers_are_counted_once(results: dict[str, Any]) -> None:
    """A load-balancing loss is 1 where all experts get the same share, and just above it with
    weights that are drawn at random."""
    found = results["moe-balanced"]["routers"]
    assert set(found) == {"load_balancing_loss", "z_loss"}
    assert found["load_balancing_loss"] == pytest.approx(1.0, abs=0.25)
    assert results["moe"]["routers"] == results["llama"]["routers"] == {}


@pytest.mark.parametrize(
    ("name", "spread", "mean"),
    [
        ("embedding.word_embeddings.weight", 0.1, 0.0),
        ("decoder.layers.3.self_attention.linear_qkv.weight", 0.1, 0.0),
        ("decoder.layers.3.mlp.linear_fc1.weight", 0.1, 0.0),
        ("decoder.layers.0.self_attention.linear_proj.weight", 0.1 / 8**0.5, 0.0),
        ("decoder.layers.0.mlp.linear_fc2.weight", 0.1 / 8**0.5, 0.0),
        ("decoder.final_layernorm.weight", 0.0, 1.0),
        ("output_layer.weight", 0.1, 0.0),
    ],
)
def test_initial_weights_are_distributed_as_in_megatron(
    name: str, spread: float, mean: float, results: dict[str, Any]
) -> None:
    found = results["llama"]["initial"][name]
    assert found == pytest.approx([spread, mean], rel=0.05, abs=0.01)


@pytest.mark.parametrize(
    "name", ["llama", "bert", "apart-per-token", "sft", "lora", "lora-parts", "mtp-per-token"]
)
def test_the_reference_computes_what_plain_torch_does(name: str, results: dict[str, Any]) -> None:
    found = results[name]
    first = [found["loss"][0], found["norm"][0], *found["further"][: len(found["by_hand"]) - 2]]
    assert found["by_hand"] == pytest.approx(first, rel=1e-5)


def test_adapters_begin_with_what_the_base_computes(results: dict[str, Any]) -> None:
    base, adapted = results["lora-base"], results["lora"]
    assert adapted["loss"][0] == pytest.approx(base["loss"][0], rel=1e-7)
    assert adapted["own_weights"] > base["own_weights"]


def test_experts_are_chosen_by_biases_that_do_not_move_where_adapters_are_trained(
    results: dict[str, Any],
) -> None:
    moved = results["latent-moe"]["biases"]
    assert [len(moved), all(moved)] == [3, True]
    assert results["latent-moe-lora"]["biases"] == [0.0, 0.0, 0.0]


def test_the_reference_really_learns(results: dict[str, Any]) -> None:
    loss = results["llama"]["loss"]
    assert loss[-1] < loss[0]
    assert all(norm > 0.1 for norm in results["llama"]["norm"])


MODELS = {
    "llama": LLAMA,
    # Kept apart by a mask: the kernel that takes ends of documents is CUDA's.
    "apart-adapters": f"{APART} --attention-backend unfused --peft-type lora "
    "--lora-target-modules q_proj v_proj o_proj up_proj down_proj",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_two_graphs(name: str, results: dict[str, Any], tmp_path: Path) -> None:
    """One for training and one for evaluation, which all layers, micro-batches and steps share;
    no part of a layer is left out, with the parameters gathered as it runs."""
    path = f"{ROOT}:{ROOT / 'third_party' / 'Megatron-LM'}"
    write_short_documents(tmp_path / SHORT_DOCUMENTS)
    found = subprocess.run(
        [sys.executable, str(WORKER.with_name("graph_worker.py")),
         *f"{MODELS[name]} {COMPILED} {OVERLAP}".split()],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-4000:]
    counted = json.loads(found.stdout.splitlines()[-1])
    assert (counted["graphs"], counted["breaks"]) == (2, 0)
    assert counted["seconds"] > 0.1
    if name in results:
        assert counted["loss"] == pytest.approx(results[name]["loss"], rel=1e-5)
        assert [counted["validation"]] == pytest.approx(results[name]["validation"], rel=1e-5)
