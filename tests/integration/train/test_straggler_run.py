"""A rank that reads its data slowly is named while it does, and no other rank is."""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from support.gpu_programs import make_environment

from flagscale.status import SECTIONS, Event, read_events

pytestmark = [pytest.mark.integration, pytest.mark.torch, pytest.mark.timeout(200)]

WORKER = Path(__file__).with_name("straggler_worker.py")
ARGUMENTS = """
--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1
--global-batch-size 8 --train-iters 80 --lr 1e-3 --lr-decay-style constant --vocab-size 100
--mock-data --eval-iters 0 --num-workers 0 --distributed-backend gloo --log-interval 1
--log-timers-to-tensorboard --log-straggler
"""
SLOW_RANK = 2
SLOW = range(2, 25)
"""Steps in which it is slow, but for the first one, which contains warm-up."""
DELAY_SECONDS = 0.2
"""Time that it then takes to read the two micro-batches of a step."""


def test_straggler_is_named_until_it_recovers(tmp_path: Path) -> None:
    status, curves = tmp_path / "status", tmp_path / "curves"
    arguments = [*ARGUMENTS.split(), "--tensorboard-dir", str(curves)]
    command = [sys.executable, str(WORKER), str(status), str(SLOW_RANK), *arguments]
    result = subprocess.run(
        command, capture_output=True, text=True, env=make_environment(), check=False, timeout=150
    )
    events = {rank: read_events(status / f"rank_{rank}.jsonl")[0] for rank in range(4)}
    assert result.returncode == 0, result.stderr
    updates = [event for event in events[0] if event.event == "stragglers"]
    assert [item["rank"] for event in updates for item in event.get("stragglers")] == [SLOW_RANK]
    first, last = updates
    (straggler,) = first.get("stragglers")
    assert (straggler["host"], straggler["section"]) == ("host2", "data")
    step_seconds = statistics.fmean(sum(step.values()) for step in _read_sections(events[0], SLOW))
    assert straggler["cost"] > 0.5 * DELAY_SECONDS / step_seconds
    assert last.get("messages") == []
    assert f"warning: {first.get('messages')[0]}" in result.stdout
    assert "rank 2 (host2) works as fast as equal ranks again" in result.stdout
    # Other programs may delay a rank in single steps.
    assert _median(events[SLOW_RANK], "data") == pytest.approx(DELAY_SECONDS, abs=0.1)
    assert _median(events[0], "waiting") > 0.1
    assert _median(events[0], "data") < 0.1
    assert all(_median(events[rank], *SECTIONS) > 0.9 * DELAY_SECONDS for rank in events)
    assert _read_scalars(curves)["speed/straggler-cost"][-1] == 0.0


def _read_sections(events: list[Event], steps: range) -> list[dict[str, float]]:
    """Return the seconds of the sections of each of these steps that was measured."""
    return [
        {name: event.get(name) for name in SECTIONS}
        for event in events
        if event.event == "sections" and event.get("step") in steps
    ]


def _median(events: list[Event], *names: str) -> float:
    """Return the median over the slow steps of the sum of these sections, in seconds."""
    steps = _read_sections(events, SLOW)
    return statistics.median(sum(step[name] for name in names) for step in steps)


def _read_scalars(directory: Path) -> dict[str, list[float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(directory))
    accumulator.Reload()
    assert {f"speed/{name}-seconds" for name in SECTIONS} <= {*accumulator.Tags()["scalars"]}
    return {
        name: [item.value for item in accumulator.Scalars(name)]
        for name in accumulator.Tags()["scalars"]
    }
