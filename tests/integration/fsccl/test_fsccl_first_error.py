"""Tests of the group error: all ranks report one error at once that names the responsible rank."""

from __future__ import annotations

import os
import re
import signal
from typing import Any

import pytest
from support.fsccl_ranks import MAX_DELAY_SECONDS, wait_for_errors

pytestmark = [pytest.mark.integration, pytest.mark.torch]

OPERATION_TIMEOUT_SECONDS = 60.0  # long, so that no error in these tests is caused by the timeout


def collect_errors(pool: Any, members: list[int]) -> list[str]:
    """Return each rank's error without the prefix that names the reporting rank."""
    errors_by_rank = wait_for_errors(pool, members, MAX_DELAY_SECONDS)
    return [error.partition(f", rank {i}: ")[2] or error for i, error in errors_by_rank.items()]


def kill_rank(pool: Any, index: int) -> None:
    """Kill a rank with SIGKILL. Another rank takes its place in the next job."""
    os.kill(pool[index].pid, signal.SIGKILL)
    pool.kill(index)


@pytest.mark.parametrize(
    ("shape", "op"),
    [("3", "all_reduce"), ("1,1,1", "all_reduce"), ("2,1", "all_gather"), ("3", "recv_any")],
)
def test_killed_rank_is_not_confused_with_a_straggler(ranks: Any, shape: str, op: str) -> None:
    """Rank 1 does not call the operation, but is not responsible for the failure."""
    ranks.join(3, timeout=OPERATION_TIMEOUT_SECONDS, FSCCL_CLUSTERS=shape)
    ranks.call(range(3), "exchange_messages")
    ranks.call(range(3), "run_operation", op="barrier")
    ranks[0].start_case("wait_for_all_ranks", op=op)
    if op != "recv_any":
        ranks[2].start_case("wait_for_all_ranks", op=op)
        ranks.call([1], "sleep_for", seconds=0.3)  # until rank 2 is in the operation
    kill_rank(ranks, 2)
    (error,) = collect_errors(ranks, [0])
    assert re.fullmatch(r"rank 2 \[.*\] ended without leaving the group", error)
    ranks.leave([0, 1])


@pytest.mark.parametrize("shape", ["1,1,1", "2,1"])
def test_rank_failure_is_reported_in_all_groups(ranks: Any, shape: str) -> None:
    """Rank 1 is alive, but never sends the message that rank 0 waits for in the other group."""
    ranks.join(3, timeout=OPERATION_TIMEOUT_SECONDS, FSCCL_CLUSTERS=shape)
    ranks.call(range(3), "exchange_messages")
    ranks.call(range(3), "create_second_group")
    ranks[0].start_case("receive_in_second_group", source=1)
    ranks[1].start_case("wait_for_all_ranks", op="all_reduce")
    ranks.call([2], "sleep_for", seconds=0.3)
    kill_rank(ranks, 2)
    for error in collect_errors(ranks, [0, 1]):
        assert re.fullmatch(r"rank 2 \[.*\] ended without leaving the group", error)
    ranks.leave([0, 1])


@pytest.mark.parametrize("kills_leader", [True, False], ids=["leader", "follower"])
def test_rank_killed_between_rendezvous_and_first_operation(ranks: Any, kills_leader: bool) -> None:
    ranks.join(3, timeout=OPERATION_TIMEOUT_SECONDS)
    ranks.call(range(3), "exchange_identities")
    killed_rank = 0 if kills_leader else 2
    survivors = [i for i in range(3) if i != killed_rank]
    for i in survivors:
        ranks[i].start_case("run_operation", op="barrier")
    kill_rank(ranks, killed_rank)
    for error in collect_errors(ranks, survivors):
        assert re.fullmatch(rf"rank {killed_rank} \[.*\] ended without leaving the group", error)
    ranks.leave(survivors)


@pytest.mark.parametrize("shm", ["1", "0"])
def test_killed_rank_with_running_children_is_detected(ranks: Any, shm: str) -> None:
    """Children inherit copies of the rank's connections unless they are closed on fork."""
    ranks.join(3, timeout=OPERATION_TIMEOUT_SECONDS, FSCCL_SHM=shm)
    ranks.call(range(3), "exchange_messages")
    (child,) = ranks.call([2], "fork_sleeping_child", seconds=120)
    try:
        for i in range(2):
            ranks[i].start_case("wait_for_all_ranks", op="recv_any")
        kill_rank(ranks, 2)
        for error in collect_errors(ranks, [0, 1]):
            assert re.fullmatch(r"rank 2 \[.*\] ended without leaving the group", error)
        ranks.leave([0, 1])
    finally:
        os.kill(child, signal.SIGKILL)


PATH_SETTINGS = {
    "shared-memory": {},
    "clusters": {"FSCCL_CLUSTERS": "1,1"},
    "pipelined": {"FSCCL_PIPELINE_K": "2", "FSCCL_ONE_SHOT_BYTES": "0"},
    "pipelined-clusters": {
        "FSCCL_PIPELINE_K": "2",
        "FSCCL_ONE_SHOT_BYTES": "0",
        "FSCCL_CLUSTERS": "1,1",
    },
    "native": {"FSCCL_NATIVE": "fsccl"},
    "native-of-messages": {"FSCCL_NATIVE": "fsccl", "FSCCL_SHM": "0"},
    "engine": {"FSCCL_NATIVE": "gloo"},
    "engine-of-clusters": {"FSCCL_NATIVE": "fsccl", "FSCCL_CLUSTERS": "1,1"},
    "hosts": {"FSCCL_NATIVE": "gloo", "FSCCL_CLUSTERS": "1,1", "FSCCL_SHM": "0"},
}
MISMATCHES = {
    "size": ("all_reduce .*of 12000 bytes", "all_reduce .*of 24000 bytes"),
    "nothing": ("barrier", "all_reduce"),
    "type": ("of int32", "of float32"),
    "reduction": ("float32, sum", "float32, max"),
    "root": ("root 0|barrier", "root 1|barrier"),
    "operation": ("all_reduce", "broadcast"),
    "order": ("all_reduce .*of 40 bytes", "all_reduce .*of 12000 bytes"),
    "barrier": ("all_reduce", "barrier"),
    "gather": ("gather", "all_to_all"),
}


@pytest.mark.parametrize("path", list(PATH_SETTINGS))
def test_mismatched_calls_are_reported(ranks: Any, path: str) -> None:
    """Both ranks report the mismatch in the same words, before the timeout."""
    for kind, patterns in MISMATCHES.items():
        if path == "hosts" and kind in ("root", "nothing", "barrier"):
            continue  # the core's barrier has no record of the previous operation
        ranks.join(2, timeout=OPERATION_TIMEOUT_SECONDS, **PATH_SETTINGS[path])
        for i in range(2):
            ranks[i].start_case("call_mismatched", kind=kind)
        first, second = collect_errors(ranks, [0, 1])
        # With mismatched roots, a rank may not have seen the other rank's call.
        assert first == second or kind == "root", kind
        match = re.fullmatch(r"rank 0 \[.*\] called (.*) while rank 1 \[.*\] called (.*)", first)
        assert match, f"{kind}: {first}"
        for called, pattern in zip(match.groups(), patterns, strict=True):
            assert re.search(pattern, called), f"{kind}: {first}"
        ranks.leave([0, 1])


def test_mismatched_shared_memory_setting_is_rejected(ranks: Any) -> None:
    for i in range(2):
        arguments = {
            "rank": i,
            "size": 2,
            "port": ranks.port,
            "key": "different-shm",
            "timeout": OPERATION_TIMEOUT_SECONDS,
        }
        ranks[i].start_case("join", environment={"FSCCL_SHM": str(i)}, **arguments)
    ranks.wait_for_results([0, 1])
    for i in range(2):
        ranks[i].start_case("run_operation", op="barrier")
    first, second = collect_errors(ranks, [0, 1])
    assert first == second
    assert re.search(r"rank 1 .*FSCCL_SHM=1 .*rank 0 .*FSCCL_SHM=0 ", first)
    ranks.leave([0, 1])
