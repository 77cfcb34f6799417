"""Micro-batch split by speed: optimal compared with brute force, and fast for many replicas."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flagscale.config.arguments.derive import derive_arguments
from flagscale.config.arguments.hetero.microbatch_split import (
    MeasuredSplit,
    measured_conditions,
    pass_times,
    slowest_time,
    split_microbatches,
)
from flagscale.config.arguments.rules.parallel_layout import Pipeline
from flagscale.config.arguments.spec.command_line import parse_arguments

replicas = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 4)), min_size=1, max_size=4)
pipelines = st.builds(Pipeline, st.integers(1, 3), st.integers(1, 3)).filter(
    lambda pipeline: pipeline.stages > 1 or pipeline.chunks == 1
)


def enumerate_splits(sizes: list[int], batch: int, pipeline: Pipeline) -> list[tuple[int, ...]]:
    """Return all micro-batch counts per replica that add up to the batch."""
    ranges = [range(pipeline.round_size, batch // size + 1, pipeline.round_size) for size in sizes]
    splits = itertools.product(*ranges)
    return [
        counts
        for counts in splits
        if sum(s * n for s, n in zip(sizes, counts, strict=True)) == batch
    ]


@settings(max_examples=150, deadline=None)
@given(replicas, st.integers(1, 14), pipelines)
def test_no_other_split_is_faster(
    replicas_drawn: list[tuple[int, int]], batch: int, pipeline: Pipeline
) -> None:
    times, sizes = [time for time, _ in replicas_drawn], [size for _, size in replicas_drawn]
    splits = enumerate_splits(sizes, batch, pipeline)
    if not splits:
        with pytest.raises(ValueError, match=f"{batch} sequences cannot be divided into"):
            split_microbatches(times, sizes, batch, pipeline)
        return
    counts = split_microbatches(times, sizes, batch, pipeline)
    assert counts in splits
    assert slowest_time(times, counts, pipeline) == min(
        slowest_time(times, split, pipeline) for split in splits
    )


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
def test_known_splits(
    times: list[int], sizes: list[int], batch: int, counts: tuple[int, ...]
) -> None:
    assert split_microbatches(times, sizes, batch) == counts


def test_pipeline_fill_time_is_counted() -> None:
    """Without the time to fill its pipeline, the slow replica would get 4 of 12 micro-batches."""
    assert split_microbatches([1, 2], [1, 1], 12) == (8, 4)
    assert split_microbatches([1, 2], [1, 1], 12, Pipeline(stages=4)) == (9, 3)
    assert split_microbatches([1, 2], [1, 1], 12, Pipeline(stages=4, chunks=2)) == (8, 4)


def test_split_over_thousands_of_replicas() -> None:
    times = [10 + replica % 97 for replica in range(2048)]
    sizes = [1 + replica % 3 for replica in range(2048)]
    counts = split_microbatches(times, sizes, 32_768)
    assert sum(size * count for size, count in zip(sizes, counts, strict=True)) == 32_768


def test_pass_time_is_median_over_steps() -> None:
    laps = [[60, 900], [66, 120], [600, 130]]
    assert pass_times(laps, [6, 2]) == (11, 65)
    assert pass_times(laps, [4, 2], Pipeline(stages=2, chunks=2)) == (66 // 9, 130 // 5)
    assert pass_times([[0]], [1]) == (1,)


MEASURED = MeasuredSplit(
    (6, 6, 2),
    (12_140_000, 11_960_000, 36_000_000),
    {"devices": ["A800", "A800", "BI"], "sequence length": 4096},
)


def test_measured_split_is_described_and_serialized() -> None:
    assert MEASURED.format() == (
        "2 replicas (A800): 6 micro-batches of 12.0-12.1 ms each, "
        "1 replica (BI): 2 micro-batches of 36.0 ms each; "
        "equivalent to hetero_num_microbatches: [2, 6, 1, 2]"
    )
    assert MeasuredSplit.from_state(json.loads(json.dumps(MEASURED.state_dict()))) == MEASURED


def test_long_measured_split_is_abbreviated() -> None:
    measured = MeasuredSplit(tuple(range(1, 101)), (10**6,) * 100, {"devices": ["A"] * 100})
    summary = measured.format().partition(";")[0]
    assert summary.endswith(
        "1 replica (A): 7 micro-batches of 1.0 ms each, …, "
        "1 replica (A): 100 micro-batches of 1.0 ms each"
    )


MODEL = """--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --lr 1e-3
--train-iters 6 --mock-data --global-batch-size 8 --enable-hetero --hetero-mode dp
--hetero-micro-batch-sizes 1 2 1 1 --hetero-num-microbatches auto"""


@pytest.mark.parametrize(
    ("options", "world", "products", "differences"),
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
def test_measured_split_is_reused_under_same_conditions_only(
    options: str, world: int, products: list[str], differences: str
) -> None:
    def conditions(argv: str, ranks: int, names: list[str]) -> dict[str, Any]:
        return measured_conditions(
            vars(derive_arguments(parse_arguments(argv.split()), ranks)), names
        )

    measured = MeasuredSplit((6, 1), (1, 1), conditions(MODEL, 2, ["H100", "H100"]))
    assert (
        measured.differing_conditions(conditions(f"{MODEL} {options}", world, products))
        == differences
    )
