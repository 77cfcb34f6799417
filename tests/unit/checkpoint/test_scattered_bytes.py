"""Bytes in several pieces of memory, compared with the same bytes in one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.torch  # its package imports torch

PIECES = st.lists(st.binary(max_size=5), max_size=6)
POSITIONS = st.integers(0, 30)


@given(PIECES, POSITIONS, POSITIONS)
def test_ranges_are_those_of_the_joined_bytes(pieces: list[bytes], begin: int, end: int) -> None:
    from flagscale.train.checkpoint.scattered_bytes import ScatteredBytes, ScatteredFile

    joined = b"".join(pieces)
    scattered = ScatteredBytes([memoryview(bytearray(piece)) for piece in pieces])
    assert len(scattered) == len(joined)
    assert scattered.join(begin, end) == joined[begin:end]
    assert b"".join(scattered.pieces(begin, end)) == joined[begin:end]
    part = scattered.slice(begin, end)
    assert part.join(0, len(part)) == joined[begin:end]
    file = ScatteredFile(scattered)
    file.seek(begin)
    assert file.read(max(end - begin, 0)) == joined[begin:end]


def test_memory_of_one_piece_is_shared() -> None:
    from flagscale.train.checkpoint.scattered_bytes import ScatteredBytes

    first, second = bytearray(b"abc"), bytearray(b"def")
    scattered = ScatteredBytes([memoryview(first), memoryview(second)])
    inside, across = scattered.join(3, 5), scattered.join(2, 4)
    second[:] = b"DEF"
    assert (bytes(inside), bytes(across)) == (b"DE", b"cd")
    scattered.pieces(2, 4)[0][:] = b"C"
    assert first == b"abC"
