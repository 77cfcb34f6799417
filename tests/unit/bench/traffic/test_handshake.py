"""The keyed hello: who is answered, and whose answer counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flagscale.bench.traffic import handshake

KEY, OTHER = b"k" * 32, b"o" * 32


def test_hello_and_acknowledgement() -> None:
    message = handshake.make_hello(KEY, 7, 3, 1)
    assert len(message) == handshake.HELLO_SIZE
    assert handshake.verify_hello(KEY, message, 1) == (7, 3)
    said = handshake.make_acknowledgement(KEY, message)
    assert len(said) == handshake.ACKNOWLEDGEMENT_SIZE
    assert handshake.verify_acknowledgement(KEY, message, said)


@pytest.mark.parametrize(
    ("key", "own"), [pytest.param(OTHER, 1, id="other-key"), pytest.param(KEY, 2, id="other-site")]
)
def test_hello_for_another_session_or_host_is_rejected(key: bytes, own: int) -> None:
    assert handshake.verify_hello(key, handshake.make_hello(KEY, 7, 3, 1), own) is None


@given(st.integers(0, handshake.HELLO_SIZE - 1), st.integers(1, 255))
def test_modified_hello_is_rejected(place: int, change: int) -> None:
    message = bytearray(handshake.make_hello(KEY, 7, 3, 1))
    message[place] ^= change
    assert handshake.verify_hello(KEY, bytes(message), 1) is None


@given(st.binary(max_size=80))
def test_random_bytes_are_rejected(text: bytes) -> None:
    message = handshake.make_hello(KEY, 7, 3, 1)
    assert handshake.verify_hello(KEY, text, 1) is None
    assert not handshake.verify_acknowledgement(KEY, message, text)
    assert handshake.verify_tally(KEY, message, text) is None


def test_acknowledgement_belongs_to_its_hello() -> None:
    first, second = handshake.make_hello(KEY, 7, 3, 1), handshake.make_hello(KEY, 7, 3, 1)
    assert first != second
    assert not handshake.verify_acknowledgement(
        KEY, second, handshake.make_acknowledgement(KEY, first)
    )
    assert not handshake.verify_acknowledgement(
        KEY, first, handshake.make_acknowledgement(OTHER, first)
    )


def test_tally_reports_bytes_and_is_no_acknowledgement() -> None:
    message = handshake.make_hello(KEY, 7, 3, 1)
    said = handshake.make_tally(KEY, message, 1 << 40)
    assert len(said) == handshake.TALLY_SIZE
    assert handshake.verify_tally(KEY, message, said) == 1 << 40
    assert handshake.verify_tally(OTHER, message, said) is None
    assert not handshake.verify_acknowledgement(KEY, message, said)
