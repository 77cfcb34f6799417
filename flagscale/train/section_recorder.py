"""Measurement of the sections of a training step, as :mod:`.section_times` defines them.

A step is divided into consecutive intervals, each of which belongs to one section. On a CPU the
boundaries are clock readings. On a device they are events on its compute stream, which cost no
synchronization: the times are read once the device has passed them. What the compute stream waits
for in a collective is waiting, also within a forward or backward pass. Communication that overlaps
with computation is therefore not counted.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch.distributed as dist

from flagscale.train.device import Device
from flagscale.train.section_times import (
    BACKWARD,
    FORWARD,
    OTHER,
    SECTIONS,
    WAITING,
    SectionTimes,
)

_COST_FRACTION = 0.003
"""Maximum cost of the measurement as a fraction of the time. More expensive steps are measured less
often."""
_TIMER_SECTIONS = {"forward-compute": FORWARD, "backward-compute": BACKWARD}
"""Sections by the names of megatron.core's timers."""
_GROUP_METHODS = (
    *("allreduce", "allreduce_coalesced", "reduce", "broadcast", "barrier"),
    *("allgather", "allgather_coalesced", "_allgather_base", "allgather_into_tensor_coalesced"),
    *("all_gather_single", "all_gather_single_coalesced", "gather", "scatter"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced"),
    *("alltoall", "alltoall_base", "all_to_all_single"),
    *("send", "recv", "recv_anysource", "_end_coalescing"),
)
"""Methods of a process group in which the caller or its stream may wait for other ranks."""


class _Clock(Protocol):
    """Measures the intervals of steps."""

    mark_seconds: float
    """Approximate cost of a mark."""

    def start(self) -> None:
        """Begin the first interval of a step."""

    def mark(self, section: str) -> None:
        """End an interval, which belonged to ``section``."""

    def finish(self) -> None:
        """End the step with the last mark."""

    def pop_steps(self) -> list[dict[str, float]]:
        """Return the seconds by section of each finished step, and forget them."""


class _HostClock:
    """Clock of a device whose operations are synchronous."""

    mark_seconds = 1e-6

    def __init__(self) -> None:
        self._steps: list[dict[str, float]] = []
        self._seconds: dict[str, float] = {}
        self._last_mark = 0.0

    def start(self) -> None:
        self._seconds = dict.fromkeys(SECTIONS, 0.0)
        self._last_mark = time.perf_counter()

    def mark(self, section: str) -> None:
        now = time.perf_counter()
        self._seconds[section] += now - self._last_mark
        self._last_mark = now

    def finish(self) -> None:
        self._steps.append(self._seconds)

    def pop_steps(self) -> list[dict[str, float]]:
        steps, self._steps = self._steps, []
        return steps


class _StreamClock:
    """Clock of a device: events on the stream that is current when a step starts."""

    # Recording an event and reading it later.
    mark_seconds = 5e-6

    def __init__(self, device: Device) -> None:
        self._device = device
        self._stream: Any = None
        self._unused_events: list[Any] = []
        self._marks: list[tuple[Any, str]] = []
        # Steps that the device may not have finished yet.
        self._pending_steps: deque[list[tuple[Any, str]]] = deque()
        self._steps: list[dict[str, float]] = []

    def start(self) -> None:
        self._stream = self._device.accelerator.module.current_stream()
        self._marks = []
        self.mark(OTHER)

    def mark(self, section: str) -> None:
        events = self._unused_events
        event = events.pop() if events else self._device.create_event(timed=True)
        event.record(self._stream)
        self._marks.append((event, section))

    def finish(self) -> None:
        self._pending_steps.append(self._marks)
        # Limits the number of events in a long interval between two reports.
        self._read_finished_steps()

    def pop_steps(self) -> list[dict[str, float]]:
        self._read_finished_steps()
        steps, self._steps = self._steps, []
        return steps

    def _read_finished_steps(self) -> None:
        while self._pending_steps and self._pending_steps[0][-1][0].query():
            marks = self._pending_steps.popleft()
            seconds = dict.fromkeys(SECTIONS, 0.0)
            for (begin, _), (end, section) in itertools.pairwise(marks):
                seconds[section] += begin.elapsed_time(end) / 1e3
            self._steps.append(seconds)
            self._unused_events += [event for event, _ in marks]


class SectionRecorder:
    """Measures the sections of steps. Outside of a measured step, all calls return at once."""

    def __init__(self, device: Device) -> None:
        self._clock: _Clock = _HostClock() if device.is_host else _StreamClock(device)
        # The backward pass of a device runs on a thread of torch while this one waits for it. On
        # the host, only other work runs on other threads.
        self._thread = threading.get_ident() if device.is_host else None
        self._current: str | None = None
        self._marks = 0
        self._measured_at = 0.0
        self._cost_seconds = 0.0
        _install_wait_hooks()

    def start_step(self) -> None:
        """Start measuring a step, unless too much time was spent on measuring recent ones."""
        now = time.monotonic()
        if (now - self._measured_at) * _COST_FRACTION >= self._cost_seconds:
            self._measured_at, self._marks, self._current = now, 0, OTHER
            _set_active_recorder(self)
            self._clock.start()

    def finish_step(self) -> None:
        """End the step."""
        if self._current is not None:
            self._clock.mark(self._current)
            self._clock.finish()
            self._current = None
            self._cost_seconds = (self._marks + 2) * self._clock.mark_seconds
            _set_active_recorder(None)

    def enter(self, section: str) -> str | None:
        """Begin a section, and return the one that it interrupts, for :meth:`leave`."""
        previous, thread = self._current, threading.get_ident()
        if previous is None or self._thread not in (None, thread) or thread in _other_threads:
            return None
        if previous != section:
            self._clock.mark(previous)
            self._current = section
            self._marks += 1
        return previous

    def leave(self, previous: str | None) -> None:
        """End a section and continue the one that it interrupted."""
        if previous is not None and self._current not in (None, previous):
            self.enter(previous)

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Context manager that measures its body as a section."""
        previous = self.enter(name)
        try:
            yield
        finally:
            self.leave(previous)

    def pop_times(self) -> SectionTimes | None:
        """Return the times since the last call; None if no step was measured.

        Steps that the device has not finished are left for the next call.
        """
        steps = self._clock.pop_steps()
        if not steps:
            return None
        work_seconds = [sum(step.values()) - step[WAITING] for step in steps]
        return SectionTimes(
            len(steps),
            {name: statistics.fmean(step[name] for step in steps) for name in SECTIONS},
            statistics.median(work_seconds),
        )


class SectionTimers:
    """The ``timers`` that megatron.core's schedules start and stop around passes."""

    def __init__(self, recorder: SectionRecorder) -> None:
        self._timers = {
            name: SectionTimer(recorder, section) for name, section in _TIMER_SECTIONS.items()
        }
        self._unused_timer = SectionTimer(recorder, None)

    def __call__(self, name: str, log_level: int | None = None) -> SectionTimer:
        return self._timers.get(name, self._unused_timer)

    def __deepcopy__(self, memo: Any) -> SectionTimers:
        # Layers copy their configuration.
        return self


class SectionTimer:
    """Timer of megatron.core that measures a section; without one it does nothing."""

    def __init__(self, recorder: SectionRecorder, section: str | None) -> None:
        self._recorder = recorder
        self._section = section
        self._previous: str | None = None

    def start(self, barrier: bool = False) -> None:
        """Begin the section. ``barrier`` is ignored: waiting for others is measured by itself."""
        if self._section is not None:
            self._previous = self._recorder.enter(self._section)

    def stop(self, barrier: bool = False) -> None:
        """End the section."""
        if self._section is not None:
            self._recorder.leave(self._previous)


_other_threads: set[int] = set()
"""Identities of threads that do something else than the steps of training."""


def ignore_this_thread() -> None:
    """Leave the calling thread out of the measurement, also where other threads count."""
    _other_threads.add(threading.get_ident())


_active_recorder: SectionRecorder | None = None
"""Recorder of the step that this process measures now."""


def _set_active_recorder(recorder: SectionRecorder | None) -> None:
    global _active_recorder  # noqa: PLW0603 - the hooks are those of the process
    _active_recorder = recorder


@functools.cache
def _install_wait_hooks() -> None:
    """Count the time of communication calls as waiting.

    The methods of torch's classes are replaced once, and not for each step, because compiled code
    may depend on their identity.
    """
    for owner, names in ((dist.ProcessGroup, _GROUP_METHODS), (dist.Work, ("wait",))):
        for name in names:
            method = getattr(owner, name, None)  # some exist in some versions of torch only
            if method is not None:
                setattr(owner, name, _count_as_waiting(method))


def _count_as_waiting(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        recorder = _active_recorder
        if recorder is None:
            return method(*args, **kwargs)
        previous = recorder.enter(WAITING)
        try:
            return method(*args, **kwargs)
        finally:
            recorder.leave(previous)

    return call
