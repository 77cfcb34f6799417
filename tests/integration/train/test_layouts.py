"""Training results must not depend on the parallel layout.

The cases of :mod:`support.layout_cases` are trained once; each test compares the results of one
case.
"""

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
    EXAMPLES,
    FAMILY_CASES,
    FSCCL_CASES,
    GRAPH_CASES,
    HOMOGENEOUS_CASES,
    MASKED_DOCUMENT_CASES,
    MTP_CASES,
    REFERENCE_CASES,
    ROOT,
    create_example_case,
    is_slow,
)
from support.layout_lab import WORKER, train_cases, write_short_documents
from support.layout_meshes import MESH_CASES, MESH_DROPOUT
from support.layout_models import (
    COMPILED,
    EP2,
    LLAMA,
    MASKED_DOCUMENTS,
    OVERLAP,
    SHARD_WEIGHTS,
    SHORT_DOCUMENTS,
    LayoutCase,
)
from support.needs import explain_no_compiler

from flagscale.config.arguments.derive import derive_arguments
from flagscale.config.arguments.parameters import list_parameter_names
from flagscale.config.arguments.spec.command_line import parse_arguments
from flagscale.estimate.forecast import forecast_step
from flagscale.estimate.memory import element_bytes

# All cases are trained within the first test.
pytestmark = [pytest.mark.integration, pytest.mark.torch, pytest.mark.timeout(1100)]


LAYOUTS = (*HOMOGENEOUS_CASES, *MASKED_DOCUMENT_CASES, *MTP_CASES, *FAMILY_CASES, *MESH_CASES)

SHARDED_CASES = [case for case in HOMOGENEOUS_CASES if SHARD_WEIGHTS in case.layout]


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Train the cases of all selected tests once and return the worker's results."""
    module_items = [item for item in request.session.items if item.path == request.path]
    callspecs = [getattr(item, "callspec", None) for item in module_items]
    values = [value for spec in callspecs if spec is not None for value in spec.params.values()]
    names = {value.name if isinstance(value, LayoutCase) else value for value in values}
    if None in callspecs:
        # Tests without parameters use reference cases.
        names |= {case.name for case in REFERENCE_CASES}
    fsccl_cases = () if explain_no_compiler() else FSCCL_CASES
    all_cases = (*REFERENCE_CASES, MESH_DROPOUT, *LAYOUTS, *GRAPH_CASES, *fsccl_cases)
    names |= {case.reference for case in all_cases if case.name in names}
    cases = [case for case in all_cases if case.name in names]
    cases += [create_example_case(name) for name in EXAMPLES if name in names]
    return train_cases(cases, tmp_path_factory.mktemp("layouts"), timeout_seconds=1000)


def create_case_name_parameter(name: str) -> Any:
    """Return a test parameter for the name of a case, marked slow if the case is."""
    (case,) = (case for case in (*REFERENCE_CASES, *LAYOUTS) if case.name == name)
    return pytest.param(name, marks=[pytest.mark.slow] if is_slow(case) else [])


def parametrize_cases(cases: Sequence[LayoutCase]) -> pytest.MarkDecorator:
    """Parametrize a test with cases; slow ones are marked."""
    marks = {case: [pytest.mark.slow] if is_slow(case) else [] for case in cases}
    return pytest.mark.parametrize(
        "case", [pytest.param(case, id=case.name, marks=marks[case]) for case in cases]
    )


@parametrize_cases(HOMOGENEOUS_CASES)
def test_layout_equals_single_rank(case: LayoutCase, results: dict[str, Any]) -> None:
    assert_equals_reference(case, results)


@parametrize_cases([case for case in SHARDED_CASES if EP2 not in case.layout])
def test_only_shards_of_weights_stay_in_memory(case: LayoutCase, results: dict[str, Any]) -> None:
    """Experts are left out, because one rank may hold all of theirs."""
    assert results[case.name]["unsharded_weights"] == 0
    assert results[case.reference]["unsharded_weights"] == results[case.reference]["weight_count"]


@parametrize_cases(SHARDED_CASES)
def test_weights_are_gathered_only_if_a_pass_follows(
    case: LayoutCase, results: dict[str, Any]
) -> None:
    """Nothing is prefetched after the last forward pass, as in the last phase of a pipeline."""
    assert results[case.name]["embedding_gathers"] == results[case.name]["forward_passes"]


@parametrize_cases(SHARDED_CASES)
def test_ranks_report_that_another_one_failed(case: LayoutCase, results: dict[str, Any]) -> None:
    failure = results[case.name]["failure_of_rank_1"]
    assert failure == "rank 1 could not allocate 8 bytes: no memory left"


@parametrize_cases(MASKED_DOCUMENT_CASES)
def test_masked_documents_equal_single_rank(case: LayoutCase, results: dict[str, Any]) -> None:
    assert_equals_reference(case, results)


@parametrize_cases(MTP_CASES)
def test_multi_token_prediction_equals_single_rank(
    case: LayoutCase, results: dict[str, Any]
) -> None:
    assert_equals_reference(case, results)


def test_multi_token_prediction_keeps_the_main_loss(results: dict[str, Any]) -> None:
    """With equal weights the main loss is equal. The gradient is larger, because it includes MTP
    losses.
    """
    mtp, without_mtp = results["mtp"], results["masked"]
    assert mtp["loss"][0] == pytest.approx(without_mtp["loss"][0], rel=1e-6)
    first_step = [mtp["norm"][0], *mtp["mtp_losses"][:2]]
    assert mtp["torch_reference"][1:] == pytest.approx(first_step, rel=1e-5)
    assert mtp["norm"][0] > 1.01 * without_mtp["norm"][0]


@parametrize_cases(MESH_CASES)
def test_heterogeneous_layout_equals_single_rank(case: LayoutCase, results: dict[str, Any]) -> None:
    assert_equals_reference(case, results)


@parametrize_cases(FAMILY_CASES)
def test_family_equals_single_rank(case: LayoutCase, results: dict[str, Any]) -> None:
    assert_equals_reference(case, results)


@pytest.mark.parametrize("name", EXAMPLES)
def test_small_model_of_an_example_learns(name: str, results: dict[str, Any]) -> None:
    losses = results[f"example-{name}"]["loss"]
    # A model with random weights predicts each of 1000 tokens with equal probability.
    assert losses[0] == pytest.approx(math.log(1000), rel=0.02)
    assert losses[1] < losses[0] - 0.01
    assert losses[2] < 1.02 * losses[0]  # another random batch


# Recomputed layers of each micro-batch of a step, per rank and model chunk.
RECOMPUTED_LAYERS = {
    "recompute-full": [[[4, 4, 4, 4]]],
    "recompute-auto": [[[1, 1, 1, 1]]],
    "pp2-recompute-auto": [[[1, 1, 1, 1]], [[0, 0, 0, 0]]],
    "mesh-recompute-auto": [[[2, 2]], [[2, 2]], [[0, 0]], [[0, 0]]],
    "pp2-vpp2-recompute-per-stage": [
        [[1, 1, 1, 1], [1, 0, 0, 0]],
        [[0, 0, 1, 1], [1, 0, 0, 0]],
    ],
    "compiled-pp2-recompute-per-stage": [[[0, 2, 2, 2]], [[2, 2, 2, 2]]],
    "mesh-recompute-per-stage": [[[2, 1]], [[2, 1]], [[0, 1]], [[0, 1]]],
}


@pytest.mark.parametrize("name", [create_case_name_parameter(name) for name in RECOMPUTED_LAYERS])
def test_configured_layers_are_recomputed(name: str, results: dict[str, Any]) -> None:
    rank_counts = results[name]["recomputed"]
    steps = len(results[name]["loss"])
    assert [
        [counts["recomputed_per_micro_batch"] for counts in chunks] for chunks in rank_counts
    ] == [[layers * steps for layers in chunks] for chunks in RECOMPUTED_LAYERS[name]]
    assert all(
        counts["recomputed_total"] == sum(counts["recomputed_per_micro_batch"])
        for chunks in rank_counts
        for counts in chunks
    )


# Activations of a micro-batch relative to those of the reference case, at most.
ACTIVATIONS = {
    "selective": 0.5,
    "moe-aux-loss-selective": 0.75,
    "mla-moe-selective": 0.75,
    "compiled-mla-moe-selective": 0.95,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_recomputed_modules_keep_less(name: str, results: dict[str, Any]) -> None:
    (case,) = (case for case in HOMOGENEOUS_CASES if case.name == name)
    sizes = [results[key]["activation_bytes"] for key in (name, case.reference)]
    assert sizes[0] < ACTIVATIONS[name] * sizes[1]


@pytest.mark.parametrize(
    "name",
    ["fp16-overflow", "mesh-fp16-overflow-on-last-stage",
     create_case_name_parameter("mesh-fp16-overflow-on-first-stage-do")],
)  # fmt: skip
def test_overflow_on_one_rank_skips_the_step_on_all(name: str, results: dict[str, Any]) -> None:
    """All ranks skip the second step, halve the loss scale, and continue."""
    case_results = results[name]
    assert ["overflow" in reason for reason in case_results["skipped"]] == [False, True, False]
    assert all(scales == [4096, 2048, 2048] for scales in case_results["loss_scales"])


@pytest.mark.slow
@pytest.mark.parametrize("name", [MESH_DROPOUT.name])
def test_dropout_is_active_on_meshes(name: str, results: dict[str, Any]) -> None:
    with_dropout, without_dropout = results[name], results["llama"]
    assert with_dropout["weight_norm"] == pytest.approx(without_dropout["weight_norm"], rel=1e-6)
    assert with_dropout["loss"] == pytest.approx(without_dropout["loss"], rel=0.2)
    assert with_dropout["loss"][0] != pytest.approx(without_dropout["loss"][0], rel=1e-4)


@parametrize_cases(LAYOUTS)
def test_number_of_weights_equals_the_estimate(case: LayoutCase, results: dict[str, Any]) -> None:
    """Compare the weights of rank 0, whose stage is the first one, with the estimate.

    With an automatic split the estimate assumes equal numbers of layers, so other splits are
    ignored.
    """
    args = derive_arguments(parse_arguments(f"{case.model} {case.layout}".split()), case.world_size)
    args.data_parallel_sharding_strategy = "optim"  # a shard is less than the layers' weights
    stage = forecast_step(args, results[case.name]["vocabulary"]).stages[0]
    case_results = results[case.name]
    if case_results["stage_layers"] is None or case_results["stage_layers"][0] == stage.layers:
        # With FP8, estimated weight bytes include 8-bit copies, so gradients (fp32) are compared.
        estimated_bytes, width = stage.memory.weights, element_bytes(args)
        if args.fp8:
            estimated_bytes, width = stage.memory.gradients, 4
        assert estimated_bytes == case_results["weight_count"] * width
    if case.world_size == 1 and not args.peft_type:
        # The names that patterns of frozen parameters are checked against before a start.
        assert sorted(case_results["initial_statistics"]) == sorted(
            list_parameter_names(vars(args)) or ()
        )


@parametrize_cases(GRAPH_CASES)
def test_compiled_layout_equals_single_rank(case: LayoutCase, results: dict[str, Any]) -> None:
    assert_equals_reference(case, results)
    assert results[case.name]["uncompiled"] == []
    assert results[case.name]["graphs"] > 0


@pytest.mark.compiler
@parametrize_cases(FSCCL_CASES)
def test_fsccl_equals_gloo(case: LayoutCase, results: dict[str, Any]) -> None:
    assert_equals_reference(case, results)


def assert_equals_reference(case: LayoutCase, results: dict[str, Any]) -> None:
    """Compare the results of a case with those of its reference."""
    assert case.name in results, results["stderr"][-4000:]
    case_results, reference = results[case.name], results[case.reference]
    for quantity in ("weight_norm", "loss", "norm", "validation", "mtp_losses"):
        expected = pytest.approx(reference[quantity], rel=case.tolerance, abs=case.tolerance)
        assert case_results[quantity] == expected, quantity
    # In low precision, a router may choose other experts for a token.
    if case_results["scores"] and case.tolerance <= 1e-4:
        scores = pytest.approx(reference["scores"], rel=case.tolerance, abs=20 * case.tolerance)
        assert case_results["scores"] == scores
        assert case_results["next_tokens"] == reference["next_tokens"]
    assert case_results["router_losses"] == pytest.approx(reference["router_losses"], rel=1e-4)


def test_router_losses_are_counted_once(results: dict[str, Any]) -> None:
    """A load-balancing loss is 1 for uniform routing, and slightly above with random weights."""
    losses = results["moe-aux-loss"]["router_losses"]
    assert set(losses) == {"load_balancing_loss", "z_loss"}
    assert losses["load_balancing_loss"] == pytest.approx(1.0, abs=0.25)
    assert results["moe"]["router_losses"] == results["llama"]["router_losses"] == {}


@pytest.mark.parametrize(
    ("name", "standard_deviation", "mean"),
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
    name: str, standard_deviation: float, mean: float, results: dict[str, Any]
) -> None:
    statistics = results["llama"]["initial_statistics"][name]
    assert statistics == pytest.approx([standard_deviation, mean], rel=0.05, abs=0.01)


@pytest.mark.parametrize(
    "name",
    ["llama", "bert", "masked-per-token", "sft", "lora", "lora-some-layers", "mtp-per-token"],
)
def test_single_rank_equals_a_reference_implementation(name: str, results: dict[str, Any]) -> None:
    case_results = results[name]
    first_step = [
        case_results["loss"][0],
        case_results["norm"][0],
        *case_results["mtp_losses"][: len(case_results["torch_reference"]) - 2],
    ]
    assert case_results["torch_reference"] == pytest.approx(first_step, rel=1e-5)


@pytest.mark.parametrize(("base_name", "name"), [("lora-base", "lora"), ("moe", "moe-lora")])
def test_adapters_start_from_the_base_model(
    base_name: str, name: str, results: dict[str, Any]
) -> None:
    base, with_adapters = results[base_name], results[name]
    assert with_adapters["loss"][0] == pytest.approx(base["loss"][0], rel=1e-7)
    assert with_adapters["weight_count"] > base["weight_count"]


def test_expert_biases_do_not_change_with_adapters(
    results: dict[str, Any],
) -> None:
    # Largest absolute value of each MoE layer's biases.
    biases = results["mla-moe"]["expert_biases"]
    assert [len(biases), all(biases)] == [3, True]
    assert results["mla-moe-lora"]["expert_biases"] == [0.0, 0.0, 0.0]


def test_single_rank_loss_decreases(results: dict[str, Any]) -> None:
    loss = results["llama"]["loss"]
    assert loss[-1] < loss[0]
    assert all(norm > 0.1 for norm in results["llama"]["norm"])


GRAPH_MODELS = {
    "llama": LLAMA,
    # Document masking by a mask, because the variable-length kernel is for CUDA.
    "masked-adapters": f"{MASKED_DOCUMENTS} --attention-backend unfused --peft-type lora "
    "--lora-target-modules q_proj v_proj o_proj up_proj down_proj",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GRAPH_MODELS)
def test_all_layers_share_one_graph_each_for_training_and_evaluation(
    name: str, results: dict[str, Any], tmp_path: Path
) -> None:
    """The graphs serve all layers, micro-batches and steps.

    There are no graph breaks, although parameters are gathered between layers.
    """
    python_path = f"{ROOT}:{ROOT / 'third_party' / 'Megatron-LM'}"
    write_short_documents(tmp_path / SHORT_DOCUMENTS)
    process = subprocess.run(
        [sys.executable, str(WORKER.with_name("cuda_graph_worker.py")),
         *f"{GRAPH_MODELS[name]} {COMPILED} {OVERLAP}".split()],
        env={**os.environ, "PYTHONPATH": python_path, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-4000:]
    graph_results = json.loads(process.stdout.splitlines()[-1])
    assert (graph_results["graphs"], graph_results["breaks"]) == (2, 0)
    assert graph_results["seconds"] > 0.1
    if name in results:
        assert graph_results["loss"] == pytest.approx(results[name]["loss"], rel=1e-5)
        assert [graph_results["validation"]] == pytest.approx(results[name]["validation"], rel=1e-5)
