"""Tests of programs that hang: the launcher names the rank to blame and the collective."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.launch_lab import PROJECT, Lab
from support.waiting import wait_for

from flagscale.flight_records import RAW_PREFIX, flight_directory
from flagscale.launcher.failures import read_job_record

pytestmark = [pytest.mark.integration, pytest.mark.torch]

PROGRAM = PROJECT / "tests" / "support" / "hang_program.py"
DATA_GROUP = r"the data-parallel group of ranks 0-2"
OTHERS = "ranks 0 and 1"
SINCE = r"since \d\d:\d\d:\d\d"
THEY_WAIT = f"{OTHERS} have waited in it {SINCE}"
KINDS = {
    "asleep": rf"never entered all_reduce #5 of the default group; {THEY_WAIT}; "
    r"it is in `time\.sleep\(FOREVER\)  # the loader` at hang_program\.py:\d+",
    "storage": rf"never entered all_reduce #4 of {DATA_GROUP}; {THEY_WAIT}; it is "
    r"in `path\.read_bytes\(\)` at hang_program\.py:\d+",
    "operation": rf"called all_gather as #4 of the default group, where {OTHERS} called "
    rf"all_reduce, {SINCE}; it is in `dist\.all_gather",
    "shape": rf"called all_reduce #4 of {DATA_GROUP} with \[5\] Float, where {OTHERS} passed "
    rf"\[4\] Float, {SINCE}; it is in `dist\.all_reduce",
    "order": rf"called broadcast as #4 of the default group, where {OTHERS} called all_reduce: the "
    rf"same operations in another order, {SINCE}",
    "missing": rf"never entered all_reduce #4 of {DATA_GROUP}; {THEY_WAIT}; it is "
    r"in `",
    "group": rf"waits in all_reduce #4 of group 'first' of ranks 0-2 for {OTHERS}, which wait in "
    rf"all_reduce #4 of {DATA_GROUP} for it, {SINCE}",
    "deadlock": rf"waits in all_reduce #4 of {DATA_GROUP} for {OTHERS}, which wait in all_reduce "
    rf"#4 of group 'first' of ranks 0-2 for it, {SINCE}",
    "stopped": rf"never entered all_reduce #4 of the default group; {THEY_WAIT}; "
    r"its process is stopped \(SIGSTOP\)",
    "message": rf"never entered barrier #4 of the default group; rank 1 has waited in it {SINCE}; "
    r"it is in `time\.sleep",
    "chain": rf"never entered all_reduce #\d of .*; .* {SINCE}; it is in `time\.sleep",
}
# fsccl detects these by itself, and gloo that a peer has ended: the ranks fail at once.
FAILURES = {
    (
        "gloo",
        "dead",
    ): r"rank 2 \(localhost\) ended with exit code 0 before the end of all_reduce #",
    ("fsccl", "operation"): r"rank 2 \[[^]]*\] called all_gather #4",
    ("fsccl", "shape"): r"called all_reduce #4 of 16 bytes .* rank 2 .* all_reduce #4 of 20 bytes",
    ("fsccl", "order"): r"rank 2 \[[^]]*\] called broadcast #4",
}


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    lab = Lab(tmp_path, tmp_path / "exp")
    yield lab
    lab.kill_processes()


def start_program(lab: Lab, kind: str, backend: str, **runner: float) -> None:
    """Start the program on three ranks, with a timeout that no test waits for."""
    command = [sys.executable, str(PROGRAM), kind, backend, "600"]
    options = {"nproc_per_node": 3, "preflight": False, "hang_detection_timeout": 2, **runner}
    lab.configure("", task={"type": "command", "command": command}, runner=options)
    lab.start("test")
    wait_for(lab.layout.state.exists)


def expect_explanation(lab: Lab, kind: str, backend: str) -> None:
    sentence = FAILURES.get((backend, kind)) or rf"flagscale: rank 2 \(localhost\) {KINDS[kind]}"
    expected = re.compile(sentence)
    try:
        wait_for(lambda: expected.search(lab.output()))
    except TimeoutError:
        raise AssertionError(f"{expected.pattern}\n{lab.output()}") from None


def test_sleeping_rank_of_another_program_is_named_and_the_job_goes_on(lab: Lab) -> None:
    start_program(lab, "asleep", "gloo")
    expect_explanation(lab, "asleep", "gloo")
    host = lab.state().hosts[0]
    sentence = re.compile(rf"rank 2 \(localhost\) {KINDS['asleep']}")
    wait_for(lambda: sentence.match(read_job_record([host])["hang"]))
    assert "never entered" in lab.run_action("query").stdout
    assert lab.run_processes()
    directory = flight_directory(host.run_dir / "status")
    wait_for(lambda: len(list(directory.glob(f"{RAW_PREFIX}*"))) == 3)
    assert str(directory) in lab.output()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["gloo", "fsccl"])
@pytest.mark.parametrize("kind", [*KINDS, "dead"])
def test_kinds_of_hangs(lab: Lab, kind: str, backend: str) -> None:
    if (backend, kind) == ("fsccl", "dead"):
        pytest.skip("fsccl waits for the rendezvous of the ended rank")
    start_program(lab, kind, backend)
    expect_explanation(lab, kind, backend)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["gloo", "fsccl"])
def test_slow_run_is_no_hang(lab: Lab, backend: str) -> None:
    """Each of its collectives waits for 1.5 seconds."""
    start_program(lab, "slow", backend, hang_detection_timeout=6)
    lab.wait_until_ended(120)
    assert "rank 2" not in lab.output()
    assert read_job_record(lab.state().hosts)["failure"] is None
