"""Tests of stopping a run whose processes belong to another user."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from support.launch_lab import script_process, with_process

from flagscale.config.schema import Experiment, Options
from flagscale.errors import RunStateError
from flagscale.hosts import processes
from flagscale.hosts.program import ProgramOutput, parse_output
from flagscale.launcher import actions
from flagscale.launcher.layout import Layout
from flagscale.launcher.planning.model import LaunchPlan
from flagscale.launcher.runners.hosts import HostRunner
from flagscale.launcher.runners.programs import stop
from flagscale.launcher.state import RunState, make_state
from flagscale.launcher.stop_result import StopResult
from flagscale.status import RUN_ID_VARIABLE

pytestmark = pytest.mark.root  # who else can be somebody else
_NOBODY = 65534


@contextmanager
def without_root() -> Iterator[None]:
    """Drop this process's root privileges within the block."""
    os.setresuid(_NOBODY, _NOBODY, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that is readable for all users, unlike pytest's."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o777)
        yield Path(name)


@pytest.fixture
def state(make_plan: Callable[..., LaunchPlan], place: Path) -> Iterator[RunState]:
    """A run of root whose script is alive."""
    plan = replace(make_state(make_plan(exp_dir=place)), run_id=f"t-{os.urandom(6).hex()}")
    path = Layout(place).state
    path.parent.mkdir(parents=True)
    with subprocess.Popen(
        ["sleep", "600"], env={**os.environ, RUN_ID_VARIABLE: plan.run_id}
    ) as script:
        process = processes.identify_process(script.pid)
        assert process is not None
        plan = with_process(plan, process, processes.read_boot_id())
        plan.save(path)
        path.chmod(0o644)
        yield plan
        script.kill()


def stop_as_other_user(state: RunState) -> tuple[ProgramOutput, bytes]:
    """Return the error of a stop by another user, and its output on stderr."""
    program = stop.render_stop(state, state.hosts[0])
    result = subprocess.run(
        ["bash", "-c", program], user=_NOBODY, extra_groups=[], capture_output=True, check=True
    )
    return parse_output(result.stdout), result.stderr


def test_unreadable_process_is_not_considered_ended(state: RunState) -> None:
    script = script_process(state)
    later = replace(script, start_ticks=script.start_ticks - 1)
    output, _ = stop_as_other_user(with_process(state, later, processes.read_boot_id()))
    assert (output.get("found"), output.get("owner")) == ("0", "")
    output, _ = stop_as_other_user(state)
    assert (output.get("found"), output.get("owner")) == ("1", "root")


def test_stop_names_the_owner(
    state: RunState, make_experiment: Callable[..., Experiment], place: Path
) -> None:
    experiment = make_experiment(exp_dir=place)
    state_before = Layout(place).state.read_text(encoding="utf-8")
    with without_root(), pytest.raises(RunStateError) as raised:
        actions.run_on_existing(experiment, Options("stop"))
    message = str(raised.value)
    assert f"run {state.run_id} of tiny llama is alive and belongs to root" in message
    assert f"localhost: {state.hosts[0].pid}" in message
    assert "hint: stop it as root" in message
    assert Layout(place).state.read_text(encoding="utf-8") == state_before


def test_living_run_is_not_reported_as_ended(
    state: RunState,
    make_experiment: Callable[..., Experiment],
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(HostRunner, "stop", lambda *_: StopResult())
    with pytest.raises(RunStateError, match="none of its processes was found"):
        actions.run_on_existing(make_experiment(exp_dir=place), Options("stop"))


def test_host_reports_the_owner(state: RunState) -> None:
    stop_output, output = stop_as_other_user(state)
    assert (stop_output.get("owner"), stop_output.get("left")) == ("root", str(state.hosts[0].pid))
    assert (output, stop_output.get("end")) == (b"", "yes")
    script = script_process(state)
    assert processes.is_alive(script)
