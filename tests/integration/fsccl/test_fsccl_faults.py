"""Tests of lost and hanging ranks: survivors name the rank in time and release all resources."""

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
from support.fsccl_ranks import MAX_DELAY_SECONDS, ROOT, wait_for_errors
from support.waiting import PATIENCE_SECONDS

pytestmark = [pytest.mark.integration, pytest.mark.torch]

OPERATION_TIMEOUT_SECONDS = 5.0
"""Longer than a busy machine delays a rank, which would be named instead of the one at fault."""
PIPELINE = {"FSCCL_PIPELINE_K": "3", "FSCCL_PIPELINE_NELEM": "4096"}


@pytest.fixture
def pool(ranks: Any) -> Any:
    ranks.prepare(4)
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
def test_survivors_name_a_killed_rank(pool: Any, clusters: str, op: str) -> None:
    pool.join(4, timeout=30, FSCCL_CLUSTERS=clusters)
    pool.call(range(4), "run_operation", op="all_reduce")
    for i in range(3):
        pool[i].start_case("run_operation", op=op, repeat=3)
    time.sleep(0.1)
    pool.kill(3)
    errors = wait_for_errors(pool, [0, 1, 2], MAX_DELAY_SECONDS)
    for i, error in errors.items():
        pattern = rf", rank {i}: rank 3 \[.*\] ended without leaving the group$"
        assert re.search(pattern, error), f"rank {i}: {error}"
    pool.leave([0, 1, 2])


def test_survivors_name_a_rank_killed_during_each_operation(
    built_extension: None, tmp_path: Path
) -> None:
    """All survivors report the same error, apart from their own rank."""
    result = tmp_path / "kills.json"
    operations = ["all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter"]
    operations += ["all_to_all", "gather", "scatter", "barrier", "messages"]
    command = [sys.executable, str(ROOT / "tools" / "comm" / "kills.py"), "--kills", "1"]
    command += ["--clusters", "2,2", "1,1,1,1", "--limit", "60", "--json", str(result)]
    process = subprocess.run(
        [*command, "--operations", *operations],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr[-4000:]
    kills = json.loads(result.read_text())
    assert [kill["named"] for kill in kills] == [True] * 20
    for kill in kills:
        reasons = {re.sub("^.*, rank [0-9]: ", "", error) for error in kill["said"].values()}
        assert len(reasons) == 1, kill


@pytest.mark.parametrize("clusters", ["4", "2,2"])
def test_timeout_names_a_stopped_rank(pool: Any, clusters: str) -> None:
    pool.join(4, FSCCL_CLUSTERS=clusters)
    pool.call(range(4), "run_operation", op="all_reduce")
    pool.set_operation_timeout(range(4), OPERATION_TIMEOUT_SECONDS)
    os.kill(pool[3].pid, signal.SIGSTOP)
    try:
        for i in range(3):
            pool[i].start_case("run_operation", op="all_reduce")
        for i, error in wait_for_errors(
            pool, [0, 1, 2], OPERATION_TIMEOUT_SECONDS + MAX_DELAY_SECONDS
        ).items():
            assert "rank 3" in error, f"rank {i}: {error}"
            assert "did not come within the timeout of 5 s" in error, f"rank {i}: {error}"
    finally:
        os.kill(pool[3].pid, signal.SIGCONT)
    pool.leave(range(4))


LARGE_MESSAGE_SETTINGS = [("2,2", {}), ("1,1,2", {}), ("4", PIPELINE), ("1,3", PIPELINE)]
ENDLESS_REPEATS = 1_000_000
"""Number of operations that do not end before the test's fault, however fast the machine is."""


@pytest.mark.parametrize(("clusters", "variables"), LARGE_MESSAGE_SETTINGS, ids=str)
def test_survivors_name_a_rank_killed_during_large_messages(
    pool: Any, clusters: str, variables: dict[str, str]
) -> None:
    pool.join(4, timeout=30, FSCCL_CLUSTERS=clusters, **variables)
    for i in range(4):
        pool[i].start_case("run_operation", op="all_reduce", count=4 << 20, repeat=ENDLESS_REPEATS)
    time.sleep(0.5)
    pool.kill(3)
    for i, error in wait_for_errors(pool, [0, 1, 2], MAX_DELAY_SECONDS).items():
        assert "rank 3" in error, f"rank {i}: {error}"
    pool.leave([0, 1, 2])


@pytest.mark.parametrize(("clusters", "variables"), LARGE_MESSAGE_SETTINGS[1::2], ids=str)
def test_timeout_names_a_rank_stopped_during_operations(
    pool: Any, clusters: str, variables: dict[str, str]
) -> None:
    pool.join(4, FSCCL_CLUSTERS=clusters, **variables)
    pool.call(range(4), "run_operation", op="all_reduce")
    pool.set_operation_timeout(range(4), OPERATION_TIMEOUT_SECONDS)
    for i in range(4):
        pool[i].start_case("run_operation", op="all_reduce", repeat=ENDLESS_REPEATS)
    time.sleep(0.3)
    os.kill(pool[2].pid, signal.SIGSTOP)
    try:
        for i, error in wait_for_errors(
            pool, [0, 1, 3], OPERATION_TIMEOUT_SECONDS + MAX_DELAY_SECONDS
        ).items():
            assert "rank 2" in error, f"rank {i}: {error}"
            assert "did not come within the timeout of 5 s" in error, f"rank {i}: {error}"
    finally:
        os.kill(pool[2].pid, signal.SIGCONT)
    assert "rank 2" in wait_for_errors(pool, [2], MAX_DELAY_SECONDS)[2]
    pool.leave(range(4))


def test_pipeline_reports_mismatched_sizes(pool: Any) -> None:
    pool.join(2, **PIPELINE)
    for i in range(2):
        pool[i].start_case("run_operation", op="all_reduce", count=100_000 + i)
    for error in wait_for_errors(pool, [0, 1], MAX_DELAY_SECONDS).values():
        assert "of 400000 bytes" in error
        assert "of 400004 bytes" in error
    pool.leave([0, 1])


def test_timeout_names_a_rank_that_never_joins(pool: Any) -> None:
    for i in range(2):
        pool[i].start_case(
            "join", rank=i, size=3, port=pool.port, key="absent", timeout=1, environment={}
        )
    for error in wait_for_errors(pool, [0, 1], MAX_DELAY_SECONDS).values():
        assert "rank 2 did not come to connect within the timeout of 1 s" in error


def test_mismatched_operations_are_reported(pool: Any) -> None:
    pool.join(2)
    pool[0].start_case("run_operation", op="all_reduce", count=1000)
    pool[1].start_case("run_operation", op="barrier")
    errors = wait_for_errors(pool, [0, 1], MAX_DELAY_SECONDS)
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
def test_mismatched_self_part_is_reported(
    pool: Any, variables: dict[str, str], kind: str, sent: int, expected: int
) -> None:
    pool.join(2, **variables)
    for i in range(2):
        pool[i].start_case("send_self_mismatched", kind=kind, sent=sent, expected=expected)
    for error in wait_for_errors(pool, [0, 1], MAX_DELAY_SECONDS).values():
        assert re.search(rf"rank 0 .*sends itself {4 * sent} bytes", error), error
        assert f"expects {4 * expected}" in error
    pool.leave([0, 1])


@pytest.mark.parametrize(
    "variables", [*PATHS, pytest.param({**PIPELINE, "FSCCL_ONE_SHOT_BYTES": "0"}, id="pipelined")]
)
@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter"])
def test_mismatched_list_sizes_are_reported(pool: Any, op: str, variables: dict[str, str]) -> None:
    pool.join(2, **variables)
    for i in range(2):
        pool[i].start_case("call_with_mismatched_lists", op=op)
    for error in wait_for_errors(pool, [0, 1], MAX_DELAY_SECONDS).values():
        assert re.search(
            rf"{op} #1 .*(sizes of the ranks' parts differ|bytes where this rank expects)", error
        ), error
    pool.leave([0, 1])


@pytest.mark.parametrize("clusters", ["4", "2,2"])
def test_monitored_barrier_names_all_absent_ranks(pool: Any, clusters: str) -> None:
    pool.join(4, FSCCL_CLUSTERS=clusters)
    assert pool.call(range(4), "run_monitored_barrier", seconds=20, absent=[]) == ["passed"] * 4
    for i in range(4):
        pool[i].start_case("run_monitored_barrier", seconds=1, absent=[1, 3])
    replies = pool.wait_for_replies(range(4), MAX_DELAY_SECONDS)
    for i in (0, 2):
        error = replies[i]["error"]
        assert "fsccl: monitored_barrier #" in error
        assert re.search(r"rank 1 .*, rank 3 .* did not come within the timeout of 1 s", error), (
            f"rank {i}: {error}"
        )
    pool.leave(range(4))


@pytest.mark.parametrize("clusters", ["3", "2,1"])
@pytest.mark.parametrize("is_connected", [True, False], ids=["connected", "connecting"])
def test_wait_timeout_names_the_operation(pool: Any, clusters: str, is_connected: bool) -> None:
    pool.join(3, FSCCL_CLUSTERS=clusters)
    if is_connected:
        pool.call(range(3), "run_operation", op="barrier")
    for error in pool.call([0, 1], "wait_with_timeout", seconds=0.5):
        pattern = (
            rf"DistBackendError: fsccl: all_reduce #{1 + is_connected}: not done within the 0.5 s"
        )
        assert re.search(pattern, error), error
    assert pool.call(range(3), "finish_pending") == [3, 3, 3]
    pool.leave(range(3))


def test_first_error_is_permanent(pool: Any) -> None:
    pool.join(2)
    pool.set_operation_timeout(range(2), 1)
    pool[0].start_case("run_operation", op="barrier")
    first = wait_for_errors(pool, [0], MAX_DELAY_SECONDS)[0]
    assert "rank 1" in first
    for i in range(2):  # both ranks call it now, so it would succeed without the earlier error
        pool[i].start_case("run_operation", op="all_reduce")
    for error in wait_for_errors(pool, [0, 1], MAX_DELAY_SECONDS).values():
        assert re.search("rank 1 .*did not come within the timeout of 1 s", error), error
    pool.leave([0, 1])


@pytest.fixture(params=["64k", "1500k", "3200k"], ids=["first", "second", "channels"])
def small_tmpfs(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Mount a tmpfs too small for the slots of the first rank, the second rank, or a pipeline."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={request.param}", "tmpfs", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs root, to mount a tmpfs")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_full_shared_memory_is_reported_on_all_ranks(pool: Any, small_tmpfs: Path) -> None:
    pool.join(3, FSCCL_SHM_DIR=str(small_tmpfs), **PIPELINE)
    for i in range(3):
        pool[i].start_case("run_operation", op="all_reduce")
    for error in wait_for_errors(pool, [0, 1, 2], MAX_DELAY_SECONDS).values():
        assert "cannot reserve" in error
        assert "MiB of shared memory" in error
        assert str(small_tmpfs) in error
    pool.leave([0, 1, 2])
    assert list(small_tmpfs.iterdir()) == []


def test_file_size_limit_is_reported(pool: Any) -> None:
    pool.join(2)
    pool.call([0], "limit_file_size", bytes_=100_000)
    try:
        for i in range(2):
            pool[i].start_case("run_operation", op="all_reduce")
        for error in wait_for_errors(pool, [0, 1], MAX_DELAY_SECONDS).values():
            assert "cannot reserve" in error
            assert "File too large" in error
    finally:
        pool.call([0], "limit_file_size", bytes_=-1)
    pool.leave([0, 1])


@pytest.mark.parametrize("variables", [{}, PIPELINE], ids=["lane", "channels"])
def test_shared_segments_are_released(pool: Any, variables: dict[str, str]) -> None:
    """Check that neither a name nor memory remains after survivors have left the group."""
    before = pool.call(range(3), "count_segments")  # torch keeps some segments of earlier jobs
    assert all(names == [] for _, names in before)
    pool.join(3, **variables)
    pool.call(range(3), "run_operation", op="all_reduce")
    for (during, _), (initially, _) in zip(
        pool.call(range(3), "count_segments"), before, strict=True
    ):
        assert during > initially
    for i in range(2):
        pool[i].start_case("run_operation", op="all_reduce")
    pool.kill(2)
    wait_for_errors(pool, [0, 1], MAX_DELAY_SECONDS)
    pool.leave([0, 1])
    assert pool.call([0, 1], "count_segments") == before[:2]


ENDLESS_PROGRAM = """
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


def test_programs_exit_when_a_rank_is_killed(pool: Any) -> None:
    """The programs have threads that wait for ranks, and a work on which nobody waits. They do not
    catch errors.
    """
    environment = {**os.environ, "FSCCL_CLUSTERS": "2,1", "FSCCL_SOCKET_IFNAME": "lo"}
    with ExitStack() as stack:
        programs = []
        for rank in range(3):
            command = [sys.executable, "-c", ENDLESS_PROGRAM, str(rank), str(pool.port)]
            program = subprocess.Popen(
                command,
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
            _, log = program.communicate(timeout=PATIENCE_SECONDS)
            assert program.returncode == 1, log
            assert re.search("rank 2 .*ended", log), log


@pytest.mark.parametrize("clusters", ["2", "1,1"])
def test_forked_child_does_not_end_the_group(pool: Any, clusters: str) -> None:
    pool.join(2, FSCCL_CLUSTERS=clusters)
    pool.call(range(2), "fork_child_that_destroys_group")
    pool.leave(range(2))


def test_abort_interrupts_a_wait(pool: Any) -> None:
    pool.join(2)
    pool.call(range(2), "run_operation", op="barrier")
    assert "the program aborted the group" in pool.call([0], "abort_while_waiting")[0]
    pool[1].start_case("run_operation", op="barrier")
    assert "the program aborted the group" in pool.wait_for_replies([1])[1]["error"]
    pool.leave(range(2))
