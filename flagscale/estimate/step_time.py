"""Estimated duration of a step, and of each stage's computation in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean


@dataclass(frozen=True)
class StepTime:
    """Estimated duration of a step.

    ``seconds`` is the step's duration, ``busy_seconds`` the time in which each stage computes, and
    ``basis`` a text for messages: measured layers, or peaks of the devices.
    """

    seconds: float
    busy_seconds: tuple[float, ...]
    basis: str

    @property
    def idle_fractions(self) -> tuple[float, ...]:
        """Fraction of the step in which each stage waits."""
        return tuple(1.0 - busy / self.seconds for busy in self.busy_seconds)

    @property
    def imbalance(self) -> float:
        """Relative excess of the busiest stage over the mean.

        It is an upper bound of the time that a better split of layers can save in a step of many
        micro-batches.
        """
        return max(self.busy_seconds) / fmean(self.busy_seconds) - 1.0


def select_peaks(
    known_peaks: Sequence[float | None], configured_peak: float | None, *, is_homogeneous: bool
) -> list[float | None]:
    """Return the peak TFLOP/s of each stage's devices.

    If all devices are of one type, the user's ``peak_tflops`` takes precedence over known peaks;
    in a heterogeneous job it applies to devices whose peak is unknown.
    """
    return [
        configured_peak or peak if is_homogeneous else peak or configured_peak
        for peak in known_peaks
    ]


def explain_unknown_time(
    kinds: Sequence[str | None], peaks: Sequence[float | None], *, sixteen_bit: bool
) -> str:
    """Return the reason why the duration of a step cannot be estimated."""
    if not sixteen_bit:
        return "what share of a device's peak is reached was measured with bf16: true alone"
    kinds_without_peak = dict.fromkeys(k for k, p in zip(kinds, peaks, strict=True) if not p)
    names = [kind for kind in kinds_without_peak if kind is not None]
    scope = f"of type={' and '.join(names)}" if names else "without type= in a hostfile"
    return f"no peak is known {scope}, and train.system.peak_tflops gives none"


def describe_step_time(step_time: StepTime | None, reason: str) -> Iterator[str]:
    """Describe the duration of a step and of each stage's computation, or the reason why it is
    unknown.
    """
    if step_time is None:
        yield f"how long stages compute and wait is not known: {reason}"
        return
    yield f"a step takes {step_time.seconds:.3g} s, {step_time.basis}"
    stage_texts = ", ".join(
        f"stage {index} for {format_seconds(busy)} of it (idle {idle:.0%})"
        for index, (busy, idle) in enumerate(
            zip(step_time.busy_seconds, step_time.idle_fractions, strict=True)
        )
    )
    yield (
        f"computing: {stage_texts}; the busiest stage {step_time.imbalance:.0%} longer than "
        "stages on average"
    )


def format_seconds(seconds: float) -> str:
    """Format a duration, such as ``1.24 s`` or ``31.5 ms``."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
