"""The keyed hello: nobody is sent a byte of traffic who has not proved to be of this session.

A hello says which flow comes to which site, with a number used once and a MAC by the session's key;
the answer is a MAC over it. Strangers get no answer, and learn nothing that could be sent again: a
repeated hello only has its sender's own bytes thrown away. Standard library alone.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct

_MAGIC = b"flgT"
_HEAD = struct.Struct("!4sHHH16s")
_MAC = 16
HELLO_SIZE = _HEAD.size + _MAC
ANSWER_SIZE = _MAC
TALLY_SIZE = 8 + _MAC


def hello(key: bytes, flow: int, source: int, target: int) -> bytes:
    """What the source of a flow says first."""
    head = _HEAD.pack(_MAGIC, flow, source, target, os.urandom(16))
    return head + _mac(key, b"hello", head)


def heard(key: bytes, message: bytes, own: int) -> tuple[int, int] | None:
    """The flow and the source of a hello to site ``own``; None if it is none of this session."""
    if len(message) != HELLO_SIZE or not message.startswith(_MAGIC):
        return None
    head, mac = message[: _HEAD.size], message[_HEAD.size :]
    _, flow, source, target, _ = _HEAD.unpack(head)
    if target != own or not hmac.compare_digest(mac, _mac(key, b"hello", head)):
        return None
    return flow, source


def answer(key: bytes, message: bytes) -> bytes:
    """What the target says to a hello."""
    return _mac(key, b"answer", message)


def is_answer(key: bytes, message: bytes, said: bytes) -> bool:
    """Whether ``said`` answers the hello ``message``."""
    return hmac.compare_digest(said, answer(key, message))


def tally(key: bytes, message: bytes, count: int) -> bytes:
    """How many bytes a target has got by datagrams since a hello: it still wants more."""
    number = count.to_bytes(8, "big")
    return number + _mac(key, b"tally", message + number)


def tallied(key: bytes, message: bytes, said: bytes) -> int | None:
    """The bytes of a :func:`tally`; None if it is none."""
    number, mac = said[:8], said[8:]
    if not hmac.compare_digest(mac, _mac(key, b"tally", message + number)):
        return None
    return int.from_bytes(number, "big")


def _mac(key: bytes, purpose: bytes, text: bytes) -> bytes:
    return hmac.new(key, purpose + text, hashlib.sha256).digest()[:_MAC]
