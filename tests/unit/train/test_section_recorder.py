"""Measurement of the sections of a step."""

from __future__ import annotations

import copy
import threading
import time
from types import SimpleNamespace

import pytest

from flagscale.train.section_times import (
    BACKWARD,
    DATA,
    FORWARD,
    OPTIMIZER,
    OTHER,
    SECTIONS,
    WAITING,
)

pytestmark = pytest.mark.torch


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Time in seconds, as the only item."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_sections_of_a_step(clock: list[float]) -> None:
    from flagscale.accelerators.device import current_device
    from flagscale.train.section_recorder import SectionRecorder, SectionTimers

    recorder = SectionRecorder(current_device())
    timers = copy.deepcopy(SectionTimers(recorder))  # as layers copy their configuration
    for _ in range(2):
        recorder.start_step()
        clock[0] += 1
        timers("forward-compute", log_level=2).start()
        with recorder.section(DATA):
            clock[0] += 2
            with recorder.section(WAITING):  # data that another rank reads
                clock[0] += 4
        clock[0] += 8
        timers("forward-compute").stop()
        timers("backward-compute", log_level=2).start()
        clock[0] += 16
        timers("backward-compute").stop()
        timers("all-grads-sync", log_level=1).start(barrier=False)
        with recorder.section(WAITING), recorder.section(WAITING):
            clock[0] += 32
        timers("all-grads-sync").stop()
        with recorder.section(OPTIMIZER):
            clock[0] += 64
        clock[0] += 128
        recorder.finish_step()
        clock[0] += 1000  # an evaluation
    times = recorder.pop_times()
    assert times is not None
    assert times.steps == 2
    assert times.seconds == {
        **dict.fromkeys(SECTIONS, 0.0),
        **{DATA: 2, FORWARD: 8, BACKWARD: 16, OPTIMIZER: 64, WAITING: 36, OTHER: 129},
    }
    assert (times.work_seconds, times.step_seconds) == (219, 255)
    assert recorder.pop_times() is None


def test_steps_are_measured_less_often_if_measuring_is_expensive(clock: list[float]) -> None:
    from flagscale.accelerators.device import current_device
    from flagscale.train.section_recorder import SectionRecorder

    recorder = SectionRecorder(current_device())
    for _ in range(100):
        recorder.start_step()
        for _ in range(1000):  # 2 ms of marks, in a step of 0.1 s
            with recorder.section(DATA):
                clock[0] += 0.0001
        recorder.finish_step()
    times = recorder.pop_times()
    assert times is not None
    assert 13 <= times.steps <= 17


@pytest.mark.usefixtures("single_process_group")
def test_communication_is_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    import torch.distributed as dist

    from flagscale.accelerators.device import current_device
    from flagscale.train import section_recorder

    recorder = section_recorder.SectionRecorder(current_device())
    entered: list[tuple[str, bool]] = []
    enter = recorder.enter

    def record(section: str) -> str | None:
        is_main = threading.current_thread() is threading.main_thread()
        entered.append((section, is_main))
        return enter(section)

    monkeypatch.setattr(recorder, "enter", record)
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert entered == []  # not in a step
    recorder.start_step()
    dist.all_reduce(tensor)
    assert entered.count((WAITING, True)) >= 2  # the call, and Work.wait
    del entered[:]
    dist.all_gather_into_tensor(torch.empty(2), tensor, async_op=True).wait()
    assert entered.count((WAITING, True)) >= 2
    thread = threading.Thread(target=dist.all_reduce, args=(tensor,))
    thread.start()
    thread.join()
    recorder.finish_step()
    times = recorder.pop_times()
    assert times is not None
    assert 0 < times.seconds[WAITING] < times.step_seconds


class _Stream:
    """Stream of a device that has reached the event ``reached``; an event takes 1 ms."""

    def __init__(self) -> None:
        self.recorded = self.reached = self.created = 0

    def create_event(self, *, timed: bool) -> _Event:
        assert timed
        self.created += 1
        return _Event(self)


class _Event:
    def __init__(self, stream: _Stream) -> None:
        self.stream, self.number = stream, 0

    def record(self, stream: _Stream) -> None:
        stream.recorded += 1
        self.number = stream.recorded

    def query(self) -> bool:
        return self.number <= self.stream.reached

    def elapsed_time(self, end: _Event) -> float:
        assert end.query()
        return float(end.number - self.number)


def test_times_of_a_device_are_read_when_it_has_passed_the_step() -> None:
    from flagscale.train.section_recorder import SectionRecorder

    stream = _Stream()
    accelerator = SimpleNamespace(module=SimpleNamespace(current_stream=lambda: stream))
    device = SimpleNamespace(
        is_host=False, accelerator=accelerator, create_event=stream.create_event
    )
    recorder = SectionRecorder(device)  # type: ignore[arg-type]

    def run_step() -> None:
        recorder._cost_seconds = 0.0
        recorder.start_step()
        with recorder.section(FORWARD), recorder.section(WAITING):
            pass
        recorder.finish_step()

    run_step()
    run_step()
    assert recorder.pop_times() is None
    stream.reached = stream.recorded - 1
    times = recorder.pop_times()
    assert times is not None
    assert times.steps == 1
    assert times.work_seconds == pytest.approx(0.004)
    assert times.seconds[WAITING] == pytest.approx(0.001)
    assert times.seconds[FORWARD] == pytest.approx(0.002)
    events = stream.created
    stream.reached = stream.recorded
    for _ in range(10):
        run_step()
        stream.reached = stream.recorded
    assert stream.created == events, "events are used again"
    times = recorder.pop_times()
    assert times is not None
    assert times.steps == 11


@pytest.mark.parametrize("is_ignored", [False, True], ids=["autograd", "ignored"])
def test_other_threads_of_a_device_count_unless_they_are_ignored(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, is_ignored: bool
) -> None:
    from flagscale.accelerators.device import current_device
    from flagscale.train import section_recorder

    monkeypatch.setattr(section_recorder, "_other_threads", set())
    recorder = section_recorder.SectionRecorder(current_device())
    monkeypatch.setattr(recorder, "_thread", None)  # as on a device

    def wait() -> None:
        if is_ignored:
            section_recorder.ignore_this_thread()
        with recorder.section(WAITING):
            clock[0] += 3

    recorder.start_step()
    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    recorder.finish_step()
    times = recorder.pop_times()
    assert times is not None
    assert times.seconds[OTHER if is_ignored else WAITING] == 3
