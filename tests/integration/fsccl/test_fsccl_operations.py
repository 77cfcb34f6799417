"""Tests of every collective against a float64 reference, on real processes and several node
layouts.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytestmark = [pytest.mark.integration, pytest.mark.torch]

LAYOUTS = ["4", "2,2", "3,2", "1,2,2", "3,1", "1,1,1,1"]
PIPELINED_LAYOUTS = ["4", "1,2,2"]  # layouts for the three operations with pipelined schedules
OPERATIONS = [
    "all_reduce",
    "reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "gather",
    "scatter",
    "all_to_all",
]
FLOATS = ["float32", "float64", "bfloat16", "float16"]
INTEGERS = ["uint8", "int8", "int16", "int32", "int64"]
WIDE_UNSIGNED = ["uint16", "uint32", "uint64"]  # types for which torch has few operations
ARITHMETIC = ["sum", "avg", "min", "max", "product", "premul"]
BITWISE = ["band", "bor", "bxor"]
OPERATIONS_ON_WHOLE_TENSORS = ("all_reduce", "reduce", "broadcast", "gather")
REDUCING_OPERATIONS = ("all_reduce", "reduce", "reduce_scatter")


def layout_ranks(layout: str) -> range:
    return range(sum(int(n) for n in layout.split(",")))


@pytest.fixture(
    scope="module",
    params=[(s, False) for s in LAYOUTS] + [(s, True) for s in PIPELINED_LAYOUTS],
    ids=lambda p: p[0].replace(",", "+") + ("-pipelined" if p[1] else ""),
)
def job(request: pytest.FixtureRequest, ranks: Any) -> Any:
    layout, pipelined = request.param
    # Small chunks and sends, so that medium sizes take many steps.
    variables = {"FSCCL_CLUSTERS": layout, "FSCCL_CHUNK_BYTES": "262144"}
    if pipelined:
        variables |= {"FSCCL_PIPELINE_K": "3", "FSCCL_PIPELINE_NELEM": "1000"}
        variables |= {"FSCCL_ONE_SHOT_BYTES": "0"}
    ranks.join(len(layout_ranks(layout)), **variables)
    yield ranks, layout_ranks(layout)
    ranks.leave(layout_ranks(layout))


def make_case(
    op: str, dtype: str, count: int, red: str = "sum", **overrides: Any
) -> dict[str, Any]:
    base = {"op": op, "dtype": dtype, "count": count, "red": red, "root": 1, "seed": count}
    return {**base, "strided": False, **overrides}


def test_every_type_and_reduction(job: Any) -> None:
    pool, ranks = job
    combinations = [
        *itertools.product(FLOATS, ARITHMETIC),
        *itertools.product(INTEGERS, [*ARITHMETIC[:5], *BITWISE]),
        *itertools.product(WIDE_UNSIGNED, ["sum", "min", "max"]),
        *itertools.product(["bool"], ["sum", "min", "max", "product", *BITWISE]),
        *itertools.product(["complex64", "complex128"], ["sum", "avg"]),
    ]
    cases = [
        make_case(op, dtype, 1031, red) for op in REDUCING_OPERATIONS for dtype, red in combinations
    ]
    pool.call(ranks, "check_operations", cases=cases)


def test_reductions_are_correct_in_every_stage(job: Any) -> None:
    """The size is large enough for all stages of a reduction across nodes. Each of these reductions
    has a step (such as the division of avg) that only one stage runs.
    """
    pool, ranks = job
    kinds = [("bfloat16", "avg"), ("int32", "avg"), ("float32", "premul"), ("float16", "max")]
    cases = [make_case("all_reduce", dtype, 200_003, red) for dtype, red in kinds]
    pool.call(ranks, "check_operations", cases=cases)


@pytest.mark.parametrize("op", OPERATIONS)
def test_every_operation_and_size(job: Any, op: str) -> None:
    """Sizes range from zero to several megabytes."""
    pool, ranks = job
    # With five ranks or a part per rank, larger sizes would mostly measure the setup of inputs.
    largest = 1_300_000 if len(ranks) < 5 and op in OPERATIONS_ON_WHOLE_TENSORS else 150_001
    sizes = [0, 1, 2, 3, 17, 2047, 8193, largest]
    cases = [make_case(op, "float32", n, root=n % 3) for n in sizes]
    pool.call(ranks, "check_operations", cases=cases)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "uint16", "complex64", "bool"])
def test_types_without_reductions(job: Any, dtype: str) -> None:
    pool, ranks = job
    copying_operations = [op for op in OPERATIONS if op not in REDUCING_OPERATIONS]
    if dtype == "float8_e4m3fn":
        dtype = "uint8"  # float8 tensors cannot be compared, and only their bytes are moved
    pool.call(
        ranks, "check_operations", cases=[make_case(op, dtype, 1000) for op in copying_operations]
    )


def test_strided_tensors(job: Any) -> None:
    pool, ranks = job
    pool.call(
        ranks,
        "check_operations",
        cases=[make_case(op, "float32", 5003, strided=True) for op in OPERATIONS],
    )


def test_random_operations(job: Any) -> None:
    """All ranks run the same random sequence of operations."""
    pool, ranks = job

    @settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(
        st.lists(
            st.builds(
                make_case,
                st.sampled_from(OPERATIONS),
                st.sampled_from(FLOATS + INTEGERS),
                st.one_of(st.integers(0, 40), st.integers(0, 70_000)),
                st.sampled_from(ARITHMETIC[:5]),
                root=st.integers(0, 4),
                seed=st.integers(0, 1000),
                strided=st.booleans(),
            ),
            min_size=1,
            max_size=6,
        )
    )
    def run_cases(cases: list[dict[str, Any]]) -> None:
        pool.call(ranks, "check_operations", cases=cases)

    run_cases()
