"""Profiling of selected training steps: a trace file and a summary in the log.

As in Megatron-LM, ``profile_step_start`` is the first profiled step and ``profile_step_end`` the
first step that is no longer profiled. By default torch's profiler writes a trace for Perfetto or
TensorBoard. Without ``use_pytorch_profiler`` the steps are only marked as a range for the vendor's
profiler, for example for ``nsys profile --capture-range=cudaProfilerApi``.
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

# Category and regular expression of a kernel's name. The first match counts.
_KERNEL_CATEGORIES: tuple[tuple[str, str], ...] = (
    ("compiled", r"^triton"),
    ("communication", r"nccl|fsccl|gloo|AllReduce|AllGather|ReduceScatter|SendRecv"),
    ("attention", r"attention|flash|fmha|sdpa|cudnn"),
    ("8-bit GEMM", r"nvjet_sm\d+_q|e4m3|e5m2|f8f8"),
    ("GEMM", r"gemm|nvjet|cutlass|cublas|xmma|splitK"),
    ("optimizer and norm", r"adam|multi_tensor_apply|lpnorm"),
    ("copies", r"mem(cpy|set)|copy|cat|fill"),
)

_MAX_LISTED_KERNELS = 12
"""Maximum number of single kernels in the summary."""
_MAX_NAME_LENGTH = 100
"""Maximum number of characters of a kernel's name in the summary."""


class Profiler:
    """Profiles the steps selected by the arguments.

    Call :meth:`before_step` and :meth:`after_step` around each step.
    """

    def __init__(
        self, args: argparse.Namespace, rank: int, device: Device, log: Callable[[str], None]
    ) -> None:
        self._enabled = bool(args.profile) and rank in (args.profile_ranks or (0,))
        self._first_step, self._end_step = args.profile_step_start, args.profile_step_end
        self._use_torch_profiler = bool(args.use_pytorch_profiler)
        self._path = Path(args.profile_dir or args.tensorboard_dir or ".") / (
            f"profile_rank{rank}_steps{self._first_step}-{self._end_step - 1}.json.gz"
        )
        self._device, self._log = device, log
        self._profile: Any = None
        self._end_range: Callable[[], None] | None = None

    def before_step(self, step: int) -> None:
        """Start the profile if ``step`` is its first step."""
        if not self._enabled or step != self._first_step:
            return
        if not self._use_torch_profiler:
            self._start_range()
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if activity := self._device.accelerator.profiler_activity:
            activities.append(torch.profiler.ProfilerActivity.__members__[activity])
        self._device.synchronize()
        self._profile = torch.profiler.profile(activities=activities)
        self._profile.start()

    def after_step(self, step: int) -> None:
        """End the profile if ``step`` was its last step."""
        if self._enabled and step == self._end_step - 1:
            self.close()

    def close(self) -> None:
        """Stop a running profile, write the trace, and log its path and the summary."""
        if self._profile is None:
            return
        self._device.synchronize()
        profile, self._profile = self._profile, None
        if self._end_range is not None:
            self._end_range()
            return
        profile.stop()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(self._path))
        self._path.chmod(0o600)
        self._log(f"trace of steps {self._first_step} to {self._end_step - 1}: {self._path}")
        if activity := self._device.accelerator.profiler_activity:
            for line in summarize_kernels(
                _sum_kernel_times(profile, activity), self._end_step - self._first_step
            ):
                self._log(line)

    def _start_range(self) -> None:
        """Start a range of the vendor's profiler."""
        range_functions = self._device.accelerator.profiler_range()
        if range_functions is None:
            raise ConfigError(
                "profile: without use_pytorch_profiler only the vendor's profiler is used, which "
                f"is not supported for the {self._device.accelerator.display_name} of this rank",
                hint="set use_pytorch_profiler: true",
            )
        start, self._end_range = range_functions
        start()
        self._profile = True


def _sum_kernel_times(profile: Any, activity: str) -> dict[str, float]:
    """Return the total milliseconds of each kernel on devices of a profiler ``activity``."""
    kernel_ms: dict[str, float] = defaultdict(float)
    for event in profile.events():
        on_device = str(event.device_type).endswith(activity)
        if on_device and not getattr(event, "is_user_annotation", False):
            kernel_ms[event.name] += event.time_range.elapsed_us() / 1e3
    return kernel_ms


def summarize_kernels(kernels: Mapping[str, float], steps: int) -> Iterable[str]:
    """Yield a summary of the kernels' time, one line per category, then the longest kernels.

    Args:
        kernels: total milliseconds over all ``steps``, by kernel name.
        steps: number of profiled steps.
    """
    category_ms: dict[str, float] = defaultdict(float)
    for name, milliseconds in kernels.items():
        category_ms[classify_kernel(name)] += milliseconds / steps
    total = sum(category_ms.values())
    yield f"{total:,.1f} ms of kernels per step"
    for category, milliseconds in sorted(category_ms.items(), key=lambda item: -item[1]):
        percentage = 100 * milliseconds / max(total, 1e-9)
        yield f"  {category:<26} {milliseconds:9.1f} ms  {percentage:5.1f} %"
    longest = sorted(kernels.items(), key=lambda item: -item[1])[:_MAX_LISTED_KERNELS]
    for name, milliseconds in longest:
        yield f"    {milliseconds / steps:9.2f} ms  {name[:_MAX_NAME_LENGTH]}"


def classify_kernel(name: str) -> str:
    """Return the category of a kernel."""
    for category, pattern in _KERNEL_CATEGORIES:
        if re.search(pattern, name, re.IGNORECASE):
            return category
    return "other"
