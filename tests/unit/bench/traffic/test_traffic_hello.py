"""The keyed hello: who is answered, and whose answer counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flagscale.bench.traffic import handshake

KEY, OTHER = b"k" * 32, b"o" * 32


def test_a_hello_tells_its_flow_and_source_and_its_answer_is_known() -> None:
    message = handshake.hello(KEY, 7, 3, 1)
    assert len(message) == handshake.HELLO_SIZE
    assert handshake.heard(KEY, message, 1) == (7, 3)
    said = handshake.answer(KEY, message)
    assert len(said) == handshake.ANSWER_SIZE
    assert handshake.is_answer(KEY, message, said)


@pytest.mark.parametrize(
    ("key", "own"), [pytest.param(OTHER, 1, id="other-key"), pytest.param(KEY, 2, id="other-site")]
)
def test_others_hear_nothing(key: bytes, own: int) -> None:
    assert handshake.heard(key, handshake.hello(KEY, 7, 3, 1), own) is None


@given(st.integers(0, handshake.HELLO_SIZE - 1), st.integers(1, 255))
def test_a_hello_that_was_changed_anywhere_is_none(place: int, change: int) -> None:
    message = bytearray(handshake.hello(KEY, 7, 3, 1))
    message[place] ^= change
    assert handshake.heard(KEY, bytes(message), 1) is None


@given(st.binary(max_size=80))
def test_what_anybody_sends_is_no_hello_and_no_answer(text: bytes) -> None:
    message = handshake.hello(KEY, 7, 3, 1)
    assert handshake.heard(KEY, text, 1) is None
    assert not handshake.is_answer(KEY, message, text)
    assert handshake.tallied(KEY, message, text) is None


def test_an_answer_belongs_to_its_hello() -> None:
    first, second = handshake.hello(KEY, 7, 3, 1), handshake.hello(KEY, 7, 3, 1)
    assert first != second
    assert not handshake.is_answer(KEY, second, handshake.answer(KEY, first))
    assert not handshake.is_answer(KEY, first, handshake.answer(OTHER, first))


def test_a_tally_tells_bytes_and_is_no_answer() -> None:
    message = handshake.hello(KEY, 7, 3, 1)
    said = handshake.tally(KEY, message, 1 << 40)
    assert len(said) == handshake.TALLY_SIZE
    assert handshake.tallied(KEY, message, said) == 1 << 40
    assert handshake.tallied(OTHER, message, said) is None
    assert not handshake.is_answer(KEY, message, said)
