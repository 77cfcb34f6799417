"""Keyed handshake: traffic is sent only to a host that proves membership of this session.

A session is the traffic between hosts from its start to its end (:mod:`.session`). It draws a
random key, and passes it over SSH to the process that it starts on each host. Flows and hosts are
numbered by their indices in :class:`.spec.Environment`.

Messages, each with a MAC (message authentication code) by the session's key:

- hello: source of a flow to its target, with the flow, both hosts and a nonce;
- acknowledgement: target to source, a MAC over the hello;
- tally: target to source, the bytes of datagrams received since the hello.

A host outside the session gets no answer, and nothing it could replay with effect: the bytes that
follow a repeated hello are only discarded.

The processes on the hosts import this module, so it uses the standard library alone.
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
    """Return the first message from host ``source`` of a flow to host ``target``."""
    header = _HEADER.pack(_MAGIC, flow, source, target, os.urandom(16))
    return header + _mac(key, b"hello", header)


def verify_hello(key: bytes, message: bytes, target: int) -> tuple[int, int] | None:
    """Return the flow and the source of a hello to host ``target``; None for a message that is no
    hello of this session."""
    if len(message) != HELLO_SIZE or not message.startswith(_MAGIC):
        return None
    header, mac = message[: _HEADER.size], message[_HEADER.size :]
    _, flow, source, hello_target, _ = _HEADER.unpack(header)
    if hello_target != target or not hmac.compare_digest(mac, _mac(key, b"hello", header)):
        return None
    return flow, source


def make_acknowledgement(key: bytes, hello: bytes) -> bytes:
    """Return the target's acknowledgement of a hello."""
    return _mac(key, b"answer", hello)


def verify_acknowledgement(key: bytes, hello: bytes, message: bytes) -> bool:
    """Return whether ``message`` acknowledges this hello."""
    return hmac.compare_digest(message, make_acknowledgement(key, hello))


def make_tally(key: bytes, hello: bytes, count: int) -> bytes:
    """Return the target's report of the datagram bytes it has received since a hello."""
    encoded_count = count.to_bytes(8, "big")
    return encoded_count + _mac(key, b"tally", hello + encoded_count)


def verify_tally(key: bytes, hello: bytes, message: bytes) -> int | None:
    """Return the bytes that a tally reports; None for a message that is no tally to this hello."""
    encoded_count, mac = message[:8], message[8:]
    if not hmac.compare_digest(mac, _mac(key, b"tally", hello + encoded_count)):
        return None
    return int.from_bytes(encoded_count, "big")


def _mac(key: bytes, purpose: bytes, data: bytes) -> bytes:
    return hmac.new(key, purpose + data, hashlib.sha256).digest()[:_MAC_SIZE]
