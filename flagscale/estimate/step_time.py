"""How long a step is, and how long each stage computes in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean


@dataclass(frozen=True)
class Timed:
    """Seconds of a step, those in which each stage computes, and what they are known by."""

    seconds: float
    busy: tuple[float, ...]
    by: str

    @property
    def idle(self) -> tuple[float, ...]:
        """Share of the step in which each stage waits."""
        return tuple(1.0 - busy / self.seconds for busy in self.busy)

    @property
    def imbalance(self) -> float:
        """By how much the busiest stage computes longer than stages do on average: what a better
        split of the layers could take from a step of many micro-batches at most."""
        return max(self.busy) / fmean(self.busy) - 1.0


def peaks_of(
    known: Sequence[float | None], given: float | None, *, alike: bool
) -> list[float | None]:
    """The peak of each stage's devices. What the YAML gives (``peak_tflops``) counts before what is
    known where all devices are alike; of unlike ones it is that of those that nobody knows."""
    return [given or peak if alike else peak or given for peak in known]


def unknown(
    kinds: Sequence[str | None], peaks: Sequence[float | None], *, sixteen_bit: bool
) -> str:
    """Why nobody can tell how long a step takes."""
    if not sixteen_bit:
        return "what share of a device's peak is reached was measured with bf16: true alone"
    lacking = dict.fromkeys(k for k, p in zip(kinds, peaks, strict=True) if not p)
    names = [kind for kind in lacking if kind is not None]
    of = f"of type={' and '.join(names)}" if names else "without type= in a hostfile"
    return f"no peak is known {of}, and train.system.peak_tflops gives none"


def sentences(timed: Timed | None, why: str) -> Iterator[str]:
    """A step's time and each stage's part of it; ``why`` it is not known where it is not."""
    if timed is None:
        yield f"how long stages compute and wait is not known: {why}"
        return
    yield f"a step takes {timed.seconds:.3g} s, {timed.by}"
    each = ", ".join(
        f"stage {index} for {shown(busy)} of it (idle {idle:.0%})"
        for index, (busy, idle) in enumerate(zip(timed.busy, timed.idle, strict=True))
    )
    yield (
        f"computing: {each}; the busiest stage {timed.imbalance:.0%} longer than stages on average"
    )


def shown(seconds: float) -> str:
    """Such as ``1.24 s``, ``31.5 ms``."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
