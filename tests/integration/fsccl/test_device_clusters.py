"""Tests of the device engine, which connects ranks with different native libraries
(csrc/device/engine.h): heterogeneous groups, features of groups, and faults.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.torch]

OPERATION_TIMEOUT_SECONDS = 3.0
MAX_DELAY_SECONDS = 20.0  # allowed on a busy machine; a hang takes far longer
# So small that the tests' operations take several steps.
SMALL_LIMITS = {"FSCCL_PIPE_BYTES": "65536", "FSCCL_TINY_BYTES": "1024"}
GLOO_SETTINGS = {"FSCCL_NATIVE": "gloo", **SMALL_LIMITS}


def join(
    pool: Any,
    environments: Sequence[Mapping[str, str]],
    operation_timeout: float | None = None,
) -> range:
    """Initialize a job whose rank ``i`` has the environment variables ``environments[i]``."""
    pool.joined = getattr(pool, "joined", 0) + 1
    pool.prepare(len(environments))
    for i, environment in enumerate(environments):
        pool[i].start_case(
            "join",
            rank=i,
            size=len(environments),
            port=pool.port,
            key=f"clusters{pool.joined}",
            timeout=30,
            environment={"FSCCL_SOCKET_IFNAME": "lo", **environment},
        )
    members = range(len(environments))
    pool.wait_for_results(members)
    if operation_timeout is not None:
        pool.call(members, "set_operation_timeout", seconds=operation_timeout)
    return members


def collect_errors(
    pool: Any, members: Sequence[int], limit: float = OPERATION_TIMEOUT_SECONDS + MAX_DELAY_SECONDS
) -> dict[int, str]:
    replies = pool.wait_for_replies(members, limit)
    for i, reply in replies.items():
        assert "error" in reply, f"rank {i} got {reply}"
    return {i: reply["error"] for i, reply in replies.items()}


HETEROGENEOUS_ENVIRONMENTS = {
    "libraries": [GLOO_SETTINGS, SMALL_LIMITS, GLOO_SETTINGS, SMALL_LIMITS, SMALL_LIMITS],
    "one-of-a-kind": [SMALL_LIMITS, SMALL_LIMITS, GLOO_SETTINGS],
    "reach": [{**GLOO_SETTINGS, "FSCCL_REACH": name} for name in ("a", "b", "a", "b")],
}


@pytest.mark.parametrize("kind", list(HETEROGENEOUS_ENVIRONMENTS))
def test_heterogeneous_ranks_form_clusters(ranks: Any, kind: str) -> None:
    """Ranks of a cluster need not be consecutive; ranks without a native library are a cluster,
    too.
    """
    members = join(ranks, HETEROGENEOUS_ENVIRONMENTS[kind])
    assert set(ranks.call(members, "get_cpu_path")) == {"engine"}
    base = {"red": "sum", "seed": 3, "strided": False}
    ops = ["all_reduce", "reduce_scatter", "all_gather", "broadcast", "scatter", "all_to_all"]
    cases = [
        {**base, "op": op, "dtype": "float32", "count": count, "root": 2}
        for op in ops
        for count in (7, 30_011)
    ]
    ranks.call(members, "check_operations", cases=cases)
    ranks.call(members, "check_identical_rounding", count=20_001)
    ranks.leave(members)


@pytest.mark.parametrize("shape", ["2,2", "4"])
def test_group_features_work_on_the_engine(ranks: Any, shape: str) -> None:
    members = join(ranks, [{**GLOO_SETTINGS, "FSCCL_CLUSTERS": shape}] * 4)
    for name in (
        "check_asynchronous",
        "check_overlapping_groups",
        "check_crossed_groups",
        "check_coalesced",
        "check_objects",
    ):
        ranks.call(members, name)
    ranks.call(members, "check_messages", count=20_000)
    for name in ("check_messages_of_all_pairs", "check_coalesced_all_reduces"):
        ranks.call(members, name, count=20_000)
    ranks.call(members, "train_ddp", steps=2)
    for error in ranks.call(members, "run_unsupported_reduction"):
        assert "reduction max of uint64 is not supported on devices" in error
    ranks.leave(members)


@pytest.mark.parametrize("op", ["gather", "scatter", "all_to_all"])
@pytest.mark.parametrize("shape", ["2,2", "4"])
def test_first_operation_without_data_for_some_ranks(ranks: Any, shape: str, op: str) -> None:
    members = join(ranks, [{**GLOO_SETTINGS, "FSCCL_CLUSTERS": shape}] * 4)
    case = {"op": op, "dtype": "float32", "count": 100, "red": "sum", "root": 1, "seed": 1}
    ranks.call(members, "check_operations", cases=[{**case, "strided": False}])
    ranks.leave(members)


@pytest.mark.parametrize("shared", ["1", "0"], ids=["shared-memory", "messages"])
@pytest.mark.parametrize("op", ["all_reduce", "broadcast", "all_to_all"])
def test_error_names_a_killed_rank(ranks: Any, op: str, shared: str) -> None:
    members = join(ranks, [{**GLOO_SETTINGS, "FSCCL_CLUSTERS": "2,2", "FSCCL_SHM": shared}] * 4)
    ranks.call(members, "run_operation", op="all_reduce")
    for i in range(3):
        ranks[i].start_case("run_operation", op=op, repeat=1_000_000)
    ranks.kill(3)
    for i, error in collect_errors(ranks, [0, 1, 2], MAX_DELAY_SECONDS).items():
        is_rank_named = "rank 3" in error or (shared == "0" and "cluster of ranks 2, 3" in error)
        assert is_rank_named, f"rank {i}: {error}"
    ranks.leave([0, 1, 2])


@pytest.mark.parametrize(("shape", "native"), [("2,2", "gloo"), ("2,2", "fsccl"), ("4", "gloo")])
def test_failure_ends_waits_in_the_native_library(ranks: Any, shape: str, native: str) -> None:
    """Rank 1 waits in the native library for rank 0, to which it has no other connection, and never
    for the killed rank 3.
    """
    environment = {
        **SMALL_LIMITS,
        "FSCCL_NATIVE": native,
        "FSCCL_CLUSTERS": shape,
        "FSCCL_SHM": "0",
    }
    members = join(ranks, [environment] * 4)
    ranks.call(members, "run_operation", op="all_reduce")
    ranks.kill(3)
    for i in range(3):
        ranks[i].start_case("run_operation", op="broadcast", repeat=2)
    for i, error in collect_errors(ranks, [0, 1, 2], MAX_DELAY_SECONDS).items():
        is_rank_named = "rank 3" in error or "cluster of rank" in error
        assert is_rank_named, f"rank {i}: {error}"
    ranks.leave([0, 1, 2])


def test_error_names_a_stopped_rank(ranks: Any) -> None:
    members = join(
        ranks, [{**GLOO_SETTINGS, "FSCCL_CLUSTERS": "2,2"}] * 4, OPERATION_TIMEOUT_SECONDS
    )
    ranks.call(members, "run_operation", op="all_reduce")
    os.kill(ranks[3].pid, signal.SIGSTOP)
    try:
        for i in range(3):
            ranks[i].start_case("run_operation", op="all_reduce")
        for i, error in collect_errors(ranks, [0, 1, 2]).items():
            assert "rank 3" in error, f"rank {i}: {error}"
            assert "did not come within the timeout of 3 s" in error, f"rank {i}: {error}"
    finally:
        os.kill(ranks[3].pid, signal.SIGCONT)
    ranks.leave(members)


@pytest.mark.parametrize("before", ["barrier", "all_reduce"], ids=["pipes", "tensors"])
def test_error_names_a_rank_without_memory(ranks: Any, before: str) -> None:
    """If a rank has no memory for pipes, or for tensors once there are pipes, all ranks fail soon.

    The rank is a new process, because memory freed by earlier tests would suffice.
    """
    ranks.kill(1)
    members = join(
        ranks, [{**GLOO_SETTINGS, "FSCCL_CLUSTERS": "1,1", "FSCCL_PIPE_BYTES": "67108864"}] * 2
    )
    ranks.call(members, "run_operation", op=before, count=10_000)
    count = 32 << 20
    ranks[0].start_case("run_operation", op="all_reduce", count=count)
    ranks[1].start_case("all_reduce_without_memory", count=count)
    error = ranks.wait_for_results([1], MAX_DELAY_SECONDS)[0]
    assert "rank 1" in error
    assert "alloc" in error  # "cannot allocate", "can't allocate"
    assert "rank 1" in collect_errors(ranks, [0], MAX_DELAY_SECONDS)[0]
    ranks.leave(members)


def test_error_names_different_operations(ranks: Any) -> None:
    members = join(ranks, [{**GLOO_SETTINGS, "FSCCL_CLUSTERS": "1,1"}] * 2)
    ranks[0].start_case("run_operation", op="all_reduce", count=1000)
    ranks[1].start_case("run_operation", op="all_reduce", count=1001)
    for error in collect_errors(ranks, members).values():
        assert "all_reduce #1 of 4000 bytes of float32, sum" in error
        assert "all_reduce #1 of 4004 bytes" in error
    ranks.leave(members)


WAIT_ENVIRONMENTS = {
    "messages": [{"FSCCL_CLUSTERS": "1,1"}] * 2,
    "shared-memory": [{"FSCCL_REACH": name} for name in "ab"],
}


@pytest.mark.parametrize("faulty_rank", [0, 1])
@pytest.mark.parametrize("waits", list(WAIT_ENVIRONMENTS))
def test_failure_reaches_a_rank_in_its_next_operation(
    ranks: Any, waits: str, faulty_rank: int
) -> None:
    """One rank's engine fails before the core's first collective, in which the other rank waits."""
    members = join(
        ranks, [{**GLOO_SETTINGS, **variables} for variables in WAIT_ENVIRONMENTS[waits]]
    )
    ranks.call(members, "run_operation", op="all_reduce")
    case = {"kind": "gather", "sent": 1, "expected": 9, "at": faulty_rank}
    ranks[1 - faulty_rank].start_case("send_self_mismatched", **case)
    time.sleep(0.3)  # until it has sent its part
    ranks[faulty_rank].start_case("send_self_mismatched", **case)
    for error in collect_errors(ranks, members, MAX_DELAY_SECONDS).values():
        assert re.search(rf"rank {faulty_rank} .*sends itself 4 bytes and expects 36", error), error
    ranks.leave(members)


def test_different_pipe_sizes_are_rejected(ranks: Any) -> None:
    environments = [{**GLOO_SETTINGS, "FSCCL_PIPE_BYTES": size} for size in ("65536", "131072")]
    members = join(ranks, environments)
    for i in members:
        ranks[i].start_case("run_operation", op="all_reduce")
    for error in collect_errors(ranks, members).values():
        assert "FSCCL_PIPE_BYTES=131072" in error
        assert "set the same values everywhere" in error
    ranks.leave(members)


def test_abort_ends_waits_in_the_native_library(ranks: Any) -> None:
    members = join(ranks, [{**GLOO_SETTINGS, "FSCCL_CLUSTERS": "2,1"}] * 3)
    ranks.call(members, "run_operation", op="all_reduce")
    ranks[0].start_case("abort_while_waiting_for", op="all_reduce")
    assert "the program aborted the group" in ranks.wait_for_results([0], MAX_DELAY_SECONDS)[0]
    ranks.leave(members)


NODES_ALGORITHM = "exchange between nodes, reduce-scatter and all-gather inside"
CLUSTERS_ALGORITHM = "reduce-scatter inside, exchange, all-gather inside, pipelined"


@pytest.mark.parametrize(
    ("environment", "small", "large"),
    [
        pytest.param({}, "one-shot in shared memory", "two-shot in shared memory", id="host"),
        pytest.param({"FSCCL_CLUSTERS": "1,1"}, NODES_ALGORITHM, NODES_ALGORITHM, id="clusters"),
        pytest.param(
            {"FSCCL_PIPELINE_K": "2", "FSCCL_PIPELINE_NELEM": "4096"},
            "one-shot in shared memory",
            "pipelined, k=2, 4096 elements a send",
            id="pipelined",
        ),
        pytest.param(
            {"FSCCL_NATIVE": "gloo", "FSCCL_CLUSTERS": "1,1"},
            "through the control block",
            CLUSTERS_ALGORITHM,
            id="native-libraries",
        ),
    ],
)
def test_algorithm_depends_on_settings_and_size(
    ranks: Any, environment: dict[str, str], small: str, large: str
) -> None:
    members = join(ranks, [environment] * 2)
    for before, first, second, barrier in ranks.call(members, "list_algorithms"):
        assert (before, first, second) == ("none yet", small, large)
        assert barrier.startswith("shared memory")
    ranks.leave(members)
