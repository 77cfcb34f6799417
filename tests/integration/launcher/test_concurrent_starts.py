"""Several launchers at once in one experiment directory, some of them killed at random moments.

``FLAGSCALE_START_ROUNDS`` and ``FLAGSCALE_START_SEED`` repeat the test with other random values.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from support.launch_lab import Lab
from support.waiting import PATIENCE_SECONDS, wait_for

from flagscale.hosts import processes
from flagscale.hosts.processes import identify_process
from flagscale.launcher.state import load_state
from flagscale.status import RUN_ID_VARIABLE

pytestmark = pytest.mark.integration

ROUNDS = int(os.environ.get("FLAGSCALE_START_ROUNDS", "3"))
SEED = int(os.environ.get("FLAGSCALE_START_SEED", "1"))
LAUNCHERS = 6
KILL_WITHIN_SECONDS = 2.5
"""Launchers are killed at a random moment of this interval after their start."""


def live_run_ids(lab: Lab) -> set[str]:
    """Return the ids of the runs of the experiment that have live processes, from /proc.

    They run in the directory from which they were started. A script, the first process of its run,
    does not have the status directory in its environment.
    """
    name = f"{RUN_ID_VARIABLE}=".encode()
    run_ids = set()
    for process in processes_in(lab.root):
        with suppress(OSError):
            entries = (process / "environ").read_bytes().split(b"\0")
            run_ids |= {e.removeprefix(name).decode() for e in entries if e.startswith(name)}
    return run_ids


def processes_in(directory: Path) -> Iterator[Path]:
    """Yield the directories in /proc of the processes that have this working directory."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (process / "cwd").readlink() == directory:
                yield process


def has_host_programs(lab: Lab) -> bool:
    """Return whether a program that a launcher has sent to this host is still at work."""
    for process in processes_in(lab.root):
        with suppress(OSError):
            if b'eval "$script"' in (process / "cmdline").read_bytes():
                return True
    return False


def start_launcher(lab: Lab, *, preflight: bool) -> subprocess.Popen[str]:
    return lab.start(
        "run",
        "experiment.task.type=command",
        "experiment.task.command=[sleep, '600']",
        f"experiment.runner.preflight={str(preflight).lower()}",
        "experiment.runner.wait_for=none",
    )


@pytest.mark.parametrize("number", range(ROUNDS))
def test_of_several_launchers_one_run_remains_and_is_found(lab: Lab, number: int) -> None:
    generator = random.Random(f"{SEED}-{number}")
    lab.configure("", light=False)
    survivor = None
    if generator.random() < 0.5:  # a live run is there already
        first = start_launcher(lab, preflight=False)
        assert first.wait(60) == 0
        (survivor,) = live_run_ids(lab)
    preflight = generator.random() < 0.5
    launchers = [start_launcher(lab, preflight=preflight) for _ in range(LAUNCHERS)]
    began = time.monotonic()
    killed = generator.sample(launchers, generator.choice((0, 1, 3, 6)))
    for delay, launcher in sorted(
        (generator.uniform(0, KILL_WITHIN_SECONDS), index) for index, launcher in enumerate(killed)
    ):
        time.sleep(max(0.0, began + delay - time.monotonic()))
        killed[launcher].send_signal(signal.SIGKILL)
    outputs = [launcher.communicate(timeout=PATIENCE_SECONDS)[0] for launcher in launchers]
    # Programs that a killed launcher has sent to the host may still be at work.
    wait_for(lambda: not has_host_programs(lab))
    live = live_run_ids(lab)
    assert len(live) <= 1, outputs
    if survivor is not None:
        assert live == {survivor}, outputs
    assert sum(launcher.returncode == 0 for launcher in launchers) <= len(live), outputs
    if not killed and survivor is None:
        assert len(live) == 1, outputs
    if live:
        state = load_state(lab.layout.state)
        assert state is not None
        assert {state.run_id} == live, outputs
        stopped = lab.run_action("stop")
        assert stopped.returncode == 0, stopped.stderr
        wait_for(lambda: not live_run_ids(lab), seconds=20)


def test_a_process_that_a_state_names_without_the_runs_id_is_left_alone(lab: Lab) -> None:
    lab.configure("", light=False)
    assert start_launcher(lab, preflight=False).wait(60) == 0
    state = lab.state()
    foreign = subprocess.Popen(["bash", "-c", "sleep 600 & wait"], start_new_session=True)
    try:
        identity = identify_process(foreign.pid)
        assert identity is not None
        text = lab.layout.state.read_text(encoding="utf-8")
        host = state.hosts[0]
        text = text.replace(f'"pid": {host.pid}', f'"pid": {identity.pid}')
        text = text.replace(
            f'"start_ticks": {host.start_ticks}', f'"start_ticks": {identity.start_ticks}'
        )
        lab.layout.state.write_text(text, encoding="utf-8")
        assert lab.state().hosts[0].pid == foreign.pid
        stopped = lab.run_action("stop")
        assert stopped.returncode == 0, stopped.stderr
        assert foreign.poll() is None
        assert processes.find_run_processes(state.run_id) == []
    finally:
        os.killpg(foreign.pid, signal.SIGKILL)
        foreign.wait()
