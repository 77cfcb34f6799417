from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flagscale.config.arguments.meshes import Mesh, Meshes
from flagscale.estimate import split
from flagscale.estimate.costs import DENSE, MIXTURE, Cost, Costs, slowest
from flagscale.estimate.split import Problem, best, reasons


def costs(layer: float, **more: Any) -> Costs:
    return Costs({DENSE: Cost(layer, 2 * layer, held=1.0, kept=1.0)}, **more)


def problem(*each: Costs, layers: int = 8, micro_batches: int = 8, **more: Any) -> Problem:
    chunks = more.pop("chunks", 1)
    meshes = Meshes(tuple(Mesh() for _ in each), sequences=1, chunks=chunks)
    return Problem(meshes, each, (DENSE,) * layers, micro_batches, **more)


def every_split(layers: int, stages: int) -> list[tuple[int, ...]]:
    found = itertools.product(range(1, layers + 1), repeat=stages)
    return [counts for counts in found if sum(counts) == layers]


@given(
    speeds=st.lists(st.floats(0.2, 5), min_size=2, max_size=4),
    layers=st.integers(4, 9),
    micro_batches=st.integers(1, 12),
    head=st.floats(0, 4),
)
@settings(max_examples=40, deadline=None)
def test_the_best_of_all(speeds: list[float], layers: int, micro_batches: int, head: float) -> None:
    each = [costs(speed, head=Cost(head, head)) for speed in speeds]
    asked = problem(*each, layers=layers, micro_batches=micro_batches)
    found = asked.step(best(asked)).seconds
    assert found == min(asked.step(s).seconds for s in every_split(layers, len(speeds)))


@given(speeds=st.lists(st.floats(0.5, 2), min_size=4, max_size=4), head=st.floats(0, 4))
@settings(max_examples=10, deadline=None)
def test_a_search_comes_close_to_the_best_of_all(speeds: list[float], head: float) -> None:
    asked = problem(*(costs(speed, head=Cost(head, head)) for speed in speeds), layers=12)
    found = asked.step(best(asked)).seconds
    limit, split._EXHAUSTIVE = split._EXHAUSTIVE, 0
    try:
        searched = asked.step(best(asked)).seconds
    finally:
        split._EXHAUSTIVE = limit
    assert found <= searched <= 1.03 * found


def test_the_slower_device_holds_fewer() -> None:
    assert best(problem(costs(1.0), costs(3.0), micro_batches=16)) == (6, 2)
    assert best(problem(costs(3.0), costs(1.0), micro_batches=16)) == (2, 6)


def test_memory_counts_before_speed() -> None:
    # A stage holds of each layer 1 byte always and 1 for every micro-batch under way: the first
    # two, the second one.
    full = problem(costs(1.0, memory=9.0), costs(2.0))
    assert best(full) == (3, 5)
    assert full.step((3, 5)).memory == (9.0, 10.0)
    assert full.step((4, 4)).over == 3.0


def test_nothing_fits() -> None:
    asked = problem(costs(1.0, memory=1.0), costs(1.0, memory=1.0))
    layers = best(asked)
    assert asked.step(layers).over == min(asked.step(s).over for s in every_split(8, 2))
    assert "no split fits" in list(reasons(asked, layers))[-1]


def test_chunks_share_out_as_many_layers_at_once() -> None:
    asked = problem(costs(1.0), costs(3.0), chunks=2, micro_batches=16)
    assert asked.even() == (4, 4)
    assert best(asked) == (6, 2)


def test_a_first_stage_for_the_embedding_alone() -> None:
    asked = problem(costs(1.0), costs(1.0), costs(1.0), empty_first=True)
    assert asked.even() == best(asked) == (0, 4, 4)


def test_unlike_layers_are_where_they_are() -> None:
    """Two mixtures in front take as long as the six dense ones behind."""
    each = Costs({DENSE: Cost(1.0, 1.0), MIXTURE: Cost(3.0, 3.0)})
    meshes = Meshes((Mesh(pp=2),), sequences=1)
    kinds = (MIXTURE,) * 2 + (DENSE,) * 6
    assert best(Problem(meshes, (each,), kinds, 16)) == (2, 6)


def test_reasons() -> None:
    asked = problem(costs(0.01, memory=64.0 * 2**30), costs(0.02, embedding=Cost(0.001)))
    assert list(reasons(asked, (5, 3))) == [
        "layers 5+3: by measured times a step takes 1.59 s; with 4+4 2.04 s, +28%",
        "stage 0 (1 rank): a layer takes a micro-batch dense 30 ms; 5 of them keep it busy for "
        "1.20 s, idle 25%, 0.0 of 64.0 GiB",
        "stage 1 (1 rank): a layer takes a micro-batch dense 60 ms; 3 of them keep it busy for "
        "1.44 s, idle 9%",
    ]


def test_the_slowest_rank_counts() -> None:
    one = Costs({DENSE: Cost(1.0, 2.0)}, head=Cost(5.0), memory=8.0)
    other = Costs({DENSE: Cost(2.0, 1.0)}, head=Cost(4.0), memory=None)
    both = slowest([one, other])
    assert both == Costs({DENSE: Cost(2.0, 2.0)}, head=Cost(5.0), memory=8.0)


def test_costs_survive_a_file() -> None:
    one = Costs({DENSE: Cost(1.0, 2.0, 3.0, 4.0, 5.0)}, Cost(0.5), Cost(0.25), 8.0)
    assert Costs.from_json(one.as_json()) == one


@pytest.mark.parametrize("broken", [{}, {"layers": {DENSE: [1.0]}}, {"layers": 3}])
def test_what_are_no_costs(broken: dict[str, Any]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError, AttributeError)):
        Costs.from_json(broken)
