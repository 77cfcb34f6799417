"""Plan of which rank receives which parts of sharded parameters, with bounded memory.

The module imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Part(NamedTuple):
    """Elements of a flat parameter that one rank holds.

    Attributes:
        rank: the rank.
        start: first element.
        end: last element (exclusive).
    """

    rank: int
    start: int
    end: int


class Piece(NamedTuple):
    """Elements of a flat parameter that one rank sends to another.

    Attributes:
        parameter: index of the parameter.
        source: rank that holds the elements.
        owner: rank that receives them; maybe the source itself.
        start: first element.
        end: last element (exclusive).
    """

    parameter: int
    source: int
    owner: int
    start: int
    end: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.end - self.start


def locate_parts(start: int, end: int, *, offset: int, shard_size: int) -> list[Part]:
    """Return the parts of a parameter, in the order of their elements.

    Args:
        start: first element of the parameter in its buffer.
        end: last element (exclusive).
        offset: first element of the parameter's bucket in the buffer.
        shard_size: number of elements of the bucket that a rank holds.
    """
    parts = []
    begin = start
    while begin < end:
        rank = (begin - offset) // shard_size
        stop = min(end, offset + (rank + 1) * shard_size)
        parts.append(Part(rank, begin - start, stop - start))
        begin = stop
    return parts


def choose_owners(sizes: Sequence[int], ranks: int) -> list[int]:
    """Return a rank for each parameter such that ranks get about equal numbers of elements."""
    loads = [0] * ranks
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += sizes[index]
    return owners


def plan_waves(sizes: Sequence[int], owners: Sequence[int]) -> list[list[int]]:
    """Return waves of indices of parameters that are exchanged together.

    In a wave a rank receives at most as many elements as the largest parameter has.

    Args:
        sizes: number of elements of each parameter.
        owners: rank that receives each parameter.
    """
    max_elements = max(sizes, default=0)
    waves: list[list[int]] = []
    positions = dict.fromkeys(owners, (0, 0))
    # Owners process their large parameters at the same time.
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        owner, size = owners[index], sizes[index]
        number, filled = positions[owner]
        if filled + size > max_elements:
            number, filled = number + 1, 0
        if number == len(waves):
            waves.append([])
        waves[number].append(index)
        positions[owner] = number, filled + size
    return waves


def plan_rounds(
    parts: Iterable[Sequence[Part]], owners: Sequence[int], round_size: int
) -> list[list[Piece]]:
    """Return rounds of pieces that bring all parts of each parameter to its owner.

    Args:
        parts: the parts of each parameter.
        owners: the owner of each parameter.
        round_size: maximum number of elements that an owner receives in one round.
    """
    rounds: list[list[Piece]] = []
    received = dict.fromkeys(owners, 0)
    for parameter, (parameter_parts, owner) in enumerate(zip(parts, owners, strict=True)):
        for part in parameter_parts:
            begin = part.start
            while begin < part.end:
                index, filled = divmod(received[owner], round_size)
                size = min(part.end - begin, round_size - filled)
                if index == len(rounds):
                    rounds.append([])
                rounds[index].append(Piece(parameter, part.rank, owner, begin, begin + size))
                received[owner] += size
                begin += size
    return rounds
