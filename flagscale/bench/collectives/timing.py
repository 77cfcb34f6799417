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

import torch

from flagscale.bench.collectives.devices import BenchDevice
from flagscale.bench.collectives.spec import BenchSpec

Step = Callable[[], None]


@dataclass(frozen=True)
class Measured:
    """One rank's times of one size, in microseconds."""

    average: float
    """Of an operation."""
    samples: tuple[float, ...]
    """Of every iteration, or of every replay of many; empty when nobody asked."""
    issue: float
    """To issue an operation."""


@dataclass
class Marks:
    """Clock readings of the loop that runs, in nanoseconds. Its length tells a watching thread
    how far the loop is, at no cost to the loop."""

    readings: list[int]


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
    device: BenchDevice,
    spec: BenchSpec,
    marks: Marks,
    start: Callable[[], None],
) -> Measured:
    """Time ``steps`` after ``warmup``; ``start`` brings the ranks together before."""
    operations = len(steps) * spec.iterations.aggregated
    with _undisturbed():
        if device.is_cuda and not spec.blocking:
            loop = _replays if spec.iterations.replays else _device_loop
            total, issued, samples = loop(steps, warmup, device, spec, marks, start)
        else:
            total, issued, samples = _host_loops(steps, warmup, device, spec, marks, start)
    scale = 1e3 * operations
    per_sample = 1e3 * spec.iterations.aggregated
    return Measured(
        average=(issued if spec.cpu_time else total) / scale,
        samples=tuple(s / per_sample for s in samples),
        issue=issued / scale,
    )


def meetings(device: BenchDevice, spec: BenchSpec) -> int:
    """How often :func:`measure` brings the ranks together."""
    if device.is_cuda and not spec.blocking:
        return 2 if any(s.needs_samples for s in spec.output.statistics) else 1
    return (spec.iterations.replays or 1) + spec.iterations.replay_warmup


Loop = tuple[float, float, list[float]]
"""Nanoseconds of one pass over the steps: until finished, until issued; and of each sample."""


def _host_loops(
    steps: Sequence[Step],
    warmup: Sequence[Step],
    device: BenchDevice,
    spec: BenchSpec,
    marks: Marks,
    start: Callable[[], None],
) -> Loop:
    """Each step has finished when it returns, or is awaited here."""
    if device.is_cuda:
        steps, warmup = ([_awaited(step, device) for step in some] for some in (steps, warmup))
    rounds = (spec.iterations.replays or 1) + spec.iterations.replay_warmup
    totals: list[int] = []
    samples: list[float] = []
    for number in range(rounds):
        run_marked(warmup, marks)
        start()
        # Ranks come out of their meeting apart by a millisecond where they share cores. An
        # operation brings them closer than any meeting, and few iterations must not carry that.
        run_marked(warmup[:1], marks)
        run_marked(steps, marks)
        if number < spec.iterations.replay_warmup:
            continue
        readings = marks.readings
        totals.append(readings[-1] - readings[0])
        samples += [b - a for a, b in pairwise(readings)]
    mean = sum(totals) / len(totals)
    return mean, mean, samples


def run_marked(steps: Sequence[Step], marks: Marks) -> None:
    """Run ``steps``, the clock read before the first and after each. The innermost loop."""
    clock = time.perf_counter_ns
    marks.readings = []
    read = marks.readings.append
    read(clock())
    for step in steps:
        step()
        read(clock())


def _awaited(step: Step, device: BenchDevice) -> Step:
    def run() -> None:
        step()
        device.synchronize()

    return run


def _device_loop(
    steps: Sequence[Step],
    warmup: Sequence[Step],
    device: BenchDevice,
    spec: BenchSpec,
    marks: Marks,
    start: Callable[[], None],
) -> Loop:
    run_marked(warmup, marks)
    total, issued = _pass(steps, device, spec, marks, start)
    samples: list[float] = []
    if any(s.needs_samples for s in spec.output.statistics):
        samples = _event_samples(steps, device, marks, start)
    return total, issued, samples


def _pass(
    steps: Sequence[Step],
    device: BenchDevice,
    spec: BenchSpec,
    marks: Marks,
    start: Callable[[], None],
) -> tuple[float, float]:
    """All steps issued, then the device awaited: until finished and until issued, in ns."""
    events = _events(2) if spec.timing == "events" else []  # to record one takes some us
    device.synchronize()
    start()
    begin = time.perf_counter_ns()
    for event in events[:1]:
        event.record()
    for step in steps:
        step()
    issued = time.perf_counter_ns() - begin
    for event in events[1:]:
        event.record()
    device.synchronize()
    wall = time.perf_counter_ns() - begin
    marks.readings = [0] * (len(steps) + 1)
    return (events[0].elapsed_time(events[1]) * 1e6 if events else wall), issued


def _events(count: int) -> list[Any]:
    return [torch.cuda.Event(enable_timing=True) for _ in range(count)]  # type: ignore[no-untyped-call]


def _event_samples(
    steps: Sequence[Step], device: BenchDevice, marks: Marks, start: Callable[[], None]
) -> list[float]:
    events = _events(len(steps) + 1)
    device.synchronize()
    start()
    events[0].record()
    for step, event in zip(steps, events[1:], strict=True):
        step()
        event.record()
    device.synchronize()
    marks.readings = [0] * (len(steps) + 2)
    return [a.elapsed_time(b) * 1e6 for a, b in pairwise(events)]


def _replays(
    steps: Sequence[Step],
    warmup: Sequence[Step],
    device: BenchDevice,
    spec: BenchSpec,
    marks: Marks,
    start: Callable[[], None],
) -> Loop:
    """The steps captured in a CUDA graph; a sample is a replay over its number of steps."""
    # What a first call allocates or connects must not happen within the capture.
    run_marked(warmup or steps, marks)
    device.synchronize()

    def all_steps() -> None:
        for step in steps:
            step()

    replay = device.capture(all_steps)
    for _ in range(spec.iterations.replay_warmup or 1):
        replay()
    count = spec.iterations.replays or 1
    total, issued = _pass([replay] * count, device, spec, marks, start)
    samples: list[float] = []
    if any(s.needs_samples for s in spec.output.statistics):
        samples = _event_samples([replay] * count, device, marks, start)
    return total / count, issued / count, [s / len(steps) for s in samples]
