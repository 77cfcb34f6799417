"""Tests of the program that ends a run on a host, run by this machine's bash."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from support.waiting import PATIENCE_SECONDS, wait_for

from flagscale.hosts import processes
from flagscale.hosts.hostfile import Host
from flagscale.hosts.program import ProgramOutput, parse_output
from flagscale.launcher.planning.model import LaunchPlan
from flagscale.launcher.runners.programs import stop
from flagscale.launcher.state import RunState, make_state
from flagscale.status import RUN_ID_VARIABLE

MakePlan = Callable[..., LaunchPlan]
Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def state(make_plan: MakePlan, tmp_path: Path) -> RunState:
    plan = make_state(make_plan(hosts=(Host("h0"), Host("h1")), exp_dir=tmp_path / "exp"))
    return replace(plan, run_id=f"t-{os.urandom(6).hex()}", stop_grace=5.0)


@pytest.fixture
def start(state: RunState) -> Iterator[Start]:
    """Start a bash script, by default as a process of the run."""
    with ExitStack() as exit_stack:

        def started(script: str, run_id: str = state.run_id) -> subprocess.Popen[bytes]:
            environment = {**os.environ, RUN_ID_VARIABLE: run_id}
            argv = ["bash", "-c", f"echo ready; {script}"]
            process = exit_stack.enter_context(
                subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE)
            )
            exit_stack.callback(process.kill)
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            return process

        yield started


def run(text: str) -> ProgramOutput:
    result = subprocess.run(
        ["bash", "-c", text], capture_output=True, check=True, timeout=PATIENCE_SECONDS
    )
    assert result.stderr == b""
    return parse_output(result.stdout)


def host_of(state: RunState, script: subprocess.Popen[bytes] | None = None) -> str:
    identity = processes.identify_process(script.pid) if script else None
    host = replace(
        state.hosts[0],
        boot_id=processes.read_boot_id(),
        pid=identity.pid if identity else None,
        start_ticks=identity.start_ticks if identity else None,
    )
    return stop.render_stop(state, host)


def test_only_processes_with_the_run_id_are_ended(state: RunState, start: Start) -> None:
    run_process, ignoring_term = (
        start("exec sleep 600"),
        start("trap '' TERM; while :; do sleep 0.1; done"),
    )
    other_run_process = start("exec sleep 600", f"{state.run_id}0")
    output = run(host_of(state))
    assert int(output.get("found")) >= 2
    assert str(run_process.pid) in output.get("terminated").split()
    assert str(ignoring_term.pid) in output.get("killed").split()
    assert output.get("left") == ""
    assert (run_process.wait(), ignoring_term.wait(), other_run_process.poll()) == (-15, -9, None)
    second_output = run(host_of(state))
    assert (second_output.get("found"), second_output.get("end")) == ("0", "yes")


def test_descendants_of_the_script_are_ended(state: RunState, start: Start) -> None:
    script = start("env -i sleep 600 & echo begun; wait")
    assert script.stdout is not None
    assert script.stdout.readline() == b"begun\n"
    output = run(host_of(state, script))
    assert int(output.get("found")) == 2
    assert script.wait() == -15
    assert script.stdout.read() == b""  # whoever could write to it has ended


def test_descendants_without_environment_that_ignore_term_are_killed(
    state: RunState, start: Start
) -> None:
    script = start("env -i bash -c \"trap '' TERM; echo begun; exec sleep 600\" & wait")
    assert script.stdout is not None
    assert script.stdout.readline() == b"begun\n"
    output = run(host_of(state, script))
    assert (output.get("found"), output.get("left")) == ("2", "")
    assert len(output.get("killed").split()) == 1
    assert script.stdout.read() == b""


def test_another_run_below_the_script_is_left_alone(state: RunState, start: Start) -> None:
    script = start(f"{RUN_ID_VARIABLE}=another bash -c 'env -i sleep 600 & echo $$; wait' & wait")
    assert script.stdout is not None
    other_pid = int(script.stdout.readline())
    (child,) = processes.find_descendants(other_pid, "another")
    output = run(host_of(state, script))
    assert output.get("found") == "1"
    assert script.wait() == -15
    alive = [processes.identify_process(pid) is not None for pid in (child.pid, other_pid)]
    # The parent first: it ends when its child does.
    for pid in (other_pid, child.pid):
        os.kill(pid, signal.SIGKILL)
    assert alive == [True, True]


def test_reused_pid_is_spared(state: RunState, start: Start) -> None:
    other_process = start("exec sleep 600", "other")
    identity = processes.identify_process(other_process.pid)
    assert identity is not None
    later = replace(
        state.hosts[0],
        boot_id=processes.read_boot_id(),
        pid=other_process.pid,
        start_ticks=identity.start_ticks - 1,
    )
    assert run(stop.render_stop(state, later)).get("found") == "0"
    # The last look, right before a signal.
    functions = host_of(state).partition("exec {idle_fd}")[0]
    pid, ticks = identity.pid, identity.start_ticks
    tries = (
        f"started[{pid}]={ticks - 1}; send_signal KILL {pid} || report early spared\n"
        f"started[{pid}]={ticks}; send_signal KILL {pid} && report exact sent\n"
    )
    output = run(functions + tries + "print_results\n")
    assert (output.get("early"), output.get("exact")) == ("spared", "sent")
    assert other_process.wait() == -9


@pytest.mark.skipif(os.geteuid() != 0, reason="acts as another user")
def test_unreadable_process_of_the_same_user_is_spared(state: RunState) -> None:
    """The environment of an ssh-agent cannot be read, not even by its owner."""
    as_nobody = ("setpriv", "--reuid=65534", "--clear-groups")
    with tempfile.TemporaryDirectory() as directory:
        os.chown(directory, 65534, 65534)
        argv = [*as_nobody, "ssh-agent", "-D", "-a", f"{directory}/socket"]
        with subprocess.Popen(argv, stdout=subprocess.DEVNULL) as agent:
            try:
                wait_for(Path(directory, "socket").exists)
                program = ["bash", "-c", host_of(state, agent)]
                readable = subprocess.run(
                    [*as_nobody, "test", "-r", f"/proc/{agent.pid}/environ"], check=False
                )
                assert readable.returncode == 1
                result = subprocess.run([*as_nobody, *program], capture_output=True, check=True)
                assert parse_output(result.stdout).get("found") == "0"
                assert agent.poll() is None
            finally:
                agent.kill()


def test_an_earlier_boots_pids_mean_nothing(state: RunState, start: Start) -> None:
    member = start("exec sleep 600")
    text = stop.render_stop(state, replace(state.hosts[0], boot_id="another"))
    assert run(text).get("end") == "yes"
    assert member.poll() is None
