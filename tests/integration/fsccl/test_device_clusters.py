"""Clusters by native library: unlike libraries in one group, works and groups, faults."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.torch]

TIMEOUT = 3.0  # seconds, of operations
SLACK = 20.0  # for a busy machine; a hang is far longer
SMALL = {"FSCCL_PIPE_BYTES": "65536", "FSCCL_TINY_BYTES": "1024"}
GLOO = {"FSCCL_NATIVE": "gloo", **SMALL}


def join(pool: Any, environments: Sequence[Mapping[str, str]], timeout: float = 30) -> range:
    """A job whose ranks have environments of their own."""
    pool.joined = getattr(pool, "joined", 0) + 1
    pool.free(len(environments))
    for i, environment in enumerate(environments):
        pool[i].ask(
            "join",
            rank=i,
            size=len(environments),
            port=pool.port,
            key=f"clusters{pool.joined}",
            timeout=timeout,
            environment={"FSCCL_SOCKET_IFNAME": "lo", **environment},
        )
    members = range(len(environments))
    pool.answers(members)
    return members


def say(pool: Any, members: Sequence[int], limit: float = TIMEOUT + SLACK) -> dict[int, str]:
    replies = pool.replies(members, limit)
    for i, reply in replies.items():
        assert "error" in reply, f"rank {i} got {reply}"
    return {i: reply["error"] for i, reply in replies.items()}


UNLIKE = {
    "libraries": [GLOO, SMALL, GLOO, SMALL, SMALL],
    "one-of-a-kind": [SMALL, SMALL, GLOO],
    "reach": [{**GLOO, "FSCCL_REACH": name} for name in ("a", "b", "a", "b")],
}


@pytest.mark.parametrize("kind", list(UNLIKE))
def test_unlike_ranks_form_clusters_in_one_group(ranks: Any, kind: str) -> None:
    """Ranks of a cluster need not follow each other; plain ranks take part as a cluster."""
    members = join(ranks, UNLIKE[kind])
    assert set(ranks.call(members, "paths")) == {"engine"}
    base = {"red": "sum", "seed": 3, "strided": False}
    ops = ["all_reduce", "reduce_scatter", "all_gather", "broadcast", "scatter", "all_to_all"]
    cases = [
        {**base, "op": op, "dtype": "float32", "count": count, "root": 2}
        for op in ops
        for count in (7, 30_011)
    ]
    ranks.call(members, "check_many", cases=cases)
    ranks.call(members, "rounding_is_alike", count=20_001)
    ranks.leave(members)


@pytest.mark.parametrize("shape", ["2,2", "4"])
def test_all_that_torch_does_with_groups(ranks: Any, shape: str) -> None:
    members = join(ranks, [{**GLOO, "FSCCL_CLUSTERS": shape}] * 4)
    for name in ("asynchronous", "subgroups", "two_groups_crossed", "coalesced", "objects"):
        ranks.call(members, name)
    ranks.call(members, "messages", count=20_000)
    for name in ("messages_alike", "coalesced_alike"):
        ranks.call(members, name, count=20_000)
    ranks.call(members, "train_ddp", steps=2)
    for said in ranks.call(members, "refused"):
        assert "reduction max of uint64 is not done on devices" in said
    ranks.leave(members)


@pytest.mark.parametrize("op", ["gather", "scatter", "all_to_all"])
@pytest.mark.parametrize("shape", ["2,2", "4"])
def test_an_operation_that_brings_some_ranks_nothing_comes_first(
    ranks: Any, shape: str, op: str
) -> None:
    members = join(ranks, [{**GLOO, "FSCCL_CLUSTERS": shape}] * 4)
    case = {"op": op, "dtype": "float32", "count": 100, "red": "sum", "root": 1, "seed": 1}
    ranks.call(members, "check_many", cases=[{**case, "strided": False}])
    ranks.leave(members)


@pytest.mark.parametrize("shared", ["1", "0"], ids=["shared-memory", "messages"])
@pytest.mark.parametrize("op", ["all_reduce", "broadcast", "all_to_all"])
def test_a_killed_rank_is_named(ranks: Any, op: str, shared: str) -> None:
    members = join(ranks, [{**GLOO, "FSCCL_CLUSTERS": "2,2", "FSCCL_SHM": shared}] * 4)
    ranks.call(members, "call", op="all_reduce")
    for i in range(3):
        ranks[i].ask("call", op=op, repeat=1_000_000)
    ranks.kill(3)
    for i, error in say(ranks, [0, 1, 2], SLACK).items():
        named = "rank 3" in error or (shared == "0" and "cluster of ranks 2, 3" in error)
        assert named, f"rank {i}: {error}"
    ranks.leave([0, 1, 2])


@pytest.mark.parametrize(("shape", "native"), [("2,2", "gloo"), ("2,2", "fsccl"), ("4", "gloo")])
def test_who_waits_in_the_native_library_hears_of_a_failure_elsewhere(
    ranks: Any, shape: str, native: str
) -> None:
    """Rank 1 waits there for rank 0, to which nothing else connects it, and never for rank 3."""
    own = {**SMALL, "FSCCL_NATIVE": native, "FSCCL_CLUSTERS": shape, "FSCCL_SHM": "0"}
    members = join(ranks, [own] * 4)
    ranks.call(members, "call", op="all_reduce")
    ranks.kill(3)
    for i in range(3):
        ranks[i].ask("call", op="broadcast", repeat=2)
    for i, error in say(ranks, [0, 1, 2], SLACK).items():
        named = "rank 3" in error or "cluster of rank" in error
        assert named, f"rank {i}: {error}"
    ranks.leave([0, 1, 2])


def test_a_stopped_rank_is_named(ranks: Any) -> None:
    members = join(ranks, [{**GLOO, "FSCCL_CLUSTERS": "2,2"}] * 4, TIMEOUT)
    ranks.call(members, "call", op="all_reduce")
    os.kill(ranks[3].pid, signal.SIGSTOP)
    try:
        for i in range(3):
            ranks[i].ask("call", op="all_reduce")
        for i, error in say(ranks, [0, 1, 2]).items():
            assert "rank 3" in error, f"rank {i}: {error}"
            assert "did not come within 3 s" in error, f"rank {i}: {error}"
    finally:
        os.kill(ranks[3].pid, signal.SIGCONT)
    ranks.leave(members)


@pytest.mark.parametrize("before", ["barrier", "all_reduce"], ids=["pipes", "tensors"])
def test_a_rank_without_memory_is_named(ranks: Any, before: str) -> None:
    """For what crosses, or, once that is there, for torch's tensors: others need not wait long.

    In a new process: what an older one has freed would do for the operation.
    """
    ranks.kill(1)
    members = join(ranks, [{**GLOO, "FSCCL_CLUSTERS": "1,1", "FSCCL_PIPE_BYTES": "67108864"}] * 2)
    ranks.call(members, "call", op=before, count=10_000)
    count = 32 << 20
    ranks[0].ask("call", op="all_reduce", count=count)
    ranks[1].ask("call_without_memory", count=count)
    said = ranks.answers([1], SLACK)[0]
    assert "rank 1" in said
    assert "alloc" in said  # "cannot allocate", "can't allocate"
    assert "rank 1" in say(ranks, [0], SLACK)[0]
    ranks.leave(members)


def test_different_operations_are_named(ranks: Any) -> None:
    members = join(ranks, [{**GLOO, "FSCCL_CLUSTERS": "1,1"}] * 2)
    ranks[0].ask("call", op="all_reduce", count=1000)
    ranks[1].ask("call", op="all_reduce", count=1001)
    for error in say(ranks, members).values():
        assert "all_reduce #1 of 4000 bytes of float32, sum" in error
        assert "all_reduce #1 of 4004 bytes" in error
    ranks.leave(members)


BOTH_WAITS = {
    "messages": [{"FSCCL_CLUSTERS": "1,1"}] * 2,
    "shared-memory": [{"FSCCL_REACH": name} for name in "ab"],
}


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("waits", list(BOTH_WAITS))
def test_a_failure_is_told_to_who_has_gone_on(ranks: Any, waits: str, at: int) -> None:
    """The engine fails before the core's first collective, for which the other rank waits."""
    members = join(ranks, [{**GLOO, **more} for more in BOTH_WAITS[waits]])
    ranks.call(members, "call", op="all_reduce")
    case = {"kind": "gather", "sent": 1, "expected": 9, "at": at}
    ranks[1 - at].ask("unequal_self", **case)
    time.sleep(0.3)  # it has sent its part
    ranks[at].ask("unequal_self", **case)
    for error in say(ranks, members, SLACK).values():
        assert re.search(rf"rank {at} .*sends itself 4 bytes and expects 36", error), error
    ranks.leave(members)


def test_other_sizes_of_pipes_are_refused(ranks: Any) -> None:
    environments = [{**GLOO, "FSCCL_PIPE_BYTES": size} for size in ("65536", "131072")]
    members = join(ranks, environments)
    for i in members:
        ranks[i].ask("call", op="all_reduce")
    for error in say(ranks, members).values():
        assert "FSCCL_PIPE_BYTES=131072" in error
        assert "set the same values everywhere" in error
    ranks.leave(members)


def test_an_aborted_group_ends_who_waits_in_the_native_library(ranks: Any) -> None:
    members = join(ranks, [{**GLOO, "FSCCL_CLUSTERS": "2,1"}] * 3)
    ranks.call(members, "call", op="all_reduce")
    ranks[0].ask("abort_while_waiting_for", op="all_reduce")
    assert "the program aborted the group" in ranks.answers([0], SLACK)[0]
    ranks.leave(members)


BETWEEN = "exchange between clusters, reduce-scatter and all-gather inside"
OVER = "reduce-scatter inside, exchange, all-gather inside, pipelined"


@pytest.mark.parametrize(
    ("environment", "small", "large"),
    [
        pytest.param({}, "one-shot in shared memory", "two-shot in shared memory", id="host"),
        pytest.param({"FSCCL_CLUSTERS": "1,1"}, BETWEEN, BETWEEN, id="clusters"),
        pytest.param(
            {"FSCCL_PIPELINE_K": "2", "FSCCL_PIPELINE_NELEM": "4096"},
            "one-shot in shared memory",
            "pipelined, k=2, 4096 elements a send",
            id="pipelined",
        ),
        pytest.param(
            {"FSCCL_NATIVE": "gloo", "FSCCL_CLUSTERS": "1,1"},
            "everyone's part on the board",
            OVER,
            id="native-libraries",
        ),
    ],
)
def test_a_group_tells_its_last_algorithm(
    ranks: Any, environment: dict[str, str], small: str, large: str
) -> None:
    members = join(ranks, [environment] * 2)
    for before, first, second, barrier in ranks.call(members, "algorithms"):
        assert (before, first, second) == ("none yet", small, large)
        assert barrier.startswith("shared memory")
    ranks.leave(members)
