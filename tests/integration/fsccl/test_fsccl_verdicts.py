"""What goes wrong is told to all ranks, at once, in one sentence that names the right one."""

from __future__ import annotations

import os
import re
import signal
from typing import Any

import pytest
from support.fsccl_ranks import SLACK, survivors_say

pytestmark = [pytest.mark.integration, pytest.mark.torch]

LIMIT = 60.0  # of operations: who is named sooner was not waited for


def errors(pool: Any, members: list[int]) -> list[str]:
    """What each of them says, without whose words they are."""
    said = survivors_say(pool, members, SLACK)
    return [error.partition(f", rank {i}: ")[2] or error for i, error in said.items()]


def end(pool: Any, index: int) -> None:
    """kill -9, of which only the kernel knows; another rank takes its place for the next job."""
    os.kill(pool[index].pid, signal.SIGKILL)
    pool.kill(index)


@pytest.mark.parametrize(
    ("shape", "op"),
    [("3", "all_reduce"), ("1,1,1", "all_reduce"), ("2,1", "all_gather"), ("3", "recv_any")],
)
def test_a_dead_rank_is_not_taken_for_the_late_one(ranks: Any, shape: str, op: str) -> None:
    """Rank 1 comes to nothing, and is not to blame."""
    ranks.join(3, timeout=LIMIT, FSCCL_CLUSTERS=shape)
    ranks.call(range(3), "meet_in_messages")
    ranks.call(range(3), "call", op="barrier")
    ranks[0].ask("wait_for_all", op=op)
    if op != "recv_any":
        ranks[2].ask("wait_for_all", op=op)
        ranks.call([1], "nap", seconds=0.3)  # rank 2 is in it
    end(ranks, 2)
    (said,) = errors(ranks, [0])
    assert re.fullmatch(r"rank 2 \[.*\] ended without leaving the group", said)
    ranks.leave([0, 1])


@pytest.mark.parametrize("shape", ["1,1,1", "2,1"])
def test_a_death_that_one_group_has_seen_is_told_in_all(ranks: Any, shape: str) -> None:
    """Rank 1 lives, and will never send in the other group what rank 0 waits for there."""
    ranks.join(3, timeout=LIMIT, FSCCL_CLUSTERS=shape)
    ranks.call(range(3), "meet_in_messages")
    ranks.call(range(3), "make_another_group")
    ranks[0].ask("wait_in_another_group", source=1)
    ranks[1].ask("wait_for_all", op="all_reduce")
    ranks.call([2], "nap", seconds=0.3)
    end(ranks, 2)
    for said in errors(ranks, [0, 1]):
        assert re.fullmatch(r"rank 2 \[.*\] ended without leaving the group", said)
    ranks.leave([0, 1])


@pytest.mark.parametrize("leader", [True, False], ids=["leader", "follower"])
def test_a_rank_that_ends_between_meeting_and_its_first_operation(ranks: Any, leader: bool) -> None:
    ranks.join(3, timeout=LIMIT)
    ranks.call(range(3), "know_each_other")
    dead = 0 if leader else 2
    others = [i for i in range(3) if i != dead]
    for i in others:
        ranks[i].ask("call", op="barrier")
    end(ranks, dead)
    for said in errors(ranks, others):
        assert re.fullmatch(rf"rank {dead} \[.*\] ended without leaving the group", said)
    ranks.leave(others)


@pytest.mark.parametrize("shm", ["1", "0"])
def test_a_rank_whose_children_live_on_is_dead(ranks: Any, shm: str) -> None:
    """They hold copies of its connections, if it lets them."""
    ranks.join(3, timeout=LIMIT, FSCCL_SHM=shm)
    ranks.call(range(3), "meet_in_messages")
    (child,) = ranks.call([2], "fork_a_sleeper", seconds=120)
    try:
        for i in range(2):
            ranks[i].ask("wait_for_all", op="recv_any")
        end(ranks, 2)
        for said in errors(ranks, [0, 1]):
            assert re.fullmatch(r"rank 2 \[.*\] ended without leaving the group", said)
        ranks.leave([0, 1])
    finally:
        os.kill(child, signal.SIGKILL)


PATHS = {
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


@pytest.mark.parametrize("path", list(PATHS))
def test_calls_that_do_not_fit_are_named(ranks: Any, path: str) -> None:
    """By both ranks, in one sentence, and not when the time is over."""
    for kind, words in MISMATCHES.items():
        if path == "hosts" and kind in ("root", "nothing", "barrier"):
            continue  # the barrier is the core's, and nothing in common remembers what was before
        ranks.join(2, timeout=LIMIT, **PATHS[path])
        for i in range(2):
            ranks[i].ask("mismatch", kind=kind)
        first, second = errors(ranks, [0, 1])
        # Of two roots each rank has what the other need not have seen.
        assert first == second or kind == "root", kind
        found = re.fullmatch(r"rank 0 \[.*\] called (.*) while rank 1 \[.*\] called (.*)", first)
        assert found, f"{kind}: {first}"
        for called, pattern in zip(found.groups(), words, strict=True):
            assert re.search(pattern, called), f"{kind}: {first}"
        ranks.leave([0, 1])


def test_ranks_that_disagree_on_sharing_memory_are_refused(ranks: Any) -> None:
    for i in range(2):
        how = {"rank": i, "size": 2, "port": ranks.port, "key": "unlike-shm", "timeout": LIMIT}
        ranks[i].ask("join", environment={"FSCCL_SHM": str(i)}, **how)
    ranks.answers([0, 1])
    for i in range(2):
        ranks[i].ask("call", op="barrier")
    first, second = errors(ranks, [0, 1])
    assert first == second
    assert re.search(r"rank 1 .*FSCCL_SHM=1 .*rank 0 .*FSCCL_SHM=0 ", first)
    ranks.leave([0, 1])
