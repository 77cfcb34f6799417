"""A rank that is lost, or stands still: every survivor names it in time, and nothing is left."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.fsccl_ranks import ROOT, SLACK, survivors_say

pytestmark = [pytest.mark.integration, pytest.mark.torch]

TIMEOUT = 2.5  # seconds, of operations
PIPELINE = {"FSCCL_PIPELINE_K": "3", "FSCCL_PIPELINE_NELEM": "4096"}


@pytest.fixture
def pool(ranks: Any) -> Any:
    return ranks


@pytest.mark.parametrize(
    ("clusters", "op"),
    [
        ("4", "all_reduce"),
        ("4", "recv_last"),
        ("2,2", "all_to_all"),
        ("3,1", "recv_last"),
    ],
)
def test_a_killed_rank_is_named(pool: Any, clusters: str, op: str) -> None:
    pool.join(4, timeout=30, FSCCL_CLUSTERS=clusters)
    pool.call(range(4), "call", op="all_reduce")
    for i in range(3):
        pool[i].ask("call", op=op, repeat=3)
    time.sleep(0.1)
    pool.kill(3)
    said = survivors_say(pool, [0, 1, 2], SLACK)
    for i, error in said.items():
        sentence = rf", rank {i}: rank 3 \[.*\] ended without leaving the group$"
        assert re.search(sentence, error), f"rank {i}: {error}"
    pool.leave([0, 1, 2])


def test_ranks_killed_in_the_middle_of_each_operation_are_named(
    built: None, tmp_path: Path
) -> None:
    """By all others, in the same words but for who says so."""
    result = tmp_path / "kills.json"
    operations = ["all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter"]
    operations += ["all_to_all", "gather", "scatter", "barrier", "messages"]
    command = [sys.executable, str(ROOT / "tools" / "comm" / "kills.py"), "--kills", "1"]
    command += ["--clusters", "2,2", "1,1,1,1", "--limit", "60", "--json", str(result)]
    done = subprocess.run(
        [*command, "--operations", *operations],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    kills = json.loads(result.read_text())
    assert [kill["named"] for kill in kills] == [True] * 20
    for kill in kills:
        why = {re.sub("^.*, rank [0-9]: ", "", said) for said in kill["said"].values()}
        assert len(why) == 1, kill


@pytest.mark.parametrize("clusters", ["4", "2,2"])
def test_a_stopped_rank_is_named(pool: Any, clusters: str) -> None:
    pool.join(4, timeout=TIMEOUT, FSCCL_CLUSTERS=clusters)
    pool.call(range(4), "call", op="all_reduce")
    os.kill(pool[3].pid, signal.SIGSTOP)
    try:
        for i in range(3):
            pool[i].ask("call", op="all_reduce")
        for i, error in survivors_say(pool, [0, 1, 2], TIMEOUT + SLACK).items():
            assert "rank 3" in error, f"rank {i}: {error}"
            assert "did not come within 2.5 s" in error, f"rank {i}: {error}"
    finally:
        os.kill(pool[3].pid, signal.SIGCONT)
    pool.leave(range(4))


MIDDLES = [("2,2", {}), ("1,1,2", {}), ("4", PIPELINE), ("1,3", PIPELINE)]
FOR_EVER = 1_000_000  # operations: whatever the machine is doing, the fault comes in their middle


@pytest.mark.parametrize(("clusters", "variables"), MIDDLES, ids=str)
def test_a_rank_killed_in_the_middle_of_large_messages(
    pool: Any, clusters: str, variables: dict[str, str]
) -> None:
    pool.join(4, timeout=30, FSCCL_CLUSTERS=clusters, **variables)
    for i in range(4):
        pool[i].ask("call", op="all_reduce", count=4 << 20, repeat=FOR_EVER)
    time.sleep(0.5)
    pool.kill(3)
    for i, error in survivors_say(pool, [0, 1, 2], SLACK).items():
        assert "rank 3" in error, f"rank {i}: {error}"
    pool.leave([0, 1, 2])


@pytest.mark.parametrize(("clusters", "variables"), MIDDLES[1::2], ids=str)
def test_a_rank_stopped_in_the_middle_is_named(
    pool: Any, clusters: str, variables: dict[str, str]
) -> None:
    pool.join(4, timeout=TIMEOUT, FSCCL_CLUSTERS=clusters, **variables)
    for i in range(4):
        pool[i].ask("call", op="all_reduce", repeat=FOR_EVER)
    time.sleep(0.3)
    os.kill(pool[2].pid, signal.SIGSTOP)
    try:
        for i, error in survivors_say(pool, [0, 1, 3], TIMEOUT + SLACK).items():
            assert "rank 2" in error, f"rank {i}: {error}"
            assert "did not come within 2.5 s" in error, f"rank {i}: {error}"
    finally:
        os.kill(pool[2].pid, signal.SIGCONT)
    assert "rank 2" in survivors_say(pool, [2], SLACK)[2]
    pool.leave(range(4))


def test_different_sizes_are_named_by_a_pipeline(pool: Any) -> None:
    pool.join(2, timeout=10, **PIPELINE)
    for i in range(2):
        pool[i].ask("call", op="all_reduce", count=100_000 + i)
    for error in survivors_say(pool, [0, 1], SLACK).values():
        assert "of 400000 bytes" in error
        assert "of 400004 bytes" in error
    pool.leave([0, 1])


def test_a_rank_that_never_joins_is_named(pool: Any) -> None:
    for i in range(2):
        pool[i].ask("join", rank=i, size=3, port=pool.port, key="absent", timeout=1, environment={})
    pool.answers([0, 1])
    for i in range(2):
        pool[i].ask("call", op="barrier")
    for error in survivors_say(pool, [0, 1], SLACK).values():
        assert "rank 2 did not come to connect within 1 s" in error
    pool.leave([0, 1])


def test_different_operations_are_named(pool: Any) -> None:
    pool.join(2, timeout=10)
    pool[0].ask("call", op="all_reduce", count=1000)
    pool[1].ask("call", op="barrier")
    errors = survivors_say(pool, [0, 1], SLACK)
    text = " ".join(errors.values())
    assert "all_reduce #1 of 4000 bytes of float32, sum" in text
    assert "barrier #1" in text
    pool.leave([0, 1])


PATHS = [
    pytest.param({}, id="shared-memory"),
    pytest.param({"FSCCL_CLUSTERS": "1,1"}, id="clusters"),
    pytest.param({"FSCCL_NATIVE": "fsccl"}, id="native"),
    pytest.param({"FSCCL_NATIVE": "fsccl", "FSCCL_SHM": "0"}, id="native-of-messages"),
    pytest.param({"FSCCL_NATIVE": "gloo"}, id="engine"),
    pytest.param({"FSCCL_NATIVE": "fsccl", "FSCCL_CLUSTERS": "1,1"}, id="engine-of-clusters"),
    pytest.param({"FSCCL_NATIVE": "gloo", "FSCCL_CLUSTERS": "1,1", "FSCCL_SHM": "0"}, id="hosts"),
]


@pytest.mark.parametrize("variables", PATHS)
@pytest.mark.parametrize(
    ("kind", "sent", "expected"),
    [
        ("all_to_all_single", 200_000, 1),
        ("all_to_all_single", 8, 0),
        ("all_to_all_single", 1, 9),
        ("all_to_all", 200_000, 1),
        ("scatter", 200_000, 2),
        ("gather", 200_000, 2),
        ("gather", 1, 9),
    ],
)
def test_a_part_for_oneself_of_another_size_is_named(
    pool: Any, variables: dict[str, str], kind: str, sent: int, expected: int
) -> None:
    pool.join(2, **variables)
    for i in range(2):
        pool[i].ask("unequal_self", kind=kind, sent=sent, expected=expected)
    for error in survivors_say(pool, [0, 1], SLACK).values():
        assert re.search(rf"rank 0 .*sends itself {4 * sent} bytes", error), error
        assert f"expects {4 * expected}" in error
    pool.leave([0, 1])


@pytest.mark.parametrize(
    "variables", [*PATHS, pytest.param({**PIPELINE, "FSCCL_ONE_SHOT_BYTES": "0"}, id="pipelined")]
)
@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter"])
def test_lists_of_other_sizes_are_named(pool: Any, op: str, variables: dict[str, str]) -> None:
    pool.join(2, **variables)
    for i in range(2):
        pool[i].ask("unequal_lists", op=op)
    for error in survivors_say(pool, [0, 1], SLACK).values():
        assert re.search(
            rf"{op} #1 .*(sizes of the ranks' parts differ|bytes where this rank expects)", error
        ), error
    pool.leave([0, 1])


@pytest.mark.parametrize("clusters", ["4", "2,2"])
def test_a_monitored_barrier_names_all_who_are_absent(pool: Any, clusters: str) -> None:
    pool.join(4, FSCCL_CLUSTERS=clusters)
    assert pool.call(range(4), "monitored", seconds=20, absent=[]) == ["passed"] * 4
    for i in range(4):
        pool[i].ask("monitored", seconds=1, absent=[1, 3])
    found = pool.replies(range(4), SLACK)
    for i in (0, 2):
        said = found[i]["error"]
        assert "fsccl: monitored_barrier #" in said
        assert re.search(r"rank 1 .*, rank 3 .* did not come within 1 s", said), f"rank {i}: {said}"
    pool.leave(range(4))


@pytest.mark.parametrize("clusters", ["3", "2,1"])
@pytest.mark.parametrize("met", [True, False], ids=["met", "meeting"])
def test_a_wait_with_a_limit_says_what_it_was_for(pool: Any, clusters: str, met: bool) -> None:
    pool.join(3, FSCCL_CLUSTERS=clusters)
    if met:
        pool.call(range(3), "call", op="barrier")
    for said in pool.call([0, 1], "impatient", seconds=0.5):
        words = rf"DistBackendError: fsccl: all_reduce #{1 + met}: not done within the 0.5 s"
        assert re.search(words, said), said
    assert pool.call(range(3), "patient") == [3, 3, 3]
    pool.leave(range(3))


def test_an_error_stays(pool: Any) -> None:
    pool.join(2, timeout=1)
    pool[0].ask("call", op="barrier")
    first = survivors_say(pool, [0], SLACK)[0]
    assert "rank 1" in first
    for i in range(2):  # which both of them could do now
        pool[i].ask("call", op="all_reduce")
    for error in survivors_say(pool, [0, 1], SLACK).values():
        assert re.search("rank 1 .*did not come within 1 s", error), error
    pool.leave([0, 1])


@pytest.fixture(params=["64k", "1500k", "3200k"], ids=["first", "second", "channels"])
def small_tmpfs(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Too small for the slots of the first rank, of the second, or for those of a pipeline."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={request.param}", "tmpfs", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs root, to mount a tmpfs")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_shared_memory_that_is_full_is_an_error_on_all_ranks(pool: Any, small_tmpfs: Path) -> None:
    pool.join(3, timeout=10, FSCCL_SHM_DIR=str(small_tmpfs), **PIPELINE)
    for i in range(3):
        pool[i].ask("call", op="all_reduce")
    for error in survivors_say(pool, [0, 1, 2], SLACK).values():
        assert "cannot reserve" in error
        assert "MiB of shared memory" in error
        assert str(small_tmpfs) in error
    pool.leave([0, 1, 2])
    assert list(small_tmpfs.iterdir()) == []


def test_a_limit_on_file_sizes_is_an_error(pool: Any) -> None:
    pool.join(2, timeout=10)
    pool.call([0], "limit_file_size", bytes_=100_000)
    try:
        for i in range(2):
            pool[i].ask("call", op="all_reduce")
        for error in survivors_say(pool, [0, 1], SLACK).values():
            assert "cannot reserve" in error
            assert "File too large" in error
    finally:
        pool.call([0], "limit_file_size", bytes_=-1)
    pool.leave([0, 1])


@pytest.mark.parametrize("variables", [{}, PIPELINE], ids=["lane", "channels"])
def test_no_segment_is_left(pool: Any, variables: dict[str, str]) -> None:
    """Neither a name, nor memory that a survivor goes on holding after it has left."""
    before = pool.call(range(3), "segments")  # torch keeps some of what earlier jobs had
    assert all(names == [] for _, names in before)
    pool.join(3, **variables)
    pool.call(range(3), "call", op="all_reduce")
    for (held, _), (had, _) in zip(pool.call(range(3), "segments"), before, strict=True):
        assert held > had
    for i in range(2):
        pool[i].ask("call", op="all_reduce")
    pool.kill(2)
    survivors_say(pool, [0, 1], SLACK)
    pool.leave([0, 1])
    assert pool.call([0, 1], "segments") == before[:2]


FOR_EVER_ALONE = """
import sys, torch, torch.distributed as dist, flagscale.comm.fsccl
rank, port = int(sys.argv[1]), int(sys.argv[2])
store = dist.PrefixStore("alone", dist.TCPStore("127.0.0.1", port, is_master=False))
dist.init_process_group("fsccl", store=store, rank=rank, world_size=3)
dist.barrier()
print("ready", flush=True)
work = dist.all_reduce(torch.ones(9), async_op=True)
while rank < 2:
    dist.all_reduce(torch.ones(100_000))
sys.stdin.read()
"""


def test_programs_end_when_one_of_them_is_killed(pool: Any) -> None:
    """With threads that wait, works that nobody waited for, and nobody who catches an error."""
    environment = {**os.environ, "FSCCL_CLUSTERS": "2,1", "FSCCL_SOCKET_IFNAME": "lo"}
    with ExitStack() as stack:
        programs = []
        for rank in range(3):
            words = [sys.executable, "-c", FOR_EVER_ALONE, str(rank), str(pool.port)]
            program = subprocess.Popen(
                words,
                env={**environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(program)
            stack.callback(program.kill)
            programs.append(program)
        for program in programs:
            assert program.stdout is not None
            assert program.stdout.readline() == "ready\n"
        programs[2].kill()
        for program in programs[:2]:
            _, said = program.communicate(timeout=60)
            assert program.returncode == 1, said
            assert re.search("rank 2 .*ended", said), said


@pytest.mark.parametrize("clusters", ["2", "1,1"])
def test_a_forked_child_ends_nobodys_group(pool: Any, clusters: str) -> None:
    pool.join(2, timeout=20, FSCCL_CLUSTERS=clusters)
    pool.call(range(2), "forks_a_child_that_leaves")
    pool.leave(range(2))


def test_abort_ends_waiting(pool: Any) -> None:
    pool.join(2)
    pool.call(range(2), "call", op="barrier")
    assert "the program aborted the group" in pool.call([0], "abort_while_waiting")[0]
    pool[1].ask("call", op="barrier")
    assert "the program aborted the group" in pool.replies([1])[1]["error"]
    pool.leave(range(2))
