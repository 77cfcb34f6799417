"""Tests of fsccl's settings: invalid values and values that differ between ranks."""

from __future__ import annotations

import re
from typing import Any

import pytest
from support.fsccl_ranks import MAX_DELAY_SECONDS, wait_for_errors

pytestmark = [pytest.mark.integration, pytest.mark.torch]


@pytest.fixture
def pool(ranks: Any) -> Any:
    ranks.prepare(4)
    return ranks


@pytest.mark.parametrize(
    ("name", "values"),
    [("FSCCL_CHUNK_BYTES", ["65536", "131072"]), ("FSCCL_ALGO", ["auto", "ring"])],
)
def test_settings_that_differ_between_ranks_are_rejected(
    pool: Any, name: str, values: list[str]
) -> None:
    for i in range(2):
        variables = {name: values[i]}
        pool[i].start_case(
            "join",
            rank=i,
            size=2,
            port=pool.port,
            key=f"different {name}",
            timeout=30,
            environment=variables,
        )
    pool.wait_for_results([0, 1])
    for i in range(2):
        pool[i].start_case("run_operation", op="barrier")
    for error in wait_for_errors(pool, [0, 1], MAX_DELAY_SECONDS).values():
        assert f"{name}={values[0]} " in error
        assert f"{name}={values[1]} " in error
        assert "set the same values everywhere" in error
    pool.leave([0, 1])


def test_algorithm_of_a_group_overrides_the_variable(pool: Any) -> None:
    pool.join(4, FSCCL_CLUSTERS="1,1,1,1", FSCCL_ALGO="tree")
    size = 2 << 20
    for me, algorithms in enumerate(pool.call(range(4), "run_named_algorithms", count=size // 2)):
        ring, tree, transpose, default = map(tuple, algorithms)
        assert ring == ("ring", {str((me + 1) % 4): size * 3 // 2})
        assert transpose == ("transpose", {str(peer): size // 2 for peer in range(4) if peer != me})
        assert tree == default
        assert tree[0] == "tree"
    pool.leave(range(4))


def test_ranks_need_the_same_secret(pool: Any) -> None:
    pool.join(3, FSCCL_CLUSTERS="1,2", FSCCL_SECRET="0123456789abcdef" * 2)
    pool.call(range(3), "run_operation", op="all_reduce")
    pool.leave(range(3))
    for i in range(2):
        secret = {"FSCCL_SECRET": f"{i}" * 32, "FSCCL_CLUSTERS": "1,1"}
        pool[i].start_case(
            "join", rank=i, size=2, port=pool.port, key="secrets", timeout=30, environment=secret
        )
    pool.wait_for_results([0, 1])
    for i in range(2):
        pool[i].start_case("run_operation", op="barrier")
    for error in wait_for_errors(pool, [0, 1], MAX_DELAY_SECONDS).values():
        assert error.count("FSCCL_SECRET=[") == 2
        assert "set the same values everywhere" in error
        assert not {"0" * 32, "1" * 32} & set(re.findall("[0-9a-f]{32}", error))
    pool.leave([0, 1])


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"FSCCL_CLUSTERS": "2,x"}, "FSCCL_CLUSTERS=2,x: expected the sizes"),
        ({"FSCCL_CLUSTERS": "4,4"}, "4,4: the sizes add up to 8, but the job's ranks are 2"),
        ({"FSCCL_CLUSTERS": "1"}, "1: the sizes add up to 1, but the job's ranks are 2"),
        ({"FSCCL_CLUSTERS": "2,0"}, "FSCCL_CLUSTERS=2,0: expected the sizes"),
        ({"FSCCL_CHUNK_BYTES": "1k"}, "FSCCL_CHUNK_BYTES=1k: expected 4096 to 1 GiB"),
        ({"FSCCL_ALGO": "tre"}, "FSCCL_ALGO=tre: expected auto, ring, tree or transpose; did you"),
        ({"FSCCL_SHM": "yes"}, "FSCCL_SHM=yes: expected 0 or 1"),
        ({"FSCCL_PIPELINE_K": "65"}, "FSCCL_PIPELINE_K=65: expected 0 (off) to 64 chunks"),
        ({"FSCCL_PIPELINE_NELEM": "0"}, "FSCCL_PIPELINE_NELEM=0: expected 1 to 67108864"),
        ({"FSCCL_TAIL": "bound"}, "FSCCL_TAIL=bound: expected bounded or exact"),
        ({"FSCCL_TAIL_LIMIT": "101"}, "FSCCL_TAIL_LIMIT=101: expected 0 to 100 percent"),
        ({"FSCCL_SECRET": "a" * 31}, "FSCCL_SECRET: expected 32 hexadecimal digits"),
        ({"FSCCL_DEBUG": "loud"}, "FSCCL_DEBUG=loud: expected INFO or WARN"),
        ({"FSCCL_TCP_INTERFACES": "17"}, "FSCCL_TCP_INTERFACES=17: expected 1 to 16"),
        (
            {"FSCCL_TCP_INTERFACES": "2", "FSCCL_SOCKET_IFNAME": "=lo"},
            "FSCCL_TCP_INTERFACES=2, and only 1 that is up and has an address matches",
        ),
        ({"FSCCL_SOCKET_IFNAME": "=nope0"}, "matches FSCCL_SOCKET_IFNAME==nope0; there are:"),
    ],
    ids=lambda v: "=".join(next(iter(v.items()))) if isinstance(v, dict) else None,
)
def test_invalid_variables_are_rejected(
    pool: Any, variables: dict[str, str], expected: str
) -> None:
    pool[0].start_case(
        "join", rank=0, size=2, port=pool.port, key="wrong", timeout=5, environment=variables
    )
    assert expected in wait_for_errors(pool, [0], MAX_DELAY_SECONDS)[0]


def test_clusters_must_cover_all_ranks(pool: Any) -> None:
    """The check also covers fsccl groups in a job whose default group has another backend."""
    arguments = {"port": pool.port, "key": "uncovered", "timeout": 30, "backend": "gloo"}
    for i in range(3):
        pool[i].start_case(
            "join", rank=i, size=3, environment={"FSCCL_CLUSTERS": "1,1"}, **arguments
        )
    pool.wait_for_results(range(3))
    for i in range(3):
        pool[i].start_case("barrier_in_new_group")
    for error in wait_for_errors(pool, [0, 1, 2], MAX_DELAY_SECONDS).values():
        assert "FSCCL_CLUSTERS covers 2 ranks, but there is a rank 2" in error
    pool.leave([0, 1, 2])
