"""What the user wants of liveness, as the agent's options say it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

OnFailure = Literal["stop", "leave"]
# Evaluations and checkpoints move no step: they get this many times the time, and half an hour
# at the least.
BUSY_FACTOR = 4.0
BUSY_SECONDS = 1800.0


@dataclass(frozen=True)
class Policy:
    """Times are in seconds."""

    output: Path
    """The output of host 0, for failures that have no log of their own."""
    max_restarts: int = 0
    on_failure: OnFailure = "stop"
    lost_host_timeout: float = 60.0
    start_timeout: float = 600.0
    hang_timeout: float = 1800.0
    """0: a stall is never looked for."""

    @property
    def attempts(self) -> int:
        """How often the job may be started: what is left alone after a failure starts once."""
        return self.max_restarts + 1 if self.on_failure == "stop" else 1

    @property
    def beat_seconds(self) -> float:
        """How often each end of a link lets the other hear of it."""
        return min(5.0, self.lost_host_timeout / 5)

    def stall_limit(self, *, busy: bool) -> float | None:
        """How long no rank may get on before the job counts as stalled."""
        if not self.hang_timeout:
            return None
        if not busy:
            # How far ranks are comes with the heartbeats: between two of them nobody knows.
            return max(self.hang_timeout, 2 * self.beat_seconds)
        return max(BUSY_SECONDS, BUSY_FACTOR * self.hang_timeout)
