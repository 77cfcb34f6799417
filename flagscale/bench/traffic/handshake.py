"""Keyed handshake: only a host that proves to be of this session is sent traffic.

A hello names the flow, its source and its target, with a nonce and a MAC by the session's key. The
acknowledgement is a MAC over the hello. Hosts of no session get no answer, so they learn nothing
that they could replay: a repeated hello only has its sender's own bytes discarded. Standard library
alone.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct

_MAGIC = b"flgT"
_HEADER = struct.Struct("!4sHHH16s")
_MAC_SIZE = 16
HELLO_SIZE = _HEADER.size + _MAC_SIZE
ACKNOWLEDGEMENT_SIZE = _MAC_SIZE
TALLY_SIZE = 8 + _MAC_SIZE


def make_hello(key: bytes, flow: int, source: int, target: int) -> bytes:
    """Return the first message from the source of a flow to its target."""
    header = _HEADER.pack(_MAGIC, flow, source, target, os.urandom(16))
    return header + _mac(key, b"hello", header)


def verify_hello(key: bytes, message: bytes, target: int) -> tuple[int, int] | None:
    """Return the flow and the source of a hello to host ``target``; None for a message that is no
    hello of this session."""
    if len(message) != HELLO_SIZE or not message.startswith(_MAGIC):
        return None
    header, mac = message[: _HEADER.size], message[_HEADER.size :]
    _, flow, source, addressee, _ = _HEADER.unpack(header)
    if addressee != target or not hmac.compare_digest(mac, _mac(key, b"hello", header)):
        return None
    return flow, source


def make_acknowledgement(key: bytes, hello: bytes) -> bytes:
    """Return the target's answer to a hello."""
    return _mac(key, b"answer", hello)


def verify_acknowledgement(key: bytes, hello: bytes, message: bytes) -> bool:
    """Return whether ``message`` acknowledges this hello."""
    return hmac.compare_digest(message, make_acknowledgement(key, hello))


def make_tally(key: bytes, hello: bytes, count: int) -> bytes:
    """Return the target's report of the datagram bytes it has received since a hello."""
    number = count.to_bytes(8, "big")
    return number + _mac(key, b"tally", hello + number)


def verify_tally(key: bytes, hello: bytes, message: bytes) -> int | None:
    """Return the bytes that a tally reports; None for a message that is none."""
    number, mac = message[:8], message[8:]
    if not hmac.compare_digest(mac, _mac(key, b"tally", hello + number)):
        return None
    return int.from_bytes(number, "big")


def _mac(key: bytes, purpose: bytes, text: bytes) -> bytes:
    return hmac.new(key, purpose + text, hashlib.sha256).digest()[:_MAC_SIZE]
