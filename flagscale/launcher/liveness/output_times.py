"""Index of the times at which a host's output grew, for ``logs`` since a time.

Lines of an output have no time, and stay as their programs print them. The agent, which looks
around several times a second anyway, appends a line ``<time> <size>`` to a file in the run's
directory when the output has grown: everything behind ``size`` bytes was written after ``time``.
:func:`flagscale.launcher.log_lines.offset_since` reads it.
"""

from __future__ import annotations

import os
import stat
import time
from contextlib import suppress
from pathlib import Path

INTERVAL_SECONDS = 5.0
"""Least time between two entries, which is the accuracy of the index. A day has at most 17,280
entries, about 400 KB."""


class OutputTimes:
    """Writer of the index of an output."""

    def __init__(self, path: Path, output_descriptor: int = 2) -> None:
        self._path = path
        self._descriptor = output_descriptor
        self._recorded_at = float("-inf")
        self._size = -1

    def record(self, now: float, *, final: bool = False) -> None:
        """Add an entry if the output has grown and the last entry is old enough, or ``final``.

        ``now`` is a monotonic time in seconds. Nothing is recorded for a terminal or a pipe. Errors
        are ignored: a full disk must not end the agent.
        """
        if now - self._recorded_at < INTERVAL_SECONDS and not final:
            return
        self._recorded_at = now
        with suppress(OSError):
            status = os.fstat(self._descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_size == self._size:
                return
            entry = f"{time.time():.1f} {status.st_size}\n".encode()
            descriptor = os.open(
                self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600
            )
            try:
                os.write(descriptor, entry)
            finally:
                os.close(descriptor)
            self._size = status.st_size
