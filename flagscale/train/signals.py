"""Reasons to end before the end: told to by SIGTERM, or out of time."""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import Literal

Reason = Literal["completed", "signal", "exit-interval"]
"""Why training ended, as the ``finished`` status event says it."""


class StopRequest:
    """Knows whether this process should end: on SIGTERM, as schedulers and launchers send it, or
    after ``minutes``."""

    def __init__(self, minutes: float | None) -> None:
        self._end = None if minutes is None else time.monotonic() + 60 * minutes
        self._signalled = False

    def listen(self) -> None:
        """From now on SIGTERM does not end the process but is remembered."""
        signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True

    def wishes(self) -> tuple[bool, bool]:
        """Whether a signal came, and whether time is up."""
        return self._signalled, self._end is not None and time.monotonic() > self._end
