"""A profile of some steps of a rank: a trace to look at, and a summary to read.

``profile_step_start`` is the first step in it, ``profile_step_end`` the first one after it, as in
Megatron-LM. By default torch's profiler records and writes a trace for Perfetto or TensorBoard;
without ``use_pytorch_profiler`` only a range of the chip's own profiler is marked, such as for
``nsys profile --capture-range=cudaProfilerApi``.
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from flagscale.errors import ConfigError
from flagscale.train.device import Device

# The first pattern that a kernel's name matches counts.
_KINDS: tuple[tuple[str, str], ...] = (
    ("compiled", r"^triton"),
    ("communication", r"nccl|fsccl|gloo|AllReduce|AllGather|ReduceScatter|SendRecv"),
    ("attention", r"attention|flash|fmha|sdpa|cudnn"),
    ("matrix products in 8 bits", r"nvjet_sm\d+_q|e4m3|e5m2|f8f8"),
    ("matrix products", r"gemm|nvjet|cutlass|cublas|xmma|splitK"),
    ("optimizer and norm", r"adam|multi_tensor_apply|lpnorm"),
    ("copies", r"mem(cpy|set)|copy|cat|fill"),
)

_MOST, _WIDTH = 12, 100
"""Of single kernels in a summary: how many, and how many letters of each name."""


class Profiler:
    """Records the steps that the arguments name. Call :meth:`before` and :meth:`after` each."""

    def __init__(
        self, args: argparse.Namespace, rank: int, device: Device, say: Callable[[str], None]
    ) -> None:
        self._wanted = bool(args.profile) and rank in (args.profile_ranks or (0,))
        self._first, self._end = args.profile_step_start, args.profile_step_end
        self._trace = bool(args.use_pytorch_profiler)
        self._path = Path(args.profile_dir or args.tensorboard_dir or ".") / (
            f"profile_rank{rank}_steps{self._first}-{self._end - 1}.json.gz"
        )
        self._device, self._say = device, say
        self._running: Any = None
        self._end_range: Callable[[], None] | None = None

    def before(self, step: int) -> None:
        """``step`` is about to begin."""
        if not self._wanted or step != self._first:
            return
        if not self._trace:
            self._start_range()
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if activity := self._device.accelerator.profiler_activity:
            activities.append(torch.profiler.ProfilerActivity.__members__[activity])
        self._device.synchronize()
        self._running = torch.profiler.profile(activities=activities)
        self._running.start()

    def after(self, step: int) -> None:
        """``step`` is done, as far as the host goes."""
        if self._wanted and step == self._end - 1:
            self.close()

    def close(self) -> None:
        """End the recording, if one is going on, and say where it is."""
        if self._running is None:
            return
        self._device.synchronize()
        running, self._running = self._running, None
        if self._end_range is not None:
            self._end_range()
            return
        running.stop()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        running.export_chrome_trace(str(self._path))
        self._path.chmod(0o600)
        self._say(f"trace of steps {self._first} to {self._end - 1}: {self._path}")
        if activity := self._device.accelerator.profiler_activity:
            for line in summary(_kernels(running, activity), self._end - self._first):
                self._say(line)

    def _start_range(self) -> None:
        marks = self._device.accelerator.profiler_range()
        if marks is None:
            raise ConfigError(
                "profile: without use_pytorch_profiler only a chip's own profiler is told, and "
                f"none is known of the {self._device.accelerator.shown} that this rank trains on",
                hint="set use_pytorch_profiler: true",
            )
        start, self._end_range = marks
        start()
        self._running = True


def _kernels(profile: Any, activity: str) -> dict[str, float]:
    """Milliseconds of each kernel's name, of the devices that ``activity`` records."""
    found: dict[str, float] = defaultdict(float)
    for event in profile.events():
        on_device = str(event.device_type).endswith(activity)
        if on_device and not getattr(event, "is_user_annotation", False):
            found[event.name] += event.time_range.elapsed_us() / 1e3
    return found


def summary(kernels: Mapping[str, float], steps: int) -> Iterable[str]:
    """What the device's time went to, a line a kind.

    Args:
        kernels: milliseconds by a kernel's name, over all ``steps``.
        steps: how many there were.
    """
    kinds: dict[str, float] = defaultdict(float)
    for name, milliseconds in kernels.items():
        kinds[kind_of(name)] += milliseconds / steps
    total = sum(kinds.values())
    yield f"{total:,.1f} ms of kernels a step"
    for kind, milliseconds in sorted(kinds.items(), key=lambda item: -item[1]):
        yield f"  {kind:<26} {milliseconds:9.1f} ms  {100 * milliseconds / max(total, 1e-9):5.1f} %"
    most = sorted(kernels.items(), key=lambda item: -item[1])[:_MOST]
    for name, milliseconds in most:
        yield f"    {milliseconds / steps:9.2f} ms  {name[:_WIDTH]}"


def kind_of(name: str) -> str:
    """What a kernel is for, by its name."""
    for kind, pattern in _KINDS:
        if re.search(pattern, name, re.IGNORECASE):
            return kind
    return "other"
