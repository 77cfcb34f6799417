"""Tests of the operations of the device engine (csrc/device/engine.h) on CPU ranks, compared with a
float64 reference. Clusters use gloo or fsccl's shared memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytestmark = [pytest.mark.integration, pytest.mark.torch]

OPERATIONS = [
    *("all_reduce", "reduce", "reduce_scatter", "all_gather"),
    *("broadcast", "gather", "scatter", "all_to_all"),
]
REDUCING_OPERATIONS = OPERATIONS[:3]
FLOATS = ["float32", "float64", "bfloat16", "float16"]
INTEGERS = ["uint8", "int8", "int16", "int32", "int64"]
ARITHMETIC = ["sum", "avg", "min", "max", "product", "premul"]
BITWISE = ["band", "bor", "bxor"]
# So small that the sizes in each test take all paths: the control block, one slot of a pipe, and
# many slots, which are then reused.
SMALL_LIMITS = {"FSCCL_PIPE_BYTES": "16384", "FSCCL_TINY_BYTES": "2048"}

JOBS: dict[str, tuple[str, dict[str, str]]] = {
    "gloo-2+2": ("2,2", {"FSCCL_NATIVE": "gloo"}),
    "gloo-3+2": ("3,2", {"FSCCL_NATIVE": "gloo"}),
    "gloo-1+2+2": ("1,2,2", {"FSCCL_NATIVE": "gloo"}),
    "gloo-4": ("4", {"FSCCL_NATIVE": "gloo"}),
    "gloo-2+2-without-shared-memory": ("2,2", {"FSCCL_NATIVE": "gloo", "FSCCL_SHM": "0"}),
    "fsccl-3+1": ("3,1", {"FSCCL_NATIVE": "fsccl"}),
    "fsccl-1+1+1+1": ("1,1,1,1", {"FSCCL_NATIVE": "fsccl"}),
    "fsccl-4": ("4", {"FSCCL_NATIVE": "fsccl"}),
}
RunCase = Callable[..., list[Any]]


def case(op: str, dtype: str, count: int, red: str = "sum", **overrides: Any) -> dict[str, Any]:
    base = {"op": op, "dtype": dtype, "count": count, "red": red, "root": 1, "seed": count}
    return {**base, "strided": False, **overrides}


@pytest.fixture(scope="module", params=list(JOBS))
def job(request: pytest.FixtureRequest, ranks: Any) -> Iterator[RunCase]:
    shape, variables = JOBS[request.param]
    members = range(sum(int(n) for n in shape.split(",")))
    ranks.join(len(members), FSCCL_CLUSTERS=shape, **SMALL_LIMITS, **variables)

    def call(name: str, **arguments: Any) -> list[Any]:
        results: list[Any] = ranks.call(members, name, **arguments)
        return results

    expected = "fsccl" if request.param == "fsccl-4" else "engine"
    assert set(call("get_cpu_path")) == {expected}
    yield call
    ranks.leave(members)


def test_every_type_and_reduction(job: RunCase) -> None:
    combinations = [
        *itertools.product(FLOATS, ARITHMETIC),
        *itertools.product(INTEGERS, [*ARITHMETIC[:5], *BITWISE]),
        *itertools.product(["bool"], ["sum", "min", "max", "product", *BITWISE]),
        *itertools.product(["complex64", "complex128"], ["sum", "avg"]),
    ]
    job(
        "check_operations",
        cases=[
            case(op, dtype, 2053, red)
            for i, (dtype, red) in enumerate(combinations)
            for op in (REDUCING_OPERATIONS if i % 4 == 0 else ["all_reduce"])
        ],
    )


def test_every_operation_and_size(job: RunCase) -> None:
    """Sizes range from zero, around the limits of tiny data and of slots, to many chunks."""
    sizes = [0, 1, 17, 511, 513, 4096, 4099, 50_021]
    job(
        "check_operations",
        cases=[case(op, "float32", n, root=n % 3) for op in OPERATIONS for n in sizes],
    )


def test_types_without_reductions_and_strided_tensors(job: RunCase) -> None:
    copying_operations = [op for op in OPERATIONS if op not in REDUCING_OPERATIONS]
    dtypes = ["complex64", "uint16", "bool"]
    cases = [case(op, dtype, 1000) for op in copying_operations for dtype in dtypes]
    job(
        "check_operations",
        cases=cases + [case(op, "float32", 5003, strided=True) for op in OPERATIONS],
    )


@pytest.mark.parametrize(
    "name", ["check_nan_propagation", "check_identical_rounding", "check_unsigned_types"]
)
@pytest.mark.parametrize("count", [65, 20_001], ids=["tiny", "chunks"])
def test_results_are_bitwise_as_specified(job: RunCase, name: str, count: int) -> None:
    job(name, count=count)


def test_many_works_in_flight(job: RunCase) -> None:
    job("check_many_in_flight", count=30_011)


def test_random_operations(job: RunCase) -> None:
    """All ranks run the same random sequence of operations."""

    @settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(
        st.lists(
            st.builds(
                case,
                st.sampled_from(OPERATIONS),
                st.sampled_from(FLOATS + INTEGERS),
                st.one_of(st.integers(0, 40), st.integers(0, 30_000)),
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
        job("check_operations", cases=cases)

    run_cases()
