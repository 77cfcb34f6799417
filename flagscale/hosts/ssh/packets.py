"""Packetizer for paramiko that never sends a packet to a channel after closing it.

paramiko decides under a channel's lock which packet to send, and sends it without the lock.
Another thread may close the channel in between. sshd, which has released the channel by then,
ends the whole connection ("data packet referred to nonexistent channel"), and for a jump host
this ends every connection behind it. (paramiko's issues 1115 and 1705.)
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

# Messages of these kinds begin with the number of their channel, as the receiver counts channels
# (RFC 4254, sections 5.2 to 5.4).
_CHANNEL_MESSAGES = range(MSG_CHANNEL_WINDOW_ADJUST, MSG_CHANNEL_FAILURE + 1)


class OrderlyPacketizer(Packetizer):
    """Drops packets for channels that this side has closed: nothing reads them any more."""

    def __init__(self, socket: Any) -> None:
        super().__init__(socket)
        self._send_lock = threading.Lock()
        self._closed: set[bytes] = set()

    def send_message(self, data: Message) -> None:
        """Send or drop a message. ``data`` begins with its kind."""
        raw = data.asbytes()
        if raw[0] not in _CHANNEL_MESSAGES:
            super().send_message(data)
            return
        channel = raw[1:5]
        with self._send_lock:
            if channel in self._closed:
                return
            if raw[0] == MSG_CHANNEL_CLOSE:
                self._closed.add(channel)
            super().send_message(data)

    def close(self) -> None:
        """Close the stream, ignoring errors: through a jump host, closing sends a message that may
        fail.
        """
        with contextlib.suppress(OSError, EOFError, SSHException):
            super().close()

    def read_message(self) -> tuple[int, Message]:
        """Return the next message and its kind."""
        kind, message = super().read_message()
        if kind == MSG_CHANNEL_OPEN_SUCCESS:
            # The server reuses a number only after both sides have closed the channel, so it was
            # added before. No lock: a sender holds it while the server may be waiting to be read.
            self._closed.discard(message.asbytes()[4:8])
        return kind, message
