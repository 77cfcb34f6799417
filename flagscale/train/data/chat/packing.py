"""Putting conversations into sequences: best fit, the longest first.

What is packed depends on the lengths and the seed alone, never on ranks, so that any layout and any
resumed run has the same sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Packed:
    """Which conversations each sequence has: of sequence ``i`` those of ``order[begins[i] :
    begins[i + 1]]``."""

    order: NDArray[np.int64]
    begins: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.begins) - 1

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        return self.order[self.begins[index] : self.begins[index + 1]]


def pack(lengths: NDArray[np.int64], room: int, *, seed: int, alone: bool = False) -> Packed:
    """Pack conversations of ``lengths`` into sequences of ``room`` tokens.

    Args:
        lengths: tokens of each, 1 to ``room``.
        room: tokens of a sequence.
        seed: of the order of sequences, and of which of conversations equally long go together.
        alone: a conversation has a sequence of its own.
    """
    generator = np.random.default_rng(seed)
    shuffled = generator.permutation(len(lengths))
    longest_first = shuffled[np.argsort(-lengths[shuffled], kind="stable")]
    bins = [[int(one)] for one in longest_first] if alone else _fitted(longest_first, lengths, room)
    bins = [bins[place] for place in generator.permutation(len(bins))]
    return _flat(bins)


def _fitted(
    longest_first: NDArray[np.int64], lengths: NDArray[np.int64], room: int
) -> list[list[int]]:
    """Each conversation goes where it leaves the least room."""
    bins: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(room + 1)]
    # A bit for each amount of room that any sequence has: finding the least that suffices is a few
    # operations on words.
    there = 0
    for one, length in zip(longest_first.tolist(), lengths[longest_first].tolist(), strict=True):
        suits = there >> length
        if not suits:
            left = room
            bins.append([])
            place = len(bins) - 1
        else:
            left = length + (suits & -suits).bit_length() - 1
            place = with_room[left].pop()
            if not with_room[left]:
                there ^= 1 << left
        bins[place].append(one)
        left -= length
        if left:
            with_room[left].append(place)
            there |= 1 << left
    return bins


def _flat(bins: Sequence[Sequence[int]]) -> Packed:
    sizes = np.array([len(one) for one in bins], dtype=np.int64)
    order = np.array([item for one in bins for item in one], dtype=np.int64)
    return Packed(order, np.concatenate(([0], sizes.cumsum())).astype(np.int64))
