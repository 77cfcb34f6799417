"""Sampler: the samples that a data-parallel rank reads, and their order.

The order of samples is one sequence for the whole job, whatever its layout. The global batch of a
step is the next ``global_batch_size`` samples. Micro-batch ``m`` of a step takes the next
``micro_batch_size * data_parallel_size`` samples, of which data-parallel rank ``r`` reads the
``r``-th of the equal parts. A run that resumes after ``consumed`` samples with any other layout
therefore continues with the very next sample.

Replicas whose micro-batches differ in size read unequal parts: see :class:`Shard`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

SampleOrder = Literal["single", "wrapped", "cyclic"]
"""``single`` reads samples 0, 1, 2, … and ends; ``wrapped`` starts over after the last one;
``cyclic`` reads each epoch in another random order and never ends.
"""


@dataclass(frozen=True)
class Shard:
    """Positions of the samples that a data-parallel rank reads.

    The ranks divide every ``width`` consecutive samples of the job between them. This rank reads
    ``micro_batches`` of these, one after the other; each is a range of positions in ``[0, width)``.
    """

    width: int
    micro_batches: tuple[range, ...]

    @classmethod
    def for_equal_ranks(
        cls, rank: int = 0, rank_count: int = 1, micro_batch_size: int = 1
    ) -> Shard:
        """Return the shard of a rank when all ranks read micro-batches of the same size.

        Args:
            rank: data-parallel rank.
            rank_count: number of data-parallel ranks.
            micro_batch_size: samples of a micro-batch of one rank.
        """
        if not 0 <= rank < rank_count:
            raise ValueError(f"data-parallel rank {rank} is not in [0, {rank_count})")
        first = rank * micro_batch_size
        return cls(rank_count * micro_batch_size, (range(first, first + micro_batch_size),))

    def __post_init__(self) -> None:
        valid_positions = range(self.width)
        if not self.micro_batches or not all(
            positions and positions[0] in valid_positions and positions[-1] in valid_positions
            for positions in self.micro_batches
        ):
            raise ValueError(f"{self.micro_batches} are not positions in {self.width} samples")


class MicroBatchSampler:
    """``batch_sampler`` of a DataLoader that yields the sample indices of each micro-batch.

    The sampler is endless unless ``order`` is ``single``.
    """

    def __init__(
        self,
        sample_count: int,
        shard: Shard,
        *,
        consumed: int = 0,
        order: SampleOrder = "single",
        seed: int = 0,
    ) -> None:
        """Create a sampler.

        Args:
            sample_count: number of samples in the dataset.
            shard: the samples that this rank reads.
            consumed: samples of the dataset that all ranks have consumed before.
            order: order of samples.
            seed: seed of the random order.
        """
        if sample_count < 1 or consumed < 0:
            raise ValueError(f"bad sizes: {sample_count=} {consumed=}")
        self._sample_count = sample_count
        self._shard = shard
        self._consumed = consumed
        self._order = order
        self._seed = seed
        self._epoch_permutation: tuple[int, NDArray[np.int64]] | None = None

    def __iter__(self) -> Iterator[list[int]]:
        first_position, width = self._consumed, self._shard.width
        while self._order != "single" or first_position + width <= self._sample_count:
            for positions in self._shard.micro_batches:
                yield [self._sample_at(first_position + offset) for offset in positions]
            first_position += width

    def _sample_at(self, position: int) -> int:
        epoch, index = divmod(position, self._sample_count)
        if self._order != "cyclic":
            return index
        if self._epoch_permutation is None or self._epoch_permutation[0] != epoch:
            generator = np.random.default_rng([self._seed, epoch])
            self._epoch_permutation = (epoch, generator.permutation(self._sample_count))
        return int(self._epoch_permutation[1][index])
