from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flagscale.launcher.liveness.protocol import (
    MAC_BYTES,
    MAGIC,
    MAX_FRAME_BYTES,
    NONCE_BYTES,
    Channel,
    ProtocolError,
)

SECRET = b"s" * 32


def connect_channels(
    server_secret: bytes = SECRET, client_secret: bytes = SECRET
) -> tuple[Channel, Channel]:
    """Return two channels after the handshake."""
    server, client = Channel(server_secret, is_server=True), Channel(client_secret, is_server=False)
    for _ in range(3):
        server.receive(client.take_outgoing())
        client.receive(server.take_outgoing())
    return server, client


@given(messages=st.lists(st.binary(max_size=200), max_size=5), cut=st.integers(1, 50))
def test_messages_arrive_however_they_are_cut(messages: list[bytes], cut: int) -> None:
    server, client = connect_channels()
    for message in messages:
        client.send(message)
    data = client.take_outgoing()
    received = []
    for start in range(0, len(data), cut):
        received += server.receive(data[start : start + cut])
    assert received == messages


def test_messages_before_the_handshake_are_sent_after_it() -> None:
    server, client = Channel(SECRET, is_server=True), Channel(SECRET, is_server=False)
    client.send(b"hello")
    server.send(b"beat")
    received: list[Any] = []
    for _ in range(3):
        received += server.receive(client.take_outgoing())
        received += client.receive(server.take_outgoing())
    assert received == [b"beat", b"hello"]


def test_server_rejects_a_wrong_secret_before_proving_its_own() -> None:
    server, client = Channel(SECRET, is_server=True), Channel(b"other", is_server=False)
    server.receive(client.take_outgoing())
    client.receive(server.take_outgoing())
    with pytest.raises(ProtocolError, match="secret"):
        server.receive(client.take_outgoing())
    assert not server.is_authenticated
    assert server.take_outgoing() == b""


def test_a_false_server_is_refused_by_the_client() -> None:
    client = Channel(SECRET, is_server=False)
    client.receive(MAGIC + os.urandom(NONCE_BYTES))
    proof = client.take_outgoing()[-MAC_BYTES:]
    with pytest.raises(ProtocolError, match="secret"):
        client.receive(proof)  # its own words, sent back


@given(data=st.binary(min_size=1, max_size=300))
def test_arbitrary_bytes_never_authenticate(data: bytes) -> None:
    """Any bytes are rejected or incomplete; none are decoded as a message, and at most one reply is
    sent.
    """
    server = Channel(SECRET, is_server=True)
    outgoing = server.take_outgoing()
    try:
        assert server.receive(data) == []
        assert server.receive(MAGIC + data + bytes(100)) == []
    except ProtocolError:
        pass
    assert not server.is_authenticated
    assert len(outgoing) == len(MAGIC) + NONCE_BYTES
    assert server.take_outgoing() == b""


@given(at=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_an_altered_frame_is_refused(at: int, bit: int) -> None:
    server, client = connect_channels()
    client.send(b"beat of attempt 3")
    data = bytearray(client.take_outgoing())
    data[at % len(data)] ^= 1 << bit
    try:
        assert server.receive(bytes(data)) == []  # a longer frame, which never ends
    except ProtocolError:
        return


def test_frames_cannot_be_repeated_dropped_or_turned_around() -> None:
    server, client = connect_channels()
    client.send(b"1")
    first = client.take_outgoing()
    client.send(b"2")
    second = client.take_outgoing()
    assert server.receive(first) == [b"1"]
    with pytest.raises(ProtocolError):
        server.receive(first)
    server, client = connect_channels()
    client.send(b"1")
    client.take_outgoing()
    client.send(b"2")
    with pytest.raises(ProtocolError):
        server.receive(client.take_outgoing())
    server, client = connect_channels()
    client.send(b"1")
    with pytest.raises(ProtocolError):
        client.receive(client.take_outgoing())
    assert second


def test_too_long_frame_is_rejected_before_it_is_read() -> None:
    server, _ = connect_channels()
    with pytest.raises(ProtocolError, match="a frame of"):
        server.receive((MAX_FRAME_BYTES + 1).to_bytes(4, "big"))


def test_a_message_too_long_is_not_sent() -> None:
    _, client = connect_channels()
    with pytest.raises(ValueError, match="too long"):
        client.send(bytes(MAX_FRAME_BYTES + 1))
