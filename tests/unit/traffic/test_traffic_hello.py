"""The keyed hello: who is answered, and whose answer counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flagscale.traffic import hello

KEY, OTHER = b"k" * 32, b"o" * 32


def test_a_hello_tells_its_flow_and_source_and_its_answer_is_known() -> None:
    message = hello.hello(KEY, 7, 3, 1)
    assert len(message) == hello.HELLO_SIZE
    assert hello.heard(KEY, message, 1) == (7, 3)
    said = hello.answer(KEY, message)
    assert len(said) == hello.ANSWER_SIZE
    assert hello.is_answer(KEY, message, said)


@pytest.mark.parametrize(
    ("key", "own"), [pytest.param(OTHER, 1, id="other-key"), pytest.param(KEY, 2, id="other-site")]
)
def test_others_hear_nothing(key: bytes, own: int) -> None:
    assert hello.heard(key, hello.hello(KEY, 7, 3, 1), own) is None


@given(st.integers(0, hello.HELLO_SIZE - 1), st.integers(1, 255))
def test_a_hello_that_was_changed_anywhere_is_none(place: int, change: int) -> None:
    message = bytearray(hello.hello(KEY, 7, 3, 1))
    message[place] ^= change
    assert hello.heard(KEY, bytes(message), 1) is None


@given(st.binary(max_size=80))
def test_what_anybody_sends_is_no_hello_and_no_answer(text: bytes) -> None:
    message = hello.hello(KEY, 7, 3, 1)
    assert hello.heard(KEY, text, 1) is None
    assert not hello.is_answer(KEY, message, text)
    assert hello.tallied(KEY, message, text) is None


def test_an_answer_belongs_to_its_hello() -> None:
    first, second = hello.hello(KEY, 7, 3, 1), hello.hello(KEY, 7, 3, 1)
    assert first != second
    assert not hello.is_answer(KEY, second, hello.answer(KEY, first))
    assert not hello.is_answer(KEY, first, hello.answer(OTHER, first))


def test_a_tally_tells_bytes_and_is_no_answer() -> None:
    message = hello.hello(KEY, 7, 3, 1)
    said = hello.tally(KEY, message, 1 << 40)
    assert len(said) == hello.TALLY_SIZE
    assert hello.tallied(KEY, message, said) == 1 << 40
    assert hello.tallied(OTHER, message, said) is None
    assert not hello.is_answer(KEY, message, said)
