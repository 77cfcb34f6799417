"""Tests of the search for parallel sizes of meshes that only set their number of ranks."""

from __future__ import annotations

from typing import Any

import pytest

from flagscale.config.arguments.derive import derive_arguments
from flagscale.config.arguments.spec.command_line import parse_arguments
from flagscale.errors import ConfigError
from flagscale.estimate import layouts
from flagscale.estimate.costs import DENSE, PartCost, RankCosts
from flagscale.estimate.layouts import LayerTrial

BASE = """
--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --train-iters 1 --lr 1e-3
--mock-data --enable-hetero --global-batch-size 16
"""
TWO = "--hetero-process-meshes device_type=A,ranks=4 device_type=B,ranks=2"


def make_arguments(more: str = "", meshes: str = TWO) -> Any:
    return derive_arguments(parse_arguments(f"{BASE} {meshes} {more}".split()), 6)


def list_trials(args: Any, devices_per_host: int = 2) -> list[list[LayerTrial]]:
    return [layouts.list_trials(vars(args), mesh, devices_per_host) for mesh in args.meshes.meshes]


def list_layouts(args: Any, devices_per_host: int = 2) -> list[str]:
    found_layouts = layouts.enumerate_layouts(
        vars(args), args.meshes, list_trials(args, devices_per_host)
    )
    return [
        f"{' + '.join(m.format_sizes() for m in layout.meshes)} of {layout.sequences}"
        for layout in found_layouts
    ]


@pytest.mark.parametrize(
    ("more", "devices_per_host", "expected"),
    [
        ("", 2, [(1, 1), (2, 1)]),
        ("", 4, [(1, 1), (2, 1), (4, 1)]),
        ("", 1, [(1, 1)]),
        ("--micro-batch-size 3", 1, [(1, 1), (1, 2), (1, 3)]),
        ("--num-query-groups 2 --micro-batch-size 2", 4, [(1, 1), (1, 2), (2, 1), (2, 2)]),
    ],
    ids=["a-host-of-two", "of-four", "of-one", "sequences", "two-groups"],
)
def test_trials_of_a_mesh_are_listed(
    more: str, devices_per_host: int, expected: list[tuple[int, int]]
) -> None:
    assert list_trials(make_arguments(more), devices_per_host)[0] == [
        LayerTrial(*trial) for trial in expected
    ]


def test_all_layouts_are_listed() -> None:
    assert list_layouts(make_arguments()) == [
        "dp2 pp2 + dp2 of 2",
        "pp4 + pp2 of 1",
        "pp4 + tp2 of 1",
        "tp2 dp2 + dp2 of 2",
        "tp2 pp2 + pp2 of 1",
        "tp2 pp2 + tp2 of 1",
    ]


def test_more_sequences_allow_different_replicas() -> None:
    layout_texts = list_layouts(make_arguments("--micro-batch-size 2"))
    assert "dp4 + dp2 of 4" in layout_texts
    assert "dp4 + tp2 of 4" not in layout_texts  # four sequences a rank
    assert not [text for text in layout_texts if text.endswith("of 3")]


def test_the_pace_decides() -> None:
    """Tensor parallelism halves a layer's time on A and does not help on B, which is slower."""
    args = make_arguments("--micro-batch-size 2")
    trials = list_trials(args)
    seconds = {(0, 1): 1.0, (0, 2): 0.5, (1, 1): 1.0, (1, 2): 1.5}
    measured = {
        (index, trial): RankCosts(
            {DENSE: PartCost(*[seconds[index, trial.tp] * trial.sequences] * 2)}
        )
        for index in (0, 1)
        for trial in trials[index]
    }
    candidates = list(layouts.enumerate_layouts(vars(args), args.meshes, trials))
    ranked = layouts.rank_layouts(vars(args), candidates, measured, (DENSE,) * 8)
    assert len(ranked) == len(candidates)
    assert [candidate.step.seconds for candidate in ranked] == sorted(
        candidate.step.seconds for candidate in ranked
    )
    assert all(mesh.tp == 1 for mesh in ranked[0].meshes.meshes[1:])
    lines = list(layouts.explain_layout(ranked[: layouts.MAX_REPORTED_LAYOUTS], len(ranked)))
    assert lines[0].startswith(f"of {len(ranked)} layouts: A ")
    assert (
        len([line for line in lines if line.startswith("next: ")])
        == layouts.MAX_REPORTED_LAYOUTS - 1
    )


def test_fewer_replicas_hold_more_of_the_optimizer() -> None:
    args = make_arguments("--use-distributed-optimizer --bf16", TWO.replace("ranks=2", "ranks=2"))
    trials = list_trials(args)
    cost = RankCosts({DENSE: PartCost(1.0, 1.0, step_seconds=1.0, static_bytes=12.0)})
    measured = {(index, trial): cost for index in (0, 1) for trial in trials[index]}
    candidates = list(layouts.enumerate_layouts(vars(args), args.meshes, trials))
    for chosen in layouts.rank_layouts(vars(args), candidates, measured, (DENSE,) * 8):
        first_mesh = chosen.meshes.meshes[0]
        static_bytes = chosen.problem.costs[0].layers[DENSE].static_bytes
        assert static_bytes == pytest.approx(
            12 * (6 + 12 / first_mesh.dp) / (6 + 12 / (first_mesh.dp * first_mesh.pp))
        )


@pytest.mark.parametrize(
    ("more", "meshes", "message"),
    [
        ("", "--hetero-process-meshes ranks=4 tp=2", "either ranks for all meshes or sizes"),
        ("", "--hetero-process-meshes ranks=4,tp=2 ranks=2", "ranks cannot be combined with sizes"),
        (
            "",
            "--hetero-process-meshes ranks=4 ranks=3",
            "have 4 \\+ 3 = 7 ranks, but the job has 6",
        ),
        (
            "--num-experts 4 --moe-router-pre-softmax",
            TWO,
            "cannot be chosen automatically with num_moe",
        ),
        ("", "--hetero-process-meshes ranks=0 ranks=6", "at least 1, found '0'"),
        ("--hetero-pipeline-layer-split 4 4", TWO, "requires a known number of stages"),
        ("--standalone-embedding-stage", TWO, "stage: requires a known number of stages"),
    ],
    ids=["some", "both", "count", "experts", "none", "split", "embedding"],
)
def test_sizes_that_must_be_set(more: str, meshes: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_arguments(more, meshes)


def test_model_parts_before_sizes_are_set() -> None:
    assert (
        make_arguments().meshes.describe_stages(range(3, 5))
        == "mesh 0 (A 4 ranks) and mesh 1 (B 2 ranks)"
    )


def test_open_sizes_need_a_batch() -> None:
    argv = BASE.replace("--global-batch-size 16", "").split()
    with pytest.raises(ConfigError, match="is required if the sizes of meshes are chosen"):
        derive_arguments(parse_arguments([*argv, *TWO.split()]), 6)
