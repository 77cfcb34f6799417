"""The signals by which an agent is told to end its job."""

from __future__ import annotations

import signal
import socket
from dataclasses import dataclass
from types import FrameType

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass
class Signals:
    """Signals that have come, for the loop to look at."""

    pending: list[int]

    def listen(self) -> socket.socket:
        """From now on keep signals, and have them wake up whoever waits for the socket."""
        reader, writer = socket.socketpair()
        for end in (reader, writer):
            end.setblocking(False)
        self._writer = writer
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        for number in FORWARDED:
            signal.signal(number, self._keep)
        return reader

    def _keep(self, number: int, _frame: FrameType | None) -> None:
        self.pending.append(number)

    def take(self) -> list[int]:
        taken, self.pending = self.pending, []
        return taken
