"""Tests of messages about a stop that killed processes, or that could not be recorded."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from flagscale.errors import RunStateError
from flagscale.files import write_json
from flagscale.hosts.hostfile import Host
from flagscale.hosts.processes import KilledProcesses
from flagscale.launcher.layout import EXIT_FILE, STATUS_DIRECTORY, Layout
from flagscale.launcher.planning.model import LaunchPlan
from flagscale.launcher.state import RunState, load_state, make_state
from flagscale.launcher.stop_result import (
    StopResult,
    describe_lost_work,
    killed_ranks,
    record_stop,
    require_recorded,
)

# Of the first host, with their pids.
RANKS = {0: 10, 1: 11}


@pytest.fixture
def state(make_plan: Callable[..., LaunchPlan], tmp_path: Path) -> RunState:
    plan = make_state(make_plan(hosts=(Host("h1", 2), Host("h2", 2)), exp_dir=tmp_path / "exp"))
    for host in plan.hosts:
        (host.run_dir / STATUS_DIRECTORY).mkdir(parents=True)
    return replace(plan, stop_grace=60.0)


@pytest.mark.parametrize(
    ("killed_processes", "killed", "expected"),
    [
        pytest.param({"h1": KilledProcesses((1, 2))}, {}, "", id="nobody"),
        pytest.param({"h1": KilledProcesses()}, {"h1": (1,)}, "rank 1 on h1", id="one"),
        pytest.param(
            {"h1": KilledProcesses(), "h2": KilledProcesses()},
            {"h1": (1,), "h2": (2, 3)},
            "ranks 1, 2, 3 on h[1-2]",
            id="hosts",
        ),
        pytest.param(
            {"h1": KilledProcesses()},
            {"h1": tuple(range(12))},
            "ranks 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 … on h1",
            id="many",
        ),
        pytest.param({"h2": KilledProcesses((), (5, 6))}, {}, "2 process(es) on h2", id="unknown"),
        pytest.param(
            {"h1": KilledProcesses((), (9,)), "h2": KilledProcesses((), (5, 6))}, {"h1": (0,)},
            "rank 0 on h1 and 2 process(es) on h2", id="both",
        ),
    ],
)  # fmt: skip
def test_killed_ranks(
    state: RunState,
    killed_processes: dict[str, KilledProcesses],
    killed: dict[str, tuple[int, ...]],
    expected: str,
) -> None:
    description = describe_lost_work(state, StopResult(killed_processes, killed=killed), 0.0)
    assert (
        description.partition(" did not end within the 60 s of runner.stop_grace ")[0] == expected
    )


@pytest.mark.parametrize(
    ("external", "since", "expected"),
    [
        (False, 100.0, "the checkpoint of step 5 was saved on the way"),
        (True, 100.0, "the checkpoint of step 5 was saved on the way"),
        (False, 101.0, "no checkpoint was saved on the way"),
        (True, 101.0, "what was not saved is lost"),
    ],
)
def test_saved_checkpoint(state: RunState, external: bool, since: float, expected: str) -> None:
    path = state.hosts[1].run_dir / STATUS_DIRECTORY / "rank_3.jsonl"
    path.write_text(json.dumps({"time": 100.5, "event": "checkpoint", "step": 5}) + "\n")
    description = describe_lost_work(
        replace(state, external=external), StopResult(killed={"h1": (1,)}), since
    )
    assert description.endswith(f" and was killed; {expected}")


@pytest.mark.parametrize(
    ("record", "killed_processes", "expected"),
    [
        pytest.param(None, KilledProcesses(ranks=RANKS), (), id="unknown"),
        pytest.param(None, KilledProcesses((), (11, 99), ranks=RANKS), (1,), id="after-the-agent"),
        pytest.param(
            {"phase": "job", "swept": [10, 98]},
            KilledProcesses((11,), ranks=RANKS),
            (0,),
            id="by-the-agent",
        ),
        pytest.param(
            {"phase": "agent", "swept": [10]},
            KilledProcesses(ranks=RANKS),
            (),
            id="without-the-agent",
        ),
    ],
)
def test_ranks_by_their_pids(
    state: RunState,
    record: dict[str, object] | None,
    killed_processes: KilledProcesses,
    expected: tuple[int, ...],
) -> None:
    host = state.hosts[0]
    if record is not None:
        write_json(host.run_dir / EXIT_FILE, record)
    assert killed_ranks(host, killed_processes) == expected


def test_state_of_a_later_run_is_unchanged(state: RunState) -> None:
    path = Layout(state.exp_dir).state
    assert record_stop(state) is None
    assert not path.exists()
    state.save(path)
    stopping = replace(state, stop_requested=5.0)
    assert record_stop(replace(stopping, run_id="earlier")) is None
    assert load_state(path) == state
    assert record_stop(stopping) is None
    assert load_state(path) == stopping


def test_stop_that_could_not_be_recorded(state: RunState) -> None:
    require_recorded(state, StopResult())
    error = OSError(errno.ENOSPC, "No space left on device", "/x/state.json")
    with pytest.raises(RunStateError, match=r"could not be recorded: /x/state.json: No space"):
        require_recorded(state, StopResult(unrecorded=error))
