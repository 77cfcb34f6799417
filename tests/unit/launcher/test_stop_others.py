"""Stopping a run whose processes belong to somebody else."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from support.launch_lab import script_of, with_process

from flagscale.config.schema import Experiment, Options
from flagscale.errors import RunStateError
from flagscale.hosts import processes
from flagscale.hosts.program import Answer, parse
from flagscale.launcher import actions
from flagscale.launcher.layout import Layout
from flagscale.launcher.planning.model import LaunchPlan
from flagscale.launcher.runners.hosts import HostRunner
from flagscale.launcher.runners.programs import stop
from flagscale.launcher.state import RunState, state_of
from flagscale.launcher.stop_result import Stopped
from flagscale.status import RUN_ID_VARIABLE

pytestmark = pytest.mark.root  # who else can be somebody else
_NOBODY = 65534


@contextmanager
def nobody() -> Iterator[None]:
    """This process without root's rights, for as long as the block lasts."""
    os.setresuid(_NOBODY, _NOBODY, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that everybody may look into: pytest's own are private."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o777)
        yield Path(name)


@pytest.fixture
def state(make_plan: Callable[..., LaunchPlan], place: Path) -> Iterator[RunState]:
    """A run of root's whose script lives."""
    made = replace(state_of(make_plan(exp_dir=place)), run_id=f"t-{os.urandom(6).hex()}")
    path = Layout(place).state
    path.parent.mkdir(parents=True)
    with subprocess.Popen(
        ["sleep", "600"], env={**os.environ, RUN_ID_VARIABLE: made.run_id}
    ) as script:
        process = processes.identify(script.pid)
        assert process is not None
        made = with_process(made, process, processes.boot_id())
        made.save(path)
        path.chmod(0o644)
        yield made
        script.kill()


def asked_by_nobody(state: RunState) -> tuple[Answer, bytes]:
    """What a stop by another user is told, and what it prints on stderr."""
    program = stop.text(state, state.hosts[0])
    done = subprocess.run(
        ["bash", "-c", program], user=_NOBODY, extra_groups=[], capture_output=True, check=True
    )
    return parse(done.stdout), done.stderr


def test_closed_is_not_gone(state: RunState) -> None:
    script = script_of(state)
    later = replace(script, start_ticks=script.start_ticks - 1)
    answer, _ = asked_by_nobody(with_process(state, later, processes.boot_id()))
    assert (answer.get("found"), answer.get("owner")) == ("0", "")
    answer, _ = asked_by_nobody(state)
    assert (answer.get("found"), answer.get("owner")) == ("1", "root")


def test_stop_says_whose_it_is(
    state: RunState, make_experiment: Callable[..., Experiment], place: Path
) -> None:
    experiment = make_experiment(exp_dir=place)
    before = Layout(place).state.read_text(encoding="utf-8")
    with nobody(), pytest.raises(RunStateError) as raised:
        actions.attend(experiment, Options("stop"))
    message = str(raised.value)
    assert f"run {state.run_id} of tiny llama lives and is root's" in message
    assert f"localhost: {state.hosts[0].pid}" in message
    assert "hint: stop it as root" in message
    assert Layout(place).state.read_text(encoding="utf-8") == before


def test_never_ended_already_while_it_lives(
    state: RunState,
    make_experiment: Callable[..., Experiment],
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(HostRunner, "stop", lambda *_: Stopped())
    with pytest.raises(RunStateError, match="none of its processes was found"):
        actions.attend(make_experiment(exp_dir=place), Options("stop"))


def test_a_host_says_whose_it_is(state: RunState) -> None:
    answer, said = asked_by_nobody(state)
    assert (answer.get("owner"), answer.get("left")) == ("root", str(state.hosts[0].pid))
    assert (said, answer.get("end")) == (b"", "yes")
    script = script_of(state)
    assert processes.is_alive(script)
