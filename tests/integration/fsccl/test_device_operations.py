"""Operations of the device engine on ranks of the host, compared with a float64 reference.

Clusters use gloo or fsccl's shared memory, and the devices' memory is that of the host.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytestmark = [pytest.mark.integration, pytest.mark.torch]

OPS = [
    *("all_reduce", "reduce", "reduce_scatter", "all_gather"),
    *("broadcast", "gather", "scatter", "all_to_all"),
]
REDUCING = OPS[:3]
FLOATS = ["float32", "float64", "bfloat16", "float16"]
INTEGERS = ["uint8", "int8", "int16", "int32", "int64"]
ARITHMETIC = ["sum", "avg", "min", "max", "product", "premul"]
BITWISE = ["band", "bor", "bxor"]
# Small, so that the sizes of every test take tiny, single and many steps, and reuse every slot.
SMALL = {"FSCCL_PIPE_BYTES": "16384", "FSCCL_TINY_BYTES": "2048"}

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
Check = Callable[..., list[Any]]


def case(op: str, dtype: str, count: int, red: str = "sum", **more: Any) -> dict[str, Any]:
    base = {"op": op, "dtype": dtype, "count": count, "red": red, "root": 1, "seed": count}
    return {**base, "strided": False, **more}


@pytest.fixture(scope="module", params=list(JOBS))
def job(request: pytest.FixtureRequest, ranks: Any) -> Iterator[Check]:
    shape, variables = JOBS[request.param]
    members = range(sum(int(n) for n in shape.split(",")))
    ranks.join(len(members), FSCCL_CLUSTERS=shape, **SMALL, **variables)

    def call(name: str, **arguments: Any) -> list[Any]:
        results: list[Any] = ranks.call(members, name, **arguments)
        return results

    expected = "fsccl" if request.param == "fsccl-4" else "engine"
    assert set(call("get_path")) == {expected}
    yield call
    ranks.leave(members)


def test_every_type_and_reduction(job: Check) -> None:
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
            for op in (REDUCING if i % 4 == 0 else ["all_reduce"])
        ],
    )


def test_every_operation_and_size(job: Check) -> None:
    """Sizes from zero, over the limits of tiny parts and slots, to many chunks."""
    sizes = [0, 1, 17, 511, 513, 4096, 4099, 50_021]
    job("check_operations", cases=[case(op, "float32", n, root=n % 3) for op in OPS for n in sizes])


def test_moving_types_and_strides(job: Check) -> None:
    moving = [op for op in OPS if op not in REDUCING]
    kinds = ["complex64", "uint16", "bool"]
    cases = [case(op, kind, 1000) for op in moving for kind in kinds]
    job("check_operations", cases=cases + [case(op, "float32", 5003, strided=True) for op in OPS])


@pytest.mark.parametrize(
    "name", ["check_nan_propagation", "check_identical_rounding", "check_unsigned_types"]
)
@pytest.mark.parametrize("count", [65, 20_001], ids=["tiny", "chunks"])
def test_bits(job: Check, name: str, count: int) -> None:
    job(name, count=count)


def test_works_and_futures(job: Check) -> None:
    job("check_many_in_flight", count=30_011)


def test_random_operations(job: Check) -> None:
    """Random operations in a row; all ranks get the same example."""

    @settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(
        st.lists(
            st.builds(
                case,
                st.sampled_from(OPS),
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
