"""Tests of the search for parallel sizes of meshes that only set their number of ranks."""

from __future__ import annotations

from typing import Any

import pytest

from flagscale.config.arguments.derive import derive_arguments
from flagscale.config.arguments.spec.parser import parse_arguments
from flagscale.errors import ConfigError
from flagscale.estimate import layouts
from flagscale.estimate.costs import DENSE, PartCost, RankCosts
from flagscale.estimate.layouts import LayerTrial

BASE = """
--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --train-iters 1 --lr 1e-3
--mock-data --enable-hetero --global-batch-size 16
"""
TWO = "--hetero-process-meshes device_type=A,ranks=4 device_type=B,ranks=2"


def asked(more: str = "", meshes: str = TWO) -> Any:
    return derive_arguments(parse_arguments(f"{BASE} {meshes} {more}".split()), 6)


def tried(args: Any, on_a_host: int = 2) -> list[list[LayerTrial]]:
    return [layouts.list_trials(vars(args), mesh, on_a_host) for mesh in args.meshes.meshes]


def every(args: Any, on_a_host: int = 2) -> list[str]:
    found = layouts.enumerate_layouts(vars(args), args.meshes, tried(args, on_a_host))
    return [f"{' + '.join(m.text() for m in one.meshes)} of {one.sequences}" for one in found]


@pytest.mark.parametrize(
    ("more", "on_a_host", "expected"),
    [
        ("", 2, [(1, 1), (2, 1)]),
        ("", 4, [(1, 1), (2, 1), (4, 1)]),
        ("", 1, [(1, 1)]),
        ("--micro-batch-size 3", 1, [(1, 1), (1, 2), (1, 3)]),
        ("--num-query-groups 2 --micro-batch-size 2", 4, [(1, 1), (1, 2), (2, 1), (2, 2)]),
    ],
    ids=["a-host-of-two", "of-four", "of-one", "sequences", "two-groups"],
)
def test_trials(more: str, on_a_host: int, expected: list[tuple[int, int]]) -> None:
    assert tried(asked(more), on_a_host)[0] == [LayerTrial(*one) for one in expected]


def test_all_layouts() -> None:
    assert every(asked()) == [
        "dp2 pp2 + dp2 of 2",
        "pp4 + pp2 of 1",
        "pp4 + tp2 of 1",
        "tp2 dp2 + dp2 of 2",
        "tp2 pp2 + pp2 of 1",
        "tp2 pp2 + tp2 of 1",
    ]


def test_more_sequences_allow_different_replicas() -> None:
    found = every(asked("--micro-batch-size 2"))
    assert "dp4 + dp2 of 4" in found
    assert "dp4 + tp2 of 4" not in found  # four sequences a rank
    assert not [one for one in found if one.endswith("of 3")]


def test_the_pace_decides() -> None:
    """Tensor parallelism halves a layer's time on A and does not help on B, which is slower."""
    args = asked("--micro-batch-size 2")
    own = tried(args)
    seconds = {(0, 1): 1.0, (0, 2): 0.5, (1, 1): 1.0, (1, 2): 1.5}
    measured = {
        (index, trial): RankCosts(
            {DENSE: PartCost(*[seconds[index, trial.tp] * trial.sequences] * 2)}
        )
        for index in (0, 1)
        for trial in own[index]
    }
    candidates = list(layouts.enumerate_layouts(vars(args), args.meshes, own))
    found = layouts.rank_layouts(vars(args), candidates, measured, (DENSE,) * 8)
    assert len(found) == len(candidates)
    assert [one.step.seconds for one in found] == sorted(one.step.seconds for one in found)
    assert all(mesh.tp == 1 for mesh in found[0].meshes.meshes[1:])
    lines = list(layouts.explain_layout(found[: layouts.MAX_REPORTED], len(found)))
    assert lines[0].startswith(f"of {len(found)} layouts: A ")
    assert len([line for line in lines if line.startswith("next: ")]) == layouts.MAX_REPORTED - 1


def test_fewer_replicas_hold_more_of_the_optimizer() -> None:
    args = asked("--use-distributed-optimizer --bf16", TWO.replace("ranks=2", "ranks=2"))
    own = tried(args)
    cost = RankCosts({DENSE: PartCost(1.0, 1.0, step_seconds=1.0, static_bytes=12.0)})
    measured = {(index, trial): cost for index in (0, 1) for trial in own[index]}
    candidates = list(layouts.enumerate_layouts(vars(args), args.meshes, own))
    for chosen in layouts.rank_layouts(vars(args), candidates, measured, (DENSE,) * 8):
        first = chosen.meshes.meshes[0]
        held = chosen.problem.costs[0].layers[DENSE].static_bytes
        assert held == pytest.approx(12 * (6 + 12 / first.dp) / (6 + 12 / (first.dp * first.pp)))


@pytest.mark.parametrize(
    ("more", "meshes", "message"),
    [
        ("", "--hetero-process-meshes ranks=4 tp=2", "some meshes say ranks, some their sizes"),
        ("", "--hetero-process-meshes ranks=4,tp=2 ranks=2", "ranks leaves sizes and layers to be"),
        (
            "",
            "--hetero-process-meshes ranks=4 ranks=3",
            "take 4 \\+ 3 = 7 ranks, and the job has 6",
        ),
        ("--num-experts 4 --moe-router-pre-softmax", TWO, "of a mixture of experts, say the sizes"),
        ("", "--hetero-process-meshes ranks=0 ranks=6", "at least 1, found '0'"),
        ("--hetero-pipeline-layer-split 4 4", TWO, "how many stages there are is to be chosen"),
        ("--standalone-embedding-stage", TWO, "is for stages that are known"),
    ],
    ids=["some", "both", "count", "experts", "none", "split", "embedding"],
)
def test_sizes_that_must_be_set(more: str, meshes: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        asked(more, meshes)


def test_model_parts_before_sizes_are_set() -> None:
    assert asked().meshes.place_of(range(3, 5)) == "mesh 0 (A 4 ranks) and mesh 1 (B 2 ranks)"


def test_open_sizes_need_a_batch() -> None:
    words = BASE.replace("--global-batch-size 16", "").split()
    with pytest.raises(ConfigError, match="is needed where the meshes' sizes are to be chosen"):
        derive_arguments(parse_arguments([*words, *TWO.split()]), 6)
