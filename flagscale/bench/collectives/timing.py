"""Timed loops of ``flagscale bench collectives``. Only the operation runs between two clock
readings.

A *step* is one iteration: a function from :mod:`.collective_calls`. On a CPU every step ends with a
clock reading (about 60 ns), and the total is the last reading minus the first. On a GPU, as in
nccl-tests, all steps are issued, the device is synchronized, and the wall clock is read. The time
of each step is measured by events in a second loop, if a selected statistic requires it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from flagscale.accelerators.device import Device
from flagscale.bench.collectives.spec import BenchSpec

Step = Callable[[], None]


@dataclass(frozen=True)
class TurnTimes:
    """One rank's times of one size in one round of the comparison, in microseconds."""

    average: float
    """Mean time of an operation."""
    samples: tuple[float, ...]
    """Time of an operation in every iteration, or in every graph replay; empty if not required."""


Marks = list[int]
"""Clock readings of the running loop in nanoseconds. Another thread reads the loop's progress
from the length of this list, at no cost to the loop.
"""


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Disable garbage collection."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def measure(
    steps: Sequence[Step],
    warmup: Sequence[Step],
    device: Device,
    spec: BenchSpec,
    marks: Marks,
    barrier: Callable[[], None],
) -> TurnTimes:
    """Time ``steps`` after ``warmup``.

    Args:
        steps: measured iterations.
        warmup: iterations before them that are not timed.
        device: this rank's device.
        spec: numbers of replays, and kind of time.
        marks: list for the clock readings; see :data:`Marks`.
        barrier: called before each timed loop; :func:`count_barriers` times in all.
    """
    operations = len(steps) * spec.iterations.aggregated
    loops = _TimedLoops(device, spec, marks, barrier)
    with _without_garbage_collection():
        if device.is_host or spec.blocking:
            total, issued, samples = loops.time_on_host(steps, warmup)
        elif spec.iterations.replays:
            total, issued, samples = loops.time_replays(steps, warmup)
        else:
            run_with_marks(warmup, marks)
            total, issued, samples = loops.time_on_device(steps)
    scale, per_sample = 1e3 * operations, 1e3 * spec.iterations.aggregated
    return TurnTimes(
        average=(issued if spec.cpu_time else total) / scale,
        samples=tuple(s / per_sample for s in samples),
    )


def count_barriers(device: Device, spec: BenchSpec) -> int:
    """Return how often :func:`measure` calls the barrier."""
    if not device.is_host and not spec.blocking:
        return 2 if _needs_samples(spec) else 1
    return (spec.iterations.replays or 1) + spec.iterations.replay_warmup


def _needs_samples(spec: BenchSpec) -> bool:
    """Return whether a statistic needs the time of every iteration."""
    return any(statistic.name != "avg" for statistic in spec.output.statistics)


def run_with_marks(steps: Sequence[Step], marks: Marks) -> None:
    """Run ``steps`` with a clock reading before the first and after each. This is the innermost
    loop.
    """
    clock = time.perf_counter_ns
    marks.clear()
    read = marks.append
    read(clock())
    for step in steps:
        step()
        read(clock())


LoopTimes = tuple[float, float, list[float]]
"""Times of one loop over the steps in nanoseconds: until all steps have finished, until all are
issued, and of each sample.
"""


@dataclass(frozen=True)
class _TimedLoops:
    """Timed loops on a host, on a device, and with a captured graph."""

    device: Device
    spec: BenchSpec
    marks: Marks
    barrier: Callable[[], None]

    def time_on_host(self, steps: Sequence[Step], warmup: Sequence[Step]) -> LoopTimes:
        """Time steps that have finished when they return, or are synchronized here."""
        if not self.device.is_host:
            steps, warmup = (
                [self._synchronized(step) for step in sequence] for sequence in (steps, warmup)
            )
        loop, marks = self.spec.iterations, self.marks
        totals: list[int] = []
        samples: list[float] = []
        for number in range((loop.replays or 1) + loop.replay_warmup):
            run_with_marks(warmup, marks)
            self.barrier()
            # Ranks that share cores leave a barrier up to a millisecond apart, which would distort
            # a few iterations. One more operation synchronizes them better.
            run_with_marks(warmup[:1], marks)
            run_with_marks(steps, marks)
            if number >= loop.replay_warmup:
                totals.append(marks[-1] - marks[0])
                samples += [b - a for a, b in pairwise(marks)]
        mean = sum(totals) / len(totals)
        return mean, mean, samples

    def _synchronized(self, step: Step) -> Step:
        def run() -> None:
            step()
            self.device.synchronize()

        return run

    def time_on_device(self, steps: Sequence[Step]) -> LoopTimes:
        """Time all steps by issuing them and synchronizing the device. Each step is timed by events
        in a second loop, if a statistic requires it.
        """
        total, issued = self._time_loop(steps)
        return total, issued, self._time_samples(steps) if _needs_samples(self.spec) else []

    def time_replays(self, steps: Sequence[Step], warmup: Sequence[Step]) -> LoopTimes:
        """Time replays of a graph of all steps. A sample is a replay's time divided by its number
        of steps.
        """
        # A first call allocates and connects, which must not happen during the capture.
        run_with_marks(warmup or steps, self.marks)
        self.device.synchronize()

        def all_steps() -> None:
            for step in steps:
                step()

        replay = self.device.capture_graph(all_steps)
        for _ in range(self.spec.iterations.replay_warmup or 1):
            replay()
        count = self.spec.iterations.replays or 1
        total, issued, samples = self.time_on_device([replay] * count)
        return total / count, issued / count, [s / len(steps) for s in samples]

    def _time_loop(self, steps: Sequence[Step]) -> tuple[float, float]:
        """Return the time until all steps have finished, and until they are issued."""
        # Events only if required: recording one takes some microseconds.
        events = self._create_events(2) if self.spec.timing == "events" else []
        self.device.synchronize()
        self.barrier()
        begin = time.perf_counter_ns()
        for event in events[:1]:
            event.record()
        for step in steps:
            step()
        issued = time.perf_counter_ns() - begin
        for event in events[1:]:
            event.record()
        self.device.synchronize()
        wall = time.perf_counter_ns() - begin
        self.marks[:] = [0] * (len(steps) + 1)
        return (events[0].elapsed_time(events[1]) * 1e6 if events else wall), issued

    def _time_samples(self, steps: Sequence[Step]) -> list[float]:
        events = self._create_events(len(steps) + 1)
        self.device.synchronize()
        self.barrier()
        events[0].record()
        for step, event in zip(steps, events[1:], strict=True):
            step()
            event.record()
        self.device.synchronize()
        self.marks[:] = [0] * (len(steps) + 2)
        return [a.elapsed_time(b) * 1e6 for a, b in pairwise(events)]

    def _create_events(self, count: int) -> list[Any]:
        return [self.device.create_event(timed=True) for _ in range(count)]
