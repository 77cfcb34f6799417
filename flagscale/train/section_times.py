"""Sections of a training step: data, forward, backward, optimizer, and waiting for others.

Standard library alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flagscale.status import SECTIONS

__all__ = ["BACKWARD", "DATA", "FORWARD", "OPTIMIZER", "OTHER", "WAITING"]
__all__ += ["ROW_LENGTH", "SECTIONS", "SectionTimes"]

DATA, FORWARD, BACKWARD, OPTIMIZER, WAITING, OTHER = SECTIONS
"""Names of the sections. ``waiting`` is for other ranks; the rest of a step is ``other``."""


@dataclass(frozen=True)
class SectionTimes:
    """Times of a rank since its last report."""

    steps: int
    """Number of measured steps."""
    seconds: dict[str, float]
    """Mean seconds of a step by section, of all :data:`SECTIONS`."""
    work_seconds: float
    """Median over the steps of the time that is not waiting."""

    @property
    def mean_work_seconds(self) -> float:
        """Mean over the steps of the time that is not waiting."""
        return self.step_seconds - self.seconds[WAITING]

    @property
    def step_seconds(self) -> float:
        """Mean duration of a step."""
        return sum(self.seconds.values())

    def to_row(self) -> list[float]:
        """Return the times as numbers, for :meth:`from_row`."""
        return [self.steps, self.work_seconds, *(self.seconds[name] for name in SECTIONS)]

    @classmethod
    def from_row(cls, row: Sequence[float]) -> SectionTimes | None:
        """Return the times of :meth:`to_row`; None for a row of zeros."""
        steps, work_seconds, *seconds = row
        if not steps:
            return None
        return cls(round(steps), dict(zip(SECTIONS, seconds, strict=True)), work_seconds)


ROW_LENGTH = 2 + len(SECTIONS)
"""Length of a row of :meth:`SectionTimes.to_row`."""
