"""The program that ends a run on a host, run by bash on this machine."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from flagscale.hosts import processes
from flagscale.hosts.hostfile import Host
from flagscale.hosts.program import Answer, parse
from flagscale.launcher.planning.model import LaunchPlan
from flagscale.launcher.runners.programs import stop
from flagscale.launcher.state import RunState, state_of
from flagscale.status import RUN_ID_VARIABLE

MakePlan = Callable[..., LaunchPlan]
Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def state(make_plan: MakePlan, tmp_path: Path) -> RunState:
    made = state_of(make_plan(hosts=(Host("h0"), Host("h1")), exp_dir=tmp_path / "exp"))
    return replace(made, run_id=f"t-{os.urandom(6).hex()}", stop_grace=1.0)


@pytest.fixture
def start(state: RunState) -> Iterator[Start]:
    """Starts a bash script, as a process of the run unless told otherwise."""
    with ExitStack() as ended:

        def started(script: str, run_id: str = state.run_id) -> subprocess.Popen[bytes]:
            environment = {**os.environ, RUN_ID_VARIABLE: run_id}
            words = ["bash", "-c", f"echo ready; {script}"]
            process = ended.enter_context(
                subprocess.Popen(words, env=environment, stdout=subprocess.PIPE)
            )
            ended.callback(process.kill)
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            return process

        yield started


def run(text: str) -> Answer:
    done = subprocess.run(["bash", "-c", text], capture_output=True, check=True, timeout=60)
    assert done.stderr == b""
    return parse(done.stdout)


def host_of(state: RunState, script: subprocess.Popen[bytes] | None = None) -> str:
    identity = processes.identify(script.pid) if script else None
    host = replace(
        state.hosts[0],
        boot_id=processes.boot_id(),
        pid=identity.pid if identity else None,
        start_ticks=identity.start_ticks if identity else None,
    )
    return stop.text(state, host)


def test_exactly_what_carries_the_runs_id_is_ended(state: RunState, start: Start) -> None:
    own, deaf = start("exec sleep 600"), start("trap '' TERM; while :; do sleep 0.1; done")
    other = start("exec sleep 600", f"{state.run_id}0")
    answer = run(host_of(state))
    assert int(answer.get("found")) >= 2
    assert str(own.pid) in answer.get("terminated").split()
    assert str(deaf.pid) in answer.get("killed").split()
    assert answer.get("left") == ""
    assert (own.wait(), deaf.wait(), other.poll()) == (-15, -9, None)
    again = run(host_of(state))
    assert (again.get("found"), again.get("end")) == ("0", "yes")


def test_what_a_script_has_started_is_found_below_it(state: RunState, start: Start) -> None:
    script = start("env -i sleep 600 & echo begun; wait")
    assert script.stdout is not None
    assert script.stdout.readline() == b"begun\n"
    answer = run(host_of(state, script))
    assert int(answer.get("found")) == 2
    assert script.wait() == -15
    assert script.stdout.read() == b""  # whoever could write to it has ended


def test_a_pid_that_belongs_to_another_process_by_now_is_spared(
    state: RunState, start: Start
) -> None:
    stranger = start("exec sleep 600", "other")
    identity = processes.identify(stranger.pid)
    assert identity is not None
    later = replace(
        state.hosts[0],
        boot_id=processes.boot_id(),
        pid=stranger.pid,
        start_ticks=identity.start_ticks - 1,
    )
    assert run(stop.text(state, later)).get("found") == "0"
    # The last look, right before a signal.
    functions = host_of(state).partition("exec {never}")[0]
    pid, ticks = identity.pid, identity.start_ticks
    tries = (
        f"started[{pid}]={ticks - 1}; send KILL {pid} || say early spared\n"
        f"started[{pid}]={ticks}; send KILL {pid} && say exact sent\n"
    )
    answer = run(functions + tries + "tell\n")
    assert (answer.get("early"), answer.get("exact")) == ("spared", "sent")
    assert stranger.wait() == -9


def test_an_earlier_boots_pids_mean_nothing(state: RunState, start: Start) -> None:
    own = start("exec sleep 600")
    text = stop.text(state, replace(state.hosts[0], boot_id="another"))
    assert run(text).get("end") == "yes"
    assert own.poll() is None
