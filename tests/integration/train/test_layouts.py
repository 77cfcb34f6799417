"""Training results must not depend on the parallel layout."""

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
    CASES,
    EXAMPLES,
    FAMILY_CASES,
    FSCCL_CASES,
    GRAPH_CASES,
    MASKED_DOCUMENT_CASES,
    MTP_CASES,
    REFERENCES,
    ROOT,
    example_case,
    is_slow,
)
from support.layout_lab import WORKER, train_cases, write_short_documents
from support.layout_meshes import MESH_DROPOUT, MESHES
from support.layout_models import (
    COMPILED,
    LLAMA,
    MASKED_DOCUMENTS,
    OVERLAP,
    SHORT_DOCUMENTS,
    LayoutCase,
)
from support.needs import explain_no_compiler

from flagscale.config.arguments.derive import derive_arguments
from flagscale.config.arguments.spec.parser import parse_arguments
from flagscale.estimate.forecast import forecast_step
from flagscale.estimate.memory import element_bytes

# All cases are trained within the first test.
pytestmark = [pytest.mark.integration, pytest.mark.torch, pytest.mark.timeout(1100)]


LAYOUTS = (*CASES, *MASKED_DOCUMENT_CASES, *MTP_CASES, *FAMILY_CASES, *MESHES)


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Train the cases of all selected tests once and return the worker's results."""
    module_items = [item for item in request.session.items if item.path == request.path]
    callspecs = [getattr(item, "callspec", None) for item in module_items]
    values = [value for one in callspecs if one is not None for value in one.params.values()]
    names = {value.name if isinstance(value, LayoutCase) else value for value in values}
    if None in callspecs:
        # Tests without parameters use reference cases.
        names |= {case.name for case in REFERENCES}
    fsccl = () if explain_no_compiler() else FSCCL_CASES
    all_cases = (*REFERENCES, MESH_DROPOUT, *LAYOUTS, *GRAPH_CASES, *fsccl)
    names |= {case.reference for case in all_cases if case.name in names}
    cases = [case for case in all_cases if case.name in names]
    cases += [example_case(name) for name in EXAMPLES if name in names]
    return train_cases(cases, tmp_path_factory.mktemp("layouts"), timeout_s=1000)


def case_name_param(name: str) -> Any:
    """Return a test parameter for the name of a case, marked slow if the case is."""
    (case,) = (one for one in (*REFERENCES, *LAYOUTS) if one.name == name)
    return pytest.param(name, marks=[pytest.mark.slow] if is_slow(case) else [])


def parametrize_cases(cases: Sequence[LayoutCase]) -> pytest.MarkDecorator:
    """Parametrize a test with cases; slow ones are marked."""
    marks = {case: [pytest.mark.slow] if is_slow(case) else [] for case in cases}
    return pytest.mark.parametrize(
        "case", [pytest.param(case, id=case.name, marks=marks[case]) for case in cases]
    )


@parametrize_cases(CASES)
def test_layout_equals_single_rank(case: LayoutCase, results: dict[str, Any]) -> None:
    expect_equal(case, results)


@parametrize_cases(MASKED_DOCUMENT_CASES)
def test_document_masking_in_every_layout(case: LayoutCase, results: dict[str, Any]) -> None:
    expect_equal(case, results)


@parametrize_cases(MTP_CASES)
def test_multi_token_prediction_in_every_layout(case: LayoutCase, results: dict[str, Any]) -> None:
    expect_equal(case, results)


def test_multi_token_prediction_keeps_the_main_loss(results: dict[str, Any]) -> None:
    """Equal weights give an equal main loss; the gradient is of all losses."""
    mtp, without_mtp = results["mtp"], results["apart"]
    assert mtp["loss"][0] == pytest.approx(without_mtp["loss"][0], rel=1e-6)
    first = [mtp["norm"][0], *mtp["further"][:2]]
    assert mtp["by_hand"][1:] == pytest.approx(first, rel=1e-5)
    assert mtp["norm"][0] > 1.01 * without_mtp["norm"][0]


@parametrize_cases(MESHES)
def test_heterogeneous_layout_equals_single_rank(case: LayoutCase, results: dict[str, Any]) -> None:
    expect_equal(case, results)


@parametrize_cases(FAMILY_CASES)
def test_family_equals_single_rank(case: LayoutCase, results: dict[str, Any]) -> None:
    expect_equal(case, results)


@pytest.mark.parametrize("name", EXAMPLES)
def test_small_model_of_an_example_learns(name: str, results: dict[str, Any]) -> None:
    losses = results[f"example-{name}"]["loss"]
    assert losses[0] == pytest.approx(math.log(1000), rel=0.02)
    assert losses[1] < losses[0] - 0.01
    assert losses[2] < 1.02 * losses[0]  # of other tokens in part, drawn at random


# Recomputed layers of each micro-batch of a step, per rank and model chunk.
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


@pytest.mark.parametrize("name", [case_name_param(name) for name in RECOMPUTED])
def test_configured_layers_are_recomputed(name: str, results: dict[str, Any]) -> None:
    ranks = results[name]["recomputed"]
    steps = len(results[name]["loss"])
    assert [[own["dropped"] for own in chunks] for chunks in ranks] == [
        [own * steps for own in chunks] for chunks in RECOMPUTED[name]
    ]
    assert all(own["again"] == sum(own["dropped"]) for chunks in ranks for own in chunks)


@pytest.mark.parametrize(
    "name",
    ["fp16-overflow", "mesh-fp16-overflow-in-the-last",
     case_name_param("mesh-fp16-overflow-in-the-first-do")],
)  # fmt: skip
def test_overflow_on_one_rank_skips_the_step_on_all(name: str, results: dict[str, Any]) -> None:
    """All ranks skip the step, halve the loss scale, and continue."""
    case_results = results[name]
    assert ["overflow" in why for why in case_results["skipped"]] == [False, True, False]
    assert all(scales == [4096, 2048, 2048] for scales in case_results["scales"])


@pytest.mark.slow
@pytest.mark.parametrize("name", [MESH_DROPOUT.name])
def test_dropout_is_active_on_meshes(name: str, results: dict[str, Any]) -> None:
    with_dropout, without_dropout = results[name], results["llama"]
    assert with_dropout["weights"] == pytest.approx(without_dropout["weights"], rel=1e-6)
    assert with_dropout["loss"] == pytest.approx(without_dropout["loss"], rel=0.2)
    assert with_dropout["loss"][0] != pytest.approx(without_dropout["loss"][0], rel=1e-4)


@parametrize_cases(LAYOUTS)
def test_number_of_weights_equals_the_estimate(case: LayoutCase, results: dict[str, Any]) -> None:
    """Compare the first stage, or all; with automatic layers only if the split is even."""
    args = derive_arguments(parse_arguments(f"{case.model} {case.layout}".split()), case.world)
    stage = forecast_step(args, results[case.name]["vocabulary"]).stages[0]
    case_results = results[case.name]
    if case_results["layers"] is None or case_results["layers"][0] == stage.layers:
        # With FP8, estimated weight bytes include 8-bit copies, so gradients (fp32) are compared.
        estimated_bytes, width = stage.memory.weights, element_bytes(args)
        if args.fp8:
            estimated_bytes, width = stage.memory.gradients, 4
        assert estimated_bytes == case_results["own_weights"] * width


@parametrize_cases(GRAPH_CASES)
def test_compiled_layout_equals_single_rank(case: LayoutCase, results: dict[str, Any]) -> None:
    expect_equal(case, results)
    assert results[case.name]["uncompiled"] == []
    assert results[case.name]["graphs"] > 0


@pytest.mark.compiler
@parametrize_cases(FSCCL_CASES)
def test_fsccl_equals_gloo(case: LayoutCase, results: dict[str, Any]) -> None:
    expect_equal(case, results)


def expect_equal(case: LayoutCase, results: dict[str, Any]) -> None:
    assert case.name in results, results["stderr"][-4000:]
    ours, reference = results[case.name], results[case.reference]
    for quantity in ("weights", "loss", "norm", "validation", "further"):
        expected = pytest.approx(reference[quantity], rel=case.tolerance, abs=case.tolerance)
        assert ours[quantity] == expected, quantity
    assert ours["routers"] == pytest.approx(reference["routers"], rel=1e-4)


def test_router_losses_are_counted_once(results: dict[str, Any]) -> None:
    """A load-balancing loss is 1 for uniform routing, and slightly above with random weights."""
    losses = results["moe-balanced"]["routers"]
    assert set(losses) == {"load_balancing_loss", "z_loss"}
    assert losses["load_balancing_loss"] == pytest.approx(1.0, abs=0.25)
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
    statistics = results["llama"]["initial"][name]
    assert statistics == pytest.approx([spread, mean], rel=0.05, abs=0.01)


@pytest.mark.parametrize(
    "name", ["llama", "bert", "apart-per-token", "sft", "lora", "lora-parts", "mtp-per-token"]
)
def test_single_rank_equals_plain_torch(name: str, results: dict[str, Any]) -> None:
    case_results = results[name]
    first = [
        case_results["loss"][0],
        case_results["norm"][0],
        *case_results["further"][: len(case_results["by_hand"]) - 2],
    ]
    assert case_results["by_hand"] == pytest.approx(first, rel=1e-5)


def test_adapters_start_from_the_base_model(results: dict[str, Any]) -> None:
    base, adapted = results["lora-base"], results["lora"]
    assert adapted["loss"][0] == pytest.approx(base["loss"][0], rel=1e-7)
    assert adapted["own_weights"] > base["own_weights"]


def test_expert_biases_do_not_change_with_adapters(
    results: dict[str, Any],
) -> None:
    biases = results["latent-moe"]["biases"]
    assert [len(biases), all(biases)] == [3, True]
    assert results["latent-moe-lora"]["biases"] == [0.0, 0.0, 0.0]


def test_single_rank_loss_decreases(results: dict[str, Any]) -> None:
    loss = results["llama"]["loss"]
    assert loss[-1] < loss[0]
    assert all(norm > 0.1 for norm in results["llama"]["norm"])


MODELS = {
    "llama": LLAMA,
    # Document masking by a mask, because the variable-length kernel is for CUDA.
    "apart-adapters": f"{MASKED_DOCUMENTS} --attention-backend unfused --peft-type lora "
    "--lora-target-modules q_proj v_proj o_proj up_proj down_proj",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_model_has_two_graphs(name: str, results: dict[str, Any], tmp_path: Path) -> None:
    """Layers share one graph for training and one for evaluation, over all micro-batches and steps.

    No part of a layer is excluded, with parameters gathered while it runs.
    """
    path = f"{ROOT}:{ROOT / 'third_party' / 'Megatron-LM'}"
    write_short_documents(tmp_path / SHORT_DOCUMENTS)
    process = subprocess.run(
        [sys.executable, str(WORKER.with_name("cuda_graph_worker.py")),
         *f"{MODELS[name]} {COMPILED} {OVERLAP}".split()],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-4000:]
    counts = json.loads(process.stdout.splitlines()[-1])
    assert (counts["graphs"], counts["breaks"]) == (2, 0)
    assert counts["seconds"] > 0.1
    if name in results:
        assert counts["loss"] == pytest.approx(results[name]["loss"], rel=1e-5)
        assert [counts["validation"]] == pytest.approx(results[name]["validation"], rel=1e-5)
