from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flagscale.config.arguments.hetero.meshes import Mesh, Meshes
from flagscale.estimate import split
from flagscale.estimate.costs import DENSE, MIXTURE, PartCost, RankCosts, max_costs
from flagscale.estimate.split import SplitProblem, explain_split, find_best_split


def equal_costs(layer: float, **more: Any) -> RankCosts:
    return RankCosts(
        {DENSE: PartCost(layer, 2 * layer, static_bytes=1.0, activation_bytes=1.0)}, **more
    )


def make_problem(
    *each: RankCosts, layers: int = 8, micro_batches: int = 8, **more: Any
) -> SplitProblem:
    chunks = more.pop("chunks", 1)
    meshes = Meshes(tuple(Mesh() for _ in each), sequences=1, chunks=chunks)
    return SplitProblem(meshes, each, (DENSE,) * layers, micro_batches, **more)


def all_splits(layers: int, stages: int) -> list[tuple[int, ...]]:
    splits = itertools.product(range(1, layers + 1), repeat=stages)
    return [counts for counts in splits if sum(counts) == layers]


@given(
    speeds=st.lists(st.floats(0.2, 5), min_size=2, max_size=4),
    layers=st.integers(4, 9),
    micro_batches=st.integers(1, 12),
    head=st.floats(0, 4),
)
@settings(max_examples=40, deadline=None)
def test_exhaustive_search(
    speeds: list[float], layers: int, micro_batches: int, head: float
) -> None:
    rank_costs = [equal_costs(speed, head=PartCost(head, head)) for speed in speeds]
    split_problem = make_problem(*rank_costs, layers=layers, micro_batches=micro_batches)
    best_seconds = split_problem.simulate_step(find_best_split(split_problem)).seconds
    assert best_seconds == min(
        split_problem.simulate_step(s).seconds for s in all_splits(layers, len(speeds))
    )


@given(speeds=st.lists(st.floats(0.5, 2), min_size=4, max_size=4), head=st.floats(0, 4))
@settings(max_examples=10, deadline=None)
def test_local_search_is_close_to_the_optimum(speeds: list[float], head: float) -> None:
    split_problem = make_problem(
        *(equal_costs(speed, head=PartCost(head, head)) for speed in speeds), layers=12
    )
    best_seconds = split_problem.simulate_step(find_best_split(split_problem)).seconds
    limit, split._MAX_EXHAUSTIVE_SPLITS = split._MAX_EXHAUSTIVE_SPLITS, 0
    try:
        searched = split_problem.simulate_step(find_best_split(split_problem)).seconds
    finally:
        split._MAX_EXHAUSTIVE_SPLITS = limit
    assert best_seconds <= searched <= 1.03 * best_seconds


def test_the_slower_device_holds_fewer() -> None:
    assert find_best_split(make_problem(equal_costs(1.0), equal_costs(3.0), micro_batches=16)) == (
        6,
        2,
    )
    assert find_best_split(make_problem(equal_costs(3.0), equal_costs(1.0), micro_batches=16)) == (
        2,
        6,
    )


def test_memory_counts_before_speed() -> None:
    # A layer takes 1 byte always and 1 for each micro-batch in flight: two in the first stage, one
    # in the second.
    full = make_problem(equal_costs(1.0, memory_limit_bytes=9.0), equal_costs(2.0))
    assert find_best_split(full) == (3, 5)
    assert full.simulate_step((3, 5)).memory_bytes == (9.0, 10.0)
    assert full.simulate_step((4, 4)).excess_bytes == 3.0


def test_least_excess_is_chosen_when_nothing_fits() -> None:
    split_problem = make_problem(
        equal_costs(1.0, memory_limit_bytes=1.0), equal_costs(1.0, memory_limit_bytes=1.0)
    )
    layers = find_best_split(split_problem)
    assert split_problem.simulate_step(layers).excess_bytes == min(
        split_problem.simulate_step(s).excess_bytes for s in all_splits(8, 2)
    )
    assert "no split fits" in list(explain_split(split_problem, layers))[-1]


def test_chunks_share_out_as_many_layers_at_once() -> None:
    split_problem = make_problem(equal_costs(1.0), equal_costs(3.0), chunks=2, micro_batches=16)
    assert split_problem.even_split() == (4, 4)
    assert find_best_split(split_problem) == (6, 2)


def test_a_first_stage_for_the_embedding_alone() -> None:
    split_problem = make_problem(
        equal_costs(1.0), equal_costs(1.0), equal_costs(1.0), has_empty_first_stage=True
    )
    assert split_problem.even_split() == find_best_split(split_problem) == (0, 4, 4)


def test_order_of_layer_kinds_matters() -> None:
    """Two mixture layers in front take as long as the six dense layers behind them."""
    rank_costs = RankCosts({DENSE: PartCost(1.0, 1.0), MIXTURE: PartCost(3.0, 3.0)})
    meshes = Meshes((Mesh(pp=2),), sequences=1)
    kinds = (MIXTURE,) * 2 + (DENSE,) * 6
    assert find_best_split(SplitProblem(meshes, (rank_costs,), kinds, 16)) == (2, 6)


def test_split_is_explained_by_its_times() -> None:
    split_problem = make_problem(
        equal_costs(0.01, memory_limit_bytes=64.0 * 2**30),
        equal_costs(0.02, embedding=PartCost(0.001)),
    )
    assert list(explain_split(split_problem, (5, 3))) == [
        "layers 5+3: by measured times a step takes 1.59 s; with 4+4 2.04 s, +28%",
        "stage 0 (1 rank): a layer takes a micro-batch dense 30 ms; 5 of them keep it busy for "
        "1.20 s, idle 25%, 0.0 of 64.0 GiB",
        "stage 1 (1 rank): a layer takes a micro-batch dense 60 ms; 3 of them keep it busy for "
        "1.44 s, idle 9%",
    ]


def test_the_slowest_rank_counts() -> None:
    first_rank = RankCosts({DENSE: PartCost(1.0, 2.0)}, head=PartCost(5.0), memory_limit_bytes=8.0)
    second_rank = RankCosts(
        {DENSE: PartCost(2.0, 1.0)}, head=PartCost(4.0), memory_limit_bytes=None
    )
    maximum = max_costs([first_rank, second_rank])
    assert maximum == RankCosts(
        {DENSE: PartCost(2.0, 2.0)}, head=PartCost(5.0), memory_limit_bytes=8.0
    )


def test_costs_survive_a_file() -> None:
    rank_costs = RankCosts(
        {DENSE: PartCost(1.0, 2.0, 3.0, 4.0, 5.0)}, PartCost(0.5), PartCost(0.25), 8.0
    )
    assert RankCosts.from_json(rank_costs.to_json()) == rank_costs


@pytest.mark.parametrize("broken", [{}, {"layers": {DENSE: [1.0]}}, {"layers": 3}])
def test_invalid_costs_are_rejected(broken: dict[str, Any]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError, AttributeError)):
        RankCosts.from_json(broken)
