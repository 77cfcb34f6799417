"""Training with frozen parameters, and its checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
from integration.checkpoint.checkpoint_lab import (
    DIST_OPT,
    MESHES,
    MODELS,
    PP2,
    TP2,
    CheckpointLab,
    Layout,
    make_case,
)

pytestmark = [pytest.mark.integration, pytest.mark.torch]

LOWER_HALF = "embedding decoder.layers.[0-1]"
MLPS = "decoder.layers.*.mlp output_layer"
EXPERTS = "embedding decoder.layers.*.mlp.experts"
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
CASES: dict[str, tuple[Layout, str]] = {
    "one": (Layout(1), LOWER_HALF),
    "one-mlps": (Layout(1, RECOMPUTED), MLPS),
    "one-recomputed": (Layout(1, RECOMPUTED), LOWER_HALF),
    "tp2-do": (Layout(2, f"{TP2} --sequence-parallel {DIST_OPT}"), MLPS),
    # The first stage is frozen as a whole.
    "pp2": (Layout(2, PP2), LOWER_HALF),
    "pp2-do": (Layout(2, f"{PP2} {DIST_OPT}"), LOWER_HALF),
    "pp2-vpp2": (Layout(2, f"{PP2} --num-virtual-stages-per-pipeline-rank 2"), LOWER_HALF),
    "tied-pp2-do": (Layout(2, f"{PP2} {DIST_OPT}", "tied"), LOWER_HALF),
    "bf16-dp2-do": (
        Layout(2, f"{DIST_OPT} --overlap-grad-reduce --overlap-param-gather", "bf16"),
        LOWER_HALF,
    ),
    "tied-meshes-do": (
        Layout(2, f"{MESHES} 1 1 1 1 1  1 1 1 1 1 {DIST_OPT}", "tied"),
        LOWER_HALF,
    ),
    "compiled": (Layout(1, "--transformer-impl compiled"), LOWER_HALF),
    "compiled-mlps": (Layout(1, "--transformer-impl compiled"), MLPS),
    "fp8": (Layout(1, "--fp8 hybrid", "bf16"), MLPS),
    "experts-ep2-do": (Layout(2, f"--expert-model-parallel-size 2 {DIST_OPT}", "moe"), EXPERTS),
    "all-but-experts": (
        Layout(2, f"--moe-grouped-gemm --expert-model-parallel-size 2 {DIST_OPT}", "moe"),
        "embedding decoder.layers.*.self_attention decoder.*norm *router* output_layer",
    ),
}
STEPS = 2
WITHOUT_DECAY = "--weight-decay 0"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    lab = CheckpointLab(tmp_path_factory.mktemp("freezing"))
    for world in (1, 2):
        cases = []
        for name, (layout, patterns) in CASES.items():
            if layout.world == world:
                frozen = f"{WITHOUT_DECAY} --freeze-parameters {patterns}"
                cases += [
                    make_case(name, "train_frozen", layout, frozen, steps=STEPS),
                    make_case(
                        f"{name}-masked",
                        "train_frozen",
                        layout,
                        WITHOUT_DECAY,
                        steps=STEPS,
                        masked=patterns.split(),
                    ),
                ]
        lab.add_stage(world, *cases, *_checkpoint_cases(lab, world))
    return lab.run()


def _checkpoint_cases(lab: CheckpointLab, world: int) -> list[dict[str, Any]]:
    """Save on one rank, resume on two with the same and other patterns."""
    freeze, checkpoints = f"--freeze-parameters {LOWER_HALF}", lab.root / "checkpoints"
    if world == 1:
        flags = f"{freeze} --save {checkpoints}"
        layout = Layout(1, DIST_OPT)
        return [make_case("saved", "save_and_go_on", layout, flags, steps=2, steps_after=2)]
    layout = Layout(2, f"{PP2} {DIST_OPT}")
    other = "--freeze-parameters embedding"
    load = f"--load {checkpoints}"
    return [
        make_case(name, "train_and_save", layout, f"{flags} {load}", steps=2)
        for name, flags in {
            "resumed": freeze,
            "other": other,
            "none": "",
            "other-without-optimizer": f"{other} --no-load-optim",
        }.items()
    ]


@pytest.mark.parametrize("name", CASES)
def test_trained_weights_equal_those_of_masked_gradients(name: str, results: Any) -> None:
    frozen, masked = results[name], results[f"{name}-masked"]
    assert frozen["loss"] == pytest.approx(masked["loss"], rel=1e-6)
    assert frozen["norm"] == pytest.approx(masked["norm"], rel=1e-5)
    for rank, reference in zip(frozen["ranks"], masked["ranks"], strict=True):
        assert rank["changed"] == reference["changed"] == []
        assert rank["weights"].keys() == reference["weights"].keys()
        for parameter, (total, magnitude) in rank["weights"].items():
            # Rounding of single weights, which may cancel in their sum.
            expected = pytest.approx(reference["weights"][parameter], abs=1e-6 * magnitude)
            assert [total, magnitude] == expected, parameter
    assert sum(rank["frozen"] for rank in frozen["ranks"]) > 0


@pytest.mark.parametrize("name", CASES)
def test_frozen_weights_have_neither_gradients_nor_optimizer_state(name: str, results: Any) -> None:
    for rank in results[name]["ranks"]:
        padding = 0 if "-do" not in name else 4096
        assert rank["state_size"] <= rank["trained_size"] + padding
        assert rank["gradient_size"] <= rank["trained_size"] + padding
        assert (rank["gradient_size"] == 0) == (rank["trained_size"] == 0)


def test_resumed_run_continues_in_another_layout(results: Any) -> None:
    assert results["resumed"]["loss"] == pytest.approx(results["saved"]["loss"][2:], rel=1e-5)


def test_other_patterns_need_a_new_optimizer_state(results: Any) -> None:
    expected = (
        "the checkpoint's optimizer state is of other parameters, because others were frozen: "
        "freeze_parameters: [embedding, decoder.layers.[0-1]] in the checkpoint, "
    )
    assert f"{expected}freeze_parameters: [embedding] in this run" in results["other"]["error"]
    assert f"{expected}all parameters trained in this run" in results["none"]["error"]
    assert "no_load_optim: true continues with a new" in results["other"]["error"]
    assert results["other-without-optimizer"]["progress"]["iteration"] == 4


def test_models_have_the_names_that_patterns_are_checked_against(results: Any) -> None:
    """The launcher checks patterns without the model."""
    from flagscale.config.arguments.derive import derive_arguments
    from flagscale.config.arguments.parameters import list_parameter_names
    from flagscale.config.arguments.spec.command_line import parse_arguments

    for name, (layout, _) in CASES.items():
        args = derive_arguments(parse_arguments(MODELS[layout.model].split()), 1)
        model = {p for rank in results[name]["ranks"] for p in rank["weights"]}
        expected = set(list_parameter_names(vars(args)) or ())
        if "grouped" in layout.flags:  # named by the first expert of each rank
            model = {p for p in model if ".experts." not in p}
            expected = {p for p in expected if ".experts." not in p}
        assert model == expected, name
