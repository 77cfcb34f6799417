"""What the user wants of liveness, as part of the agent's options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

OnFailure = Literal["stop", "leave"]
# Evaluations and checkpoints move no step: they get this many times the time, and half an hour
# at the least.
BUSY_FACTOR = 4.0
BUSY_SECONDS = 1800.0


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Keys of ``experiment.runner`` by their names, which say what they mean. Times are in seconds.

    A key that is to reach the agents is a field here, and no more: planning copies it by name.
    """

    max_restarts: int
    on_failure: OnFailure
    lost_host_timeout: float
    start_timeout: float
    hang_detection_timeout: float
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
        if not self.hang_detection_timeout:
            return None
        if not busy:
            # How far ranks are comes with the heartbeats: between two of them nobody knows.
            return max(self.hang_detection_timeout, 2 * self.beat_seconds)
        return max(BUSY_SECONDS, BUSY_FACTOR * self.hang_detection_timeout)
