"""Requests to end training early: SIGTERM, or the time limit ``exit_duration_in_mins``."""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import Literal

StopReason = Literal["completed", "signal", "exit-interval"]
"""Reason for the end of training, as the trainer writes it in the ``finished`` status event: all
steps are done or the validation loss no longer improves, SIGTERM was received, or the time limit is
exceeded. ``exit-interval`` is the reason of the time limit, and also of the step limit
``exit_interval``.
"""


class StopRequest:
    """Detects that this process should stop.

    Reasons are SIGTERM, which schedulers and launchers send, and the time limit of the run.
    """

    def __init__(self, limit_minutes: float | None) -> None:
        self._deadline = None if limit_minutes is None else time.monotonic() + 60 * limit_minutes
        self._signal_received = False

    def install_handler(self) -> None:
        """Install a SIGTERM handler that records the signal instead of ending the process."""
        signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signal_received = True

    def poll(self) -> tuple[bool, bool]:
        """Return whether a signal was received, and whether the time limit is exceeded."""
        return (
            self._signal_received,
            self._deadline is not None and time.monotonic() > self._deadline,
        )
