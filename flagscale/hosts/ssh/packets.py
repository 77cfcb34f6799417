"""paramiko's packets, of which none is sent to a channel after its end.

paramiko decides under a channel's lock what to send, and sends it without. A thread that is held up
in between can be overtaken by another one that closes the channel; sshd, which has forgotten it by
then, ends the whole connection ("data packet referred to nonexistent channel"), and through a jump
host that is every connection behind it. (paramiko's issues 1115 and 1705.)
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any

from paramiko.common import (
    MSG_CHANNEL_CLOSE,
    MSG_CHANNEL_FAILURE,
    MSG_CHANNEL_OPEN_SUCCESS,
    MSG_CHANNEL_WINDOW_ADJUST,
)
from paramiko.message import Message
from paramiko.packet import Packetizer
from paramiko.ssh_exception import SSHException

# Messages from the first to the last kind begin with the number of the channel they are for, as
# the receiver counts channels (RFC 4254, sections 5.2 to 5.4).
_FOR_A_CHANNEL = range(MSG_CHANNEL_WINDOW_ADJUST, MSG_CHANNEL_FAILURE + 1)


class OrderlyPacketizer(Packetizer):
    """Drops what is for a channel that was closed from here: nobody reads it any more."""

    def __init__(self, socket: Any) -> None:
        super().__init__(socket)
        self._one_at_a_time = threading.Lock()
        self._closed: set[bytes] = set()

    def send_message(self, data: Message) -> None:
        """Send a message, or drop it; ``data`` begins with its kind."""
        raw = data.asbytes()
        if raw[0] not in _FOR_A_CHANNEL:
            super().send_message(data)
            return
        channel = raw[1:5]
        with self._one_at_a_time:
            if channel in self._closed:
                return
            if raw[0] == MSG_CHANNEL_CLOSE:
                self._closed.add(channel)
            super().send_message(data)

    def close(self) -> None:
        """Close the stream. Through a jump host that takes a goodbye, and it may be gone."""
        with contextlib.suppress(OSError, EOFError, SSHException):
            super().close()

    def read_message(self) -> tuple[int, Message]:
        """The next message with its kind."""
        kind, message = super().read_message()
        if kind == MSG_CHANNEL_OPEN_SUCCESS:
            # The server uses a number again once both sides have closed the channel, so it was
            # added before. No lock: who sends holds it while the server may wait to be read.
            self._closed.discard(message.asbytes()[4:8])
        return kind, message
