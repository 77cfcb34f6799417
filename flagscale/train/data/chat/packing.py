"""Packing of conversations into sequences: best fit, longest first.

The result depends only on the lengths and the seed, never on ranks, so every layout and every
resumed run has the same sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class PackedSequences:
    """Sequences of conversations: sequence ``i`` is ``order[begins[i] : begins[i + 1]]``."""

    order: NDArray[np.int64]
    begins: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.begins) - 1

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        return self.order[self.begins[index] : self.begins[index + 1]]


def pack(
    lengths: NDArray[np.int64], capacity: int, *, seed: int, alone: bool = False
) -> PackedSequences:
    """Pack conversations into sequences.

    Args:
        lengths: number of tokens of each conversation, 1 to ``capacity``. Shape
        ``[conversations]``. capacity: number of tokens of a sequence. seed: determines the order of
        sequences, and how conversations of equal length are combined. alone: give each conversation
        a sequence of its own.
    """
    generator = np.random.default_rng(seed)
    shuffled = generator.permutation(len(lengths))
    longest_first = shuffled[np.argsort(-lengths[shuffled], kind="stable")]
    if alone:
        bins = [[index] for index in longest_first.tolist()]
    else:
        bins = _pack_best_fit(longest_first, lengths, capacity)
    bins = [bins[index] for index in generator.permutation(len(bins))]
    sizes = np.array([len(members) for members in bins], dtype=np.int64)
    order = np.array([index for members in bins for index in members], dtype=np.int64)
    return PackedSequences(order, np.concatenate(([0], sizes.cumsum())).astype(np.int64))


def _pack_best_fit(
    longest_first: NDArray[np.int64], lengths: NDArray[np.int64], capacity: int
) -> list[list[int]]:
    """Put each conversation into the sequence that it leaves the least space in."""
    bins: list[list[int]] = []
    bins_by_space: list[list[int]] = [[] for _ in range(capacity + 1)]
    # Bit i is set if any sequence has space for i tokens, so the smallest sufficient space is found
    # with a few word operations.
    spaces = 0
    indices = longest_first.tolist()
    for index, length in zip(indices, lengths[longest_first].tolist(), strict=True):
        sufficient = spaces >> length
        if sufficient:
            space = length + (sufficient & -sufficient).bit_length() - 1
            target = bins_by_space[space].pop()
            if not bins_by_space[space]:
                spaces ^= 1 << space
        else:
            space = capacity
            target = len(bins)
            bins.append([])
        bins[target].append(index)
        space -= length
        if space:
            bins_by_space[space].append(target)
            spaces |= 1 << space
    return bins
