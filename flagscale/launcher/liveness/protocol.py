"""An authenticated channel between a run's agents, without input and output of its own.

Bytes that arrived go into :meth:`Channel.receive`, bytes to send come out of
:meth:`Channel.take`. Both ends greet with a magic word and 32 random bytes. The client then proves
that it knows the run's secret, and only then does the server::

    both     MAGIC nonce
    client   HMAC(secret, "client" server_nonce client_nonce)
    server   HMAC(secret, "server" server_nonce client_nonce)

From then on a frame is ``length (4, big endian) · MAC (32) · payload``. The MAC covers the
direction, the frame's number and the payload under a key of this connection alone, so that frames
can neither be made, altered, repeated nor dropped by whoever does not know the secret. They can be
read: they hold host names, steps and tracebacks, as the logs do.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct

MAGIC = b"flagscale-liveness-2\n"
NONCE_BYTES = 32
MAC_BYTES = 32
MAX_FRAME_BYTES = 1 << 20
_LENGTH = struct.Struct(">I")
_GREETING_BYTES = len(MAGIC) + NONCE_BYTES


class ProtocolError(Exception):
    """The other end does not know the secret, or is no agent at all: hang up."""


class Channel:
    """One end of a connection. ``server`` is the end that was connected to."""

    def __init__(self, secret: bytes, *, server: bool) -> None:
        self._secret = secret
        self._server = server
        self._own_nonce = secrets.token_bytes(NONCE_BYTES)
        self._nonces = b""
        self._received = b""
        self._outgoing = bytearray(MAGIC + self._own_nonce)
        self._waiting: list[bytes] = []
        self._keys: tuple[bytes, bytes] | None = None
        self._numbers = [0, 0]
        self.ready = False
        """Whether the other end has proven that it knows the secret."""

    def send(self, payload: bytes) -> None:
        """Queue a message; it goes out once the other end is known."""
        if not self.ready:
            self._waiting.append(payload)
            return
        if len(payload) > MAX_FRAME_BYTES:
            raise ValueError(f"a message of {len(payload)} bytes is too long")
        self._outgoing += _LENGTH.pack(len(payload)) + self._mac(0, payload) + payload

    def take(self) -> bytes:
        """What is to be sent now."""
        data = bytes(self._outgoing)
        self._outgoing.clear()
        return data

    def receive(self, data: bytes) -> list[bytes]:
        """The messages that are whole with these bytes.

        Raises :class:`ProtocolError` for anything that no agent of this run would send; the
        channel is of no use then.
        """
        self._received += data
        if not self._nonces and not self._greet():
            return []
        if not self.ready and not self._admit():
            return []
        messages = []
        while (message := self._frame()) is not None:
            messages.append(message)
        return messages

    def _greet(self) -> bool:
        head = self._received[: len(MAGIC)]
        if not MAGIC.startswith(head):
            raise ProtocolError("this is no agent of this version")
        if len(self._received) < _GREETING_BYTES:
            return False
        other = self._received[len(MAGIC) : _GREETING_BYTES]
        self._received = self._received[_GREETING_BYTES:]
        pair = (self._own_nonce, other) if self._server else (other, self._own_nonce)
        self._nonces = b"".join(pair)
        if not self._server:
            self._outgoing += self._digest(b"client")
        return True

    def _admit(self) -> bool:
        if len(self._received) < MAC_BYTES:
            return False
        proof, self._received = self._received[:MAC_BYTES], self._received[MAC_BYTES:]
        expected = self._digest(b"client" if self._server else b"server")
        if not hmac.compare_digest(proof, expected):
            raise ProtocolError("the other end does not know this run's secret")
        if self._server:
            self._outgoing += self._digest(b"server")
        down, up = self._digest(b"server to client"), self._digest(b"client to server")
        self._keys = (down, up) if self._server else (up, down)
        self.ready = True
        waiting, self._waiting = self._waiting, []
        for payload in waiting:
            self.send(payload)
        return True

    def _digest(self, purpose: bytes) -> bytes:
        return hmac.digest(self._secret, purpose + b"\0" + self._nonces, hashlib.sha256)

    def _mac(self, direction: int, payload: bytes) -> bytes:
        """The next frame's MAC: direction 0 is from here, 1 to here."""
        if self._keys is None:
            raise ProtocolError("the other end is not known yet")
        number = struct.pack(">Q", self._numbers[direction])
        self._numbers[direction] += 1
        return hmac.digest(self._keys[direction], number + payload, hashlib.sha256)

    def _frame(self) -> bytes | None:
        if len(self._received) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._received)
        if length > MAX_FRAME_BYTES:
            raise ProtocolError(f"a frame of {length} bytes")
        start, end = _LENGTH.size + MAC_BYTES, _LENGTH.size + MAC_BYTES + length
        if len(self._received) < end:
            return None
        mac, payload = self._received[_LENGTH.size : start], self._received[start:end]
        self._received = self._received[end:]
        if not hmac.compare_digest(mac, self._mac(1, payload)):
            raise ProtocolError("a frame that was not sent by an agent of this run")
        return payload
