"""Authenticated channel between agents of a run, without I/O of its own.

Received bytes go into :meth:`Channel.receive`; bytes to send come out of
:meth:`Channel.take_outgoing`. Both ends send a magic word and a nonce of 32 random bytes. The
client then proves that it has the run's secret, and only then the server does::

    both     MAGIC nonce
    client   HMAC(secret, "client" server_nonce client_nonce)
    server   HMAC(secret, "server" server_nonce client_nonce)

After the handshake a frame is ``length (4, big endian) · MAC (32) · payload``. The MAC covers the
direction, the frame's number and the payload, under a key of this connection, so that frames cannot
be forged, altered, replayed or dropped without the secret. Frames are not encrypted: like the logs,
they contain host names, steps and tracebacks.
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
_FRAME_LENGTH = struct.Struct(">I")
_GREETING_BYTES = len(MAGIC) + NONCE_BYTES


class ProtocolError(Exception):
    """Failed authentication or malformed data; the connection must be closed."""


class Channel:
    """One end of a connection; ``is_server`` is True for the end that accepted it."""

    def __init__(self, secret: bytes, *, is_server: bool) -> None:
        self._secret = secret
        self._is_server = is_server
        self._local_nonce = secrets.token_bytes(NONCE_BYTES)
        self._nonces = b""
        self._received = b""
        self._outgoing = bytearray(MAGIC + self._local_nonce)
        self._queued_payloads: list[bytes] = []
        self._keys: tuple[bytes, bytes] | None = None
        self._frame_numbers = [0, 0]
        self.is_authenticated = False
        """True once the other end has proven that it has the secret."""

    def send(self, payload: bytes) -> None:
        """Queue a message; it is sent after the handshake.

        Raises :class:`ValueError` for a message longer than :data:`MAX_FRAME_BYTES`.
        """
        if len(payload) > MAX_FRAME_BYTES:
            raise ValueError(f"a message of {len(payload)} bytes is too long")
        if not self.is_authenticated:
            self._queued_payloads.append(payload)
            return
        self._outgoing += _FRAME_LENGTH.pack(len(payload)) + self._mac(0, payload) + payload

    def take_outgoing(self) -> bytes:
        """Return the bytes to send now, and remove them from the queue."""
        data = bytes(self._outgoing)
        self._outgoing.clear()
        return data

    def receive(self, data: bytes) -> list[bytes]:
        """Process received bytes, and return the messages that are complete.

        Raises:
            ProtocolError: If no agent of this run would send these bytes. The channel is unusable
                then.
        """
        self._received += data
        if not self._nonces and not self._receive_nonce():
            return []
        if not self.is_authenticated and not self._authenticate_peer():
            return []
        messages = []
        while (message := self._next_frame()) is not None:
            messages.append(message)
        return messages

    def _receive_nonce(self) -> bool:
        head = self._received[: len(MAGIC)]
        if not MAGIC.startswith(head):
            raise ProtocolError("the peer is not an agent of this version")
        if len(self._received) < _GREETING_BYTES:
            return False
        peer_nonce = self._received[len(MAGIC) : _GREETING_BYTES]
        self._received = self._received[_GREETING_BYTES:]
        nonces = (
            (self._local_nonce, peer_nonce) if self._is_server else (peer_nonce, self._local_nonce)
        )
        self._nonces = b"".join(nonces)
        if not self._is_server:
            self._outgoing += self._digest(b"client")
        return True

    def _authenticate_peer(self) -> bool:
        if len(self._received) < MAC_BYTES:
            return False
        proof, self._received = self._received[:MAC_BYTES], self._received[MAC_BYTES:]
        expected = self._digest(b"client" if self._is_server else b"server")
        if not hmac.compare_digest(proof, expected):
            raise ProtocolError("the peer does not have this run's secret")
        if self._is_server:
            self._outgoing += self._digest(b"server")
        server_key, client_key = (
            self._digest(b"server to client"),
            self._digest(b"client to server"),
        )
        self._keys = (server_key, client_key) if self._is_server else (client_key, server_key)
        self.is_authenticated = True
        queued_payloads, self._queued_payloads = self._queued_payloads, []
        for payload in queued_payloads:
            self.send(payload)
        return True

    def _digest(self, purpose: bytes) -> bytes:
        return hmac.digest(self._secret, purpose + b"\0" + self._nonces, hashlib.sha256)

    def _mac(self, direction: int, payload: bytes) -> bytes:
        """Return the MAC of the next frame; direction 0 is outgoing, 1 is incoming."""
        if self._keys is None:
            raise ProtocolError("the peer is not authenticated yet")
        number = struct.pack(">Q", self._frame_numbers[direction])
        self._frame_numbers[direction] += 1
        return hmac.digest(self._keys[direction], number + payload, hashlib.sha256)

    def _next_frame(self) -> bytes | None:
        if len(self._received) < _FRAME_LENGTH.size:
            return None
        (length,) = _FRAME_LENGTH.unpack_from(self._received)
        if length > MAX_FRAME_BYTES:
            raise ProtocolError(f"a frame of {length} bytes")
        start, end = _FRAME_LENGTH.size + MAC_BYTES, _FRAME_LENGTH.size + MAC_BYTES + length
        if len(self._received) < end:
            return None
        mac, payload = self._received[_FRAME_LENGTH.size : start], self._received[start:end]
        self._received = self._received[end:]
        if not hmac.compare_digest(mac, self._mac(1, payload)):
            raise ProtocolError("a frame that was not sent by an agent of this run")
        return payload
