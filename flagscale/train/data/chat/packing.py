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
    """Conversation indices of each sequence.

    Sequence ``i`` holds ``conversations[offsets[i] : offsets[i + 1]]``.
    """

    conversations: NDArray[np.int64]
    offsets: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        return self.conversations[self.offsets[index] : self.offsets[index + 1]]


def pack_conversations(
    lengths: NDArray[np.int64], capacity: int, *, seed: int, one_per_sequence: bool = False
) -> PackedSequences:
    """Pack conversations into sequences.

    Args:
        lengths: number of tokens of each conversation, 1 to ``capacity``. Shape
            ``[conversations]``.
        capacity: number of tokens of a sequence.
        seed: determines the order of sequences, and how conversations of equal length are combined.
        one_per_sequence: give each conversation a sequence of its own.
    """
    generator = np.random.default_rng(seed)
    shuffled = generator.permutation(len(lengths))
    longest_first = shuffled[np.argsort(-lengths[shuffled], kind="stable")]
    if one_per_sequence:
        bins = [[index] for index in longest_first.tolist()]
    else:
        bins = pack_best_fit(longest_first, lengths, capacity)
    bins = [bins[index] for index in generator.permutation(len(bins))]
    sizes = np.array([len(members) for members in bins], dtype=np.int64)
    conversations = np.array([index for members in bins for index in members], dtype=np.int64)
    return PackedSequences(conversations, np.concatenate(([0], sizes.cumsum())).astype(np.int64))


def pack_best_fit(
    longest_first: NDArray[np.int64],
    lengths: NDArray[np.int64],
    capacity: int,
    max_members: int | None = None,
) -> list[list[int]]:
    """Put each item into the sequence that it leaves the least space in.

    Args:
        longest_first: indices of the items, in descending order of length.
        lengths: number of tokens of each item.
        capacity: number of tokens of a sequence.
        max_members: maximum number of items of a sequence; None for no limit.

    Returns:
        The indices of the items of each sequence.
    """
    bins: list[list[int]] = []
    bins_by_space: list[list[int]] = [[] for _ in range(capacity + 1)]
    # Bit i is set if any sequence has space for exactly i more tokens. A few word operations then
    # find the smallest sufficient space.
    available_spaces = 0
    indices = longest_first.tolist()
    for index, length in zip(indices, lengths[longest_first].tolist(), strict=True):
        sufficient = available_spaces >> length
        if sufficient:
            space = length + (sufficient & -sufficient).bit_length() - 1
            bin_index = bins_by_space[space].pop()
            if not bins_by_space[space]:
                available_spaces ^= 1 << space
        else:
            space = capacity
            bin_index = len(bins)
            bins.append([])
        bins[bin_index].append(index)
        space -= length
        if space and len(bins[bin_index]) != max_members:
            bins_by_space[space].append(bin_index)
            available_spaces |= 1 << space
    return bins
