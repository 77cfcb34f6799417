from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.waiting import PATIENCE_SECONDS, wait_for

from flagscale.hosts import processes
from flagscale.hosts.processes import Process

# Unique per process, because other test suites on this machine kill their own processes.
RUN = f"20250102-030405-{os.getpid() % 0x1000000:06x}"


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process of the run whose command name contains a space and a parenthesis."""
    code = (
        "import ctypes, sys, time; ctypes.CDLL(None).prctl(15, b'a) R (b c', 0, 0, 0);"
        "print(flush=True); time.sleep(600)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "FLAGSCALE_RUN_ID": RUN},
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_live_process_is_identified_with_its_run(child: subprocess.Popen[bytes]) -> None:
    process = processes.identify_process(child.pid)
    assert process is not None
    assert processes.is_alive(process)
    assert processes.parent_pid_of(child.pid) == os.getpid()
    assert processes.belongs_to_run(child.pid, RUN)
    assert not processes.belongs_to_run(child.pid, RUN[:-1])
    assert not processes.belongs_to_run(child.pid, RUN + "0")
    assert processes.read_environment(child.pid)[b"FLAGSCALE_RUN_ID"] == RUN.encode()
    assert process in processes.find_run_processes(RUN)
    assert process not in processes.find_run_processes(RUN, exclude=[child.pid])


def test_a_zombie_is_dead(child: subprocess.Popen[bytes]) -> None:
    process = processes.identify_process(child.pid)
    assert process is not None
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not processes.is_alive(process)
    assert processes.find_run_processes(RUN) == []


def test_signal_reaches_only_the_identified_process(child: subprocess.Popen[bytes]) -> None:
    process = processes.identify_process(child.pid)
    assert process is not None
    earlier_process = Process(process.pid, process.start_ticks - 1)
    assert not processes.send_signal(earlier_process, signal.SIGKILL)
    assert not processes.send_signal(process, signal.SIGKILL, run_id="another run")
    assert processes.is_alive(process)
    assert processes.send_signal(process, signal.SIGKILL, run_id=RUN)
    child.wait()
    assert not processes.send_signal(process, signal.SIGKILL, run_id=RUN)


def test_kill_run_processes(child: subprocess.Popen[bytes]) -> None:
    assert processes.kill_run_processes(RUN, 5, exclude=[child.pid]) == processes.KilledProcesses()
    killed_processes = processes.kill_run_processes(RUN, PATIENCE_SECONDS)
    assert killed_processes.terminated == (child.pid,)
    assert killed_processes.killed == killed_processes.survivors == ()
    assert processes.kill_run_processes(RUN, 5) == processes.KilledProcesses()


def test_a_process_of_another_host_that_starts_meanwhile_is_not_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each host of a run ends its own part, also where hosts share a machine."""
    started: list[subprocess.Popen[bytes]] = []

    def start(host: str) -> int:
        variables = {"FLAGSCALE_RUN_ID": RUN, "FLAGSCALE_STATUS_DIR": str(tmp_path / host / "s")}
        started.append(subprocess.Popen(["sleep", "600"], env={**os.environ, **variables}))
        # A new program is visible a moment before its environment can be read.
        wait_for(lambda: processes.read_environment(started[-1].pid))
        return started[-1].pid

    def start_after_scan() -> Iterator[int]:
        yield from list_pids()
        start("another")

    own_pid = start("own")
    start("another")
    list_pids = processes.iter_pids
    monkeypatch.setattr(processes, "iter_pids", start_after_scan)
    monkeypatch.setenv("FLAGSCALE_STATUS_DIR", str(tmp_path / "own" / "s"))
    try:
        assert [process.pid for process in processes.find_own_processes(RUN)] == [own_pid]
        started[0].kill()
        started[0].wait()
        # Each search finds those of the other host that started after the one before.
        ended_processes = processes.kill_run_processes(RUN, 0.5, of_this_host=True)
        assert ended_processes == processes.KilledProcesses()
        assert [process.poll() for process in started[1:]] == [None] * (len(started) - 1)
    finally:
        for process in started:
            process.kill()
            process.wait()


def test_ended_process_has_no_identity() -> None:
    ended_process = subprocess.Popen(["true"])
    ended_process.wait()
    assert processes.identify_process(ended_process.pid) is None
    assert processes.parent_pid_of(ended_process.pid) is None
    assert processes.read_environment(ended_process.pid) == {}


def test_ancestors_end_before_init() -> None:
    ancestors = processes.find_ancestors(os.getpid())
    assert 1 not in ancestors
    assert os.getpid() not in ancestors
