"""The timed loops. Nothing runs between two clock readings but the operation.

On a CPU every iteration ends with a reading of the clock (some 60 ns), and the time of all is the
last reading minus the first. On a GPU, as nccl-tests does, all iterations are issued, the device
is awaited and the wall clock read; single iterations are timed in a second pass, by events, and
only when a statistic asks for them.
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
class Measured:
    """One rank's times of one size, in microseconds."""

    average: float
    """Of an operation."""
    samples: tuple[float, ...]
    """Of every iteration, or of every replay of many; empty when nobody asked."""


Marks = list[int]
"""Clock readings of the loop that runs, in nanoseconds. Its length tells a watching thread how far
the loop is, at no cost to the loop."""


@contextmanager
def _undisturbed() -> Iterator[None]:
    """No garbage collection in between."""
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
    start: Callable[[], None],
) -> Measured:
    """Time ``steps`` after ``warmup``; ``start`` brings the ranks together before."""
    operations = len(steps) * spec.iterations.aggregated
    loops = _Loops(device, spec, marks, start)
    with _undisturbed():
        if device.is_host or spec.blocking:
            total, issued, samples = loops.on_host(steps, warmup)
        elif spec.iterations.replays:
            total, issued, samples = loops.replays(steps, warmup)
        else:
            run_marked(warmup, marks)
            total, issued, samples = loops.on_device(steps)
    scale, per_sample = 1e3 * operations, 1e3 * spec.iterations.aggregated
    return Measured(
        average=(issued if spec.cpu_time else total) / scale,
        samples=tuple(s / per_sample for s in samples),
    )


def gatherings(device: Device, spec: BenchSpec) -> int:
    """How often :func:`measure` brings the ranks together."""
    if not device.is_host and not spec.blocking:
        return 2 if _needs_samples(spec) else 1
    return (spec.iterations.replays or 1) + spec.iterations.replay_warmup


def _needs_samples(spec: BenchSpec) -> bool:
    """Whether a statistic needs the time of every iteration."""
    return any(statistic.name != "avg" for statistic in spec.output.statistics)


def run_marked(steps: Sequence[Step], marks: Marks) -> None:
    """Run ``steps``, the clock read before the first and after each. The innermost loop."""
    clock = time.perf_counter_ns
    marks.clear()
    read = marks.append
    read(clock())
    for step in steps:
        step()
        read(clock())


Times = tuple[float, float, list[float]]
"""Nanoseconds of one pass over the steps: until finished, until issued; and of each sample."""


@dataclass(frozen=True)
class _Loops:
    """The ways to time steps."""

    device: Device
    spec: BenchSpec
    marks: Marks
    start: Callable[[], None]

    def on_host(self, steps: Sequence[Step], warmup: Sequence[Step]) -> Times:
        """Each step has finished when it returns, or is awaited here."""
        if not self.device.is_host:
            steps, warmup = ([self._awaited(step) for step in some] for some in (steps, warmup))
        loop, marks = self.spec.iterations, self.marks
        totals: list[int] = []
        samples: list[float] = []
        for number in range((loop.replays or 1) + loop.replay_warmup):
            run_marked(warmup, marks)
            self.start()
            # Ranks leave a barrier apart by a millisecond where they share cores. An operation
            # brings them closer than any barrier, and few iterations must not carry that.
            run_marked(warmup[:1], marks)
            run_marked(steps, marks)
            if number >= loop.replay_warmup:
                totals.append(marks[-1] - marks[0])
                samples += [b - a for a, b in pairwise(marks)]
        mean = sum(totals) / len(totals)
        return mean, mean, samples

    def _awaited(self, step: Step) -> Step:
        def run() -> None:
            step()
            self.device.synchronize()

        return run

    def on_device(self, steps: Sequence[Step]) -> Times:
        """All steps issued, then the device awaited; single ones in a second pass, by events."""
        total, issued = self._pass(steps)
        return total, issued, self._samples(steps) if _needs_samples(self.spec) else []

    def replays(self, steps: Sequence[Step], warmup: Sequence[Step]) -> Times:
        """The steps captured in a graph; a sample is a replay over its number of steps."""
        # What a first call allocates or connects must not happen within the capture.
        run_marked(warmup or steps, self.marks)
        self.device.synchronize()

        def all_steps() -> None:
            for step in steps:
                step()

        replay = self.device.capture(all_steps)
        for _ in range(self.spec.iterations.replay_warmup or 1):
            replay()
        count = self.spec.iterations.replays or 1
        total, issued, samples = self.on_device([replay] * count)
        return total / count, issued / count, [s / len(steps) for s in samples]

    def _pass(self, steps: Sequence[Step]) -> tuple[float, float]:
        """Until all steps are finished and until they are issued."""
        # None without need: to record one takes some us.
        events = self._events(2) if self.spec.timing == "events" else []
        self.device.synchronize()
        self.start()
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

    def _samples(self, steps: Sequence[Step]) -> list[float]:
        events = self._events(len(steps) + 1)
        self.device.synchronize()
        self.start()
        events[0].record()
        for step, event in zip(steps, events[1:], strict=True):
            step()
            event.record()
        self.device.synchronize()
        self.marks[:] = [0] * (len(steps) + 2)
        return [a.elapsed_time(b) * 1e6 for a, b in pairwise(events)]

    def _events(self, count: int) -> list[Any]:
        return [self.device.event(timed=True) for _ in range(count)]
