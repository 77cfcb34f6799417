"""Micro-batches by speed: as good as trying every way, and fast where there are many replicas."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flagscale.config.arguments.measured_shares import MeasuredShares, conditions
from flagscale.config.arguments.parser import parse_arguments
from flagscale.config.arguments.pipeline import Pipeline
from flagscale.config.arguments.resolve import resolve
from flagscale.config.arguments.share_out import pass_times, share_out, slowest

replicas = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 4)), min_size=1, max_size=4)
pipelines = st.builds(Pipeline, st.integers(1, 3), st.integers(1, 3)).filter(
    lambda pipeline: pipeline.stages > 1 or pipeline.chunks == 1
)


def every_way(sizes: list[int], batch: int, pipeline: Pipeline) -> list[tuple[int, ...]]:
    """All counts that make up a batch."""
    ranges = [range(pipeline.round, batch // size + 1, pipeline.round) for size in sizes]
    ways = itertools.product(*ranges)
    return [way for way in ways if sum(s * n for s, n in zip(sizes, way, strict=True)) == batch]


@settings(max_examples=150, deadline=None)
@given(replicas, st.integers(1, 14), pipelines)
def test_no_other_way_is_faster(
    each: list[tuple[int, int]], batch: int, pipeline: Pipeline
) -> None:
    times, sizes = [time for time, _ in each], [size for _, size in each]
    ways = every_way(sizes, batch, pipeline)
    if not ways:
        with pytest.raises(ValueError, match=f"{batch} sequences cannot be made up of"):
            share_out(times, sizes, batch, pipeline)
        return
    found = share_out(times, sizes, batch, pipeline)
    assert found in ways
    assert slowest(times, found, pipeline) == min(slowest(times, w, pipeline) for w in ways)


TABLE = {
    "alike": ([5, 5], [1, 1], 8, (4, 4)),
    "twice-as-fast": ([1, 2], [1, 1], 9, (6, 3)),
    "at-least-one": ([1, 100], [1, 1], 4, (3, 1)),
    "larger-micro-batches": ([3, 2], [2, 1], 8, (2, 4)),
    "no-even-batch": ([1, 1, 1], [1, 1, 1], 8, (3, 3, 2)),
    "few-small-ones": ([1, 1], [2, 1], 8, (3, 2)),
    "one-replica": ([7], [2], 8, (4,)),
}


@pytest.mark.parametrize(("times", "sizes", "batch", "counts"), TABLE.values(), ids=TABLE)
def test_known_shares(
    times: list[int], sizes: list[int], batch: int, counts: tuple[int, ...]
) -> None:
    assert share_out(times, sizes, batch) == counts


def test_a_pipeline_takes_longer_than_its_micro_batches() -> None:
    """Of 12 micro-batches the slow replica would take 4 if filling its pipeline cost nothing."""
    assert share_out([1, 2], [1, 1], 12) == (8, 4)
    assert share_out([1, 2], [1, 1], 12, Pipeline(stages=4)) == (9, 3)
    assert share_out([1, 2], [1, 1], 12, Pipeline(stages=4, chunks=2)) == (8, 4)


def test_thousands_of_replicas_of_three_sizes() -> None:
    times = [10 + replica % 97 for replica in range(2048)]
    sizes = [1 + replica % 3 for replica in range(2048)]
    counts = share_out(times, sizes, 32_768)
    assert sum(size * count for size, count in zip(sizes, counts, strict=True)) == 32_768


def test_a_pass_takes_what_it_does_in_most_steps() -> None:
    laps = [[60, 900], [66, 120], [600, 130]]
    assert pass_times(laps, [6, 2]) == (11, 65)
    assert pass_times(laps, [4, 2], Pipeline(stages=2, chunks=2)) == (66 // 9, 130 // 5)
    assert pass_times([[0]], [1]) == (1,)


FOUND = MeasuredShares(
    (6, 6, 2),
    (12_140_000, 11_960_000, 36_000_000),
    {"devices": ["A800", "A800", "BI"], "sequence length": 4096},
)


def test_what_was_measured_is_said_and_kept() -> None:
    assert FOUND.text() == (
        "2 replicas (A800) take 6 of 12.0-12.1 ms each, 1 replica (BI) takes 2 of 36.0 ms; "
        "hetero_num_microbatches: [2, 6, 1, 2] says the same"
    )
    assert MeasuredShares.from_state(json.loads(json.dumps(FOUND.state_dict()))) == FOUND


def test_very_unlike_replicas_are_said_in_a_line() -> None:
    many = MeasuredShares(tuple(range(1, 101)), (10**6,) * 100, {"devices": ["A"] * 100})
    told = many.text().partition(";")[0]
    assert told.endswith("1 replica (A) takes 7 of 1.0 ms, …, 1 replica (A) takes 100 of 1.0 ms")


MODEL = """--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --lr 1e-3
--train-iters 6 --mock-data --global-batch-size 8 --enable-hetero --hetero-mode dp
--hetero-micro-batch-sizes 1 2 1 1 --hetero-num-microbatches auto"""


@pytest.mark.parametrize(
    ("more", "world", "products", "other"),
    [
        ("", 2, ["H100", "H100"], ""),
        ("--lr 1e-2", 2, ["H100", "H100"], ""),
        ("", 2, ["H100", "H200"], "devices, products"),
        ("--hetero-device-types A B", 2, ["H100", "H100"], "devices"),
        ("--hetero-micro-batch-sizes 3 1", 3, ["H100"] * 3, "devices, products, micro-batch sizes"),
        ("--global-batch-size 9", 2, ["H100", "H100"], "global batch size"),
        ("--pipeline-model-parallel-size 2", 4, ["H100", "H100"], "parallel sizes"),
    ],
    ids=["same", "learning-rate", "product", "type", "replicas", "batch", "pipelines"],
)
def test_what_was_measured_holds_for_replicas_like_these(
    more: str, world: int, products: list[str], other: str
) -> None:
    def held(argv: str, ranks: int, names: list[str]) -> dict[str, Any]:
        return conditions(vars(resolve(parse_arguments(argv.split()), ranks)), names)

    found = MeasuredShares((6, 1), (1, 1), held(MODEL, 2, ["H100", "H100"]))
    assert found.other(held(f"{MODEL} {more}", world, products)) == other
