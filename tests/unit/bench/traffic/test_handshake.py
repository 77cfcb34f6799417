"""Tests of the keyed handshake: which hellos, acknowledgements and tallies are accepted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flagscale.bench.traffic import handshake

KEY, OTHER_KEY = b"k" * 32, b"o" * 32


def test_hello_and_acknowledgement() -> None:
    hello = handshake.make_hello(KEY, 7, 3, 1)
    assert len(hello) == handshake.HELLO_SIZE
    assert handshake.verify_hello(KEY, hello, 1) == (7, 3)
    acknowledgement = handshake.make_acknowledgement(KEY, hello)
    assert len(acknowledgement) == handshake.ACKNOWLEDGEMENT_SIZE
    assert handshake.verify_acknowledgement(KEY, hello, acknowledgement)


@pytest.mark.parametrize(
    ("key", "target"),
    [pytest.param(OTHER_KEY, 1, id="other-key"), pytest.param(KEY, 2, id="other-host")],
)
def test_hello_for_another_session_or_host_is_rejected(key: bytes, target: int) -> None:
    assert handshake.verify_hello(key, handshake.make_hello(KEY, 7, 3, 1), target) is None


@given(st.integers(0, handshake.HELLO_SIZE - 1), st.integers(1, 255))
def test_modified_hello_is_rejected(position: int, change: int) -> None:
    hello = bytearray(handshake.make_hello(KEY, 7, 3, 1))
    hello[position] ^= change
    assert handshake.verify_hello(KEY, bytes(hello), 1) is None


@given(st.binary(max_size=80))
def test_random_bytes_are_rejected(text: bytes) -> None:
    hello = handshake.make_hello(KEY, 7, 3, 1)
    assert handshake.verify_hello(KEY, text, 1) is None
    assert not handshake.verify_acknowledgement(KEY, hello, text)
    assert handshake.verify_tally(KEY, hello, text) is None


def test_acknowledgement_belongs_to_its_hello() -> None:
    first, second = handshake.make_hello(KEY, 7, 3, 1), handshake.make_hello(KEY, 7, 3, 1)
    assert first != second
    assert not handshake.verify_acknowledgement(
        KEY, second, handshake.make_acknowledgement(KEY, first)
    )
    assert not handshake.verify_acknowledgement(
        KEY, first, handshake.make_acknowledgement(OTHER_KEY, first)
    )


def test_tally_reports_bytes_and_is_no_acknowledgement() -> None:
    hello = handshake.make_hello(KEY, 7, 3, 1)
    tally = handshake.make_tally(KEY, hello, 1 << 40)
    assert len(tally) == handshake.TALLY_SIZE
    assert handshake.verify_tally(KEY, hello, tally) == 1 << 40
    assert handshake.verify_tally(OTHER_KEY, hello, tally) is None
    assert not handshake.verify_acknowledgement(KEY, hello, tally)
