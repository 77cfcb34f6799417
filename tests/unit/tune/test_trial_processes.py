"""Processes of trials: their requests to the ranks, and the steps that belong to each trial."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flagscale.config.arguments.layout_choices import ARGUMENTS_OF_GROUPS
from flagscale.config.load import load
from flagscale.config.schema import PROJECT, Experiment
from flagscale.errors import ConfigError
from flagscale.launcher.snapshot import HostRow, Phase, Snapshot
from flagscale.status import BETWEEN_TRIALS, Event
from flagscale.tune import trial_processes
from flagscale.tune.records import FAILED, MEASURED, Trial
from flagscale.tune.trial import REQUESTS_DIRECTORY
from flagscale.tune.trial_processes import _LiveProcesses, list_step_seconds

TRIAL = Trial(1, dict.fromkeys(ARGUMENTS_OF_GROUPS))


class RecordedRun:
    """Runner of a run whose snapshots are given; the last one repeats."""

    def __init__(self, snapshots: Sequence[Snapshot]) -> None:
        self._snapshots = list(snapshots)

    def query(self, _state: Any) -> Snapshot:
        return self._snapshots.pop(0) if len(self._snapshots) > 1 else self._snapshots[0]


@pytest.fixture
def experiment(tmp_path: Path) -> Experiment:
    conf = PROJECT / "examples" / "llama3" / "conf"
    words = [f"experiment.exp_dir={tmp_path}", "train.system.exit_interval=7", "action=auto_tune"]
    return load(conf, "train", words, "plan").experiment


def start_processes(experiment: Experiment, *snapshots: Snapshot) -> _LiveProcesses:
    runner: Any = RecordedRun(snapshots)
    state: Any = SimpleNamespace(hosts=[SimpleNamespace(output="host.output")])
    return _LiveProcesses(runner, state, experiment, TRIAL)


def make_snapshot(*steps_of_trials: int, phase: Phase = Phase.RUNNING, doing: str = "") -> Snapshot:
    """Return a snapshot of two ranks, of which the second reports the steps of each trial."""

    def list_events(rank: int) -> Iterator[Event]:
        for trial, steps in enumerate(steps_of_trials, 1):
            yield Event(rank, 0.0, "ready")
            for step in range(1, steps + 1):
                if rank == 1:
                    yield Event(rank, 0.0, "progress", {"step": step, "step_seconds": trial * step})

    row = HostRow("a", phase, ranks=2, joined=2, step=len(steps_of_trials), doing=doing)
    events = {rank: list(list_events(rank)) for rank in range(2)}
    return Snapshot("id", "run", phase, 0.0, 2, 2, hosts=(row,), events=events)


def read_requests(experiment: Experiment) -> dict[str, Any]:
    return {
        path.name: json.loads(path.read_text(encoding="utf-8"))["arguments"]
        for path in (experiment.exp_dir / REQUESTS_DIRECTORY).glob("*")
    }


def test_steps_belong_to_the_trial_of_their_number() -> None:
    snapshot = make_snapshot(5, 4, 1)
    assert list_step_seconds(snapshot, 1) == (3.0, 4.0, 5.0)
    assert list_step_seconds(snapshot, 2) == (6.0, 8.0)
    assert list_step_seconds(snapshot, 3) == list_step_seconds(snapshot, 4) == ()


def test_requests_are_numbered_by_trial(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = start_processes(experiment, make_snapshot(0))
    monkeypatch.setattr(trial_processes, "list_program_arguments", lambda _: ["--seed", "1"])
    live.start_next(experiment, TRIAL)
    live.request_end()
    assert read_requests(experiment) == {"2.json": ["--seed", "1"], "3.json": None}


def test_ranks_end_at_once_if_the_next_trial_has_no_arguments(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait for the request that follows their trial, and for no later one."""
    live = start_processes(experiment, make_snapshot(0))

    def fail(_experiment: Experiment) -> list[str]:
        raise ConfigError("the hosts have different arguments")

    monkeypatch.setattr(trial_processes, "list_program_arguments", fail)
    with pytest.raises(ConfigError):
        live.start_next(experiment, TRIAL)
    live.request_end()
    assert read_requests(experiment) == {"2.json": None}


def test_startup_is_measured_even_if_steps_and_end_are_seen_together(
    experiment: Experiment,
) -> None:
    """Otherwise the second trial would measure it, with the whole first one in it."""
    before_steps = make_snapshot(0, doing=BETWEEN_TRIALS)
    live = start_processes(experiment, before_steps, make_snapshot(7, doing=BETWEEN_TRIALS))
    result = live.observe(TRIAL, 60.0, 0.0, lambda _timing: False)
    assert (result.state, result.step_seconds) == (MEASURED, (3.0, 4.0, 5.0, 6.0, 7.0))
    assert live.is_waiting and live.can_run_next
    assert live._startup_seconds is not None


@pytest.mark.parametrize(("steps", "state"), [(4, MEASURED), (3, FAILED)])
def test_steps_of_a_stopped_run_count_if_there_are_enough(
    experiment: Experiment, steps: int, state: str
) -> None:
    live = start_processes(experiment, make_snapshot(steps, phase=Phase.STOPPED))
    result = live.observe(TRIAL, 60.0, 0.0, lambda _timing: False)
    assert (result.state, live.can_run_next) == (state, False)


def test_trial_over_its_limit_counts_if_it_has_enough_steps(experiment: Experiment) -> None:
    live = start_processes(experiment, make_snapshot(4))
    assert live.observe(TRIAL, -1.0, 0.0, lambda _timing: False).state == MEASURED
    live = start_processes(experiment, make_snapshot(3))
    result = live.observe(TRIAL, -1.0, 0.0, lambda _timing: False)
    assert result.failure.startswith("it reported 3 steps or fewer in -1 s")
