"""Sampler: which samples a data-parallel rank reads, and when.

The order of samples is one sequence for the whole job, whatever its layout. The global batch of a
step is the next ``global_batch_size`` samples. Micro-batch ``m`` of a step takes the next
``micro_batch_size x size`` samples, of which rank ``r`` reads the ``r``-th part. A run that resumes
after ``consumed`` samples with any other layout therefore continues with the very next sample.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Order = Literal["single", "wrapped", "cyclic"]
"""``single`` reads samples 0, 1, 2, … and ends; ``wrapped`` starts over after the last one;
``cyclic`` reads each epoch in another random order and never ends.
"""


@dataclass(frozen=True)
class Shard:
    """A rank's part of the samples.

    Of every ``width`` consecutive samples, it reads ``micro_batches`` one after the other, each a
    range of positions among them.
    """

    width: int
    micro_batches: tuple[range, ...]

    @classmethod
    def even(cls, rank: int = 0, size: int = 1, micro_batch_size: int = 1) -> Shard:
        """Return the ``rank``-th of ``size`` equal parts of each micro-batch."""
        if not 0 <= rank < size:
            raise ValueError(f"data-parallel rank {rank} is not in [0, {size})")
        first = rank * micro_batch_size
        return cls(size * micro_batch_size, (range(first, first + micro_batch_size),))

    def __post_init__(self) -> None:
        inside = range(self.width)
        if not self.micro_batches or not all(
            part and part[0] in inside and part[-1] in inside for part in self.micro_batches
        ):
            raise ValueError(f"{self.micro_batches} are no parts of {self.width} samples")


class MicroBatchSampler:
    """``batch_sampler`` of a DataLoader that yields the sample indices of each micro-batch.

    It is endless unless ``order`` is ``single``.
    """

    def __init__(
        self,
        samples: int,
        shard: Shard,
        *,
        consumed: int = 0,
        order: Order = "single",
        seed: int = 0,
    ) -> None:
        """Create a sampler.

        Args:
            samples: number of samples in the dataset.
            shard: this rank's part.
            consumed: samples that all ranks have consumed before.
            order: order of samples.
            seed: seed of the random order.
        """
        if samples < 1 or consumed < 0:
            raise ValueError(f"bad sizes: {samples=} {consumed=}")
        self._samples = samples
        self._shard = shard
        self._consumed = consumed
        self._order = order
        self._seed = seed
        self._epoch: tuple[int, NDArray[np.int64]] | None = None

    def __iter__(self) -> Iterator[list[int]]:
        position, width = self._consumed, self._shard.width
        while self._order != "single" or position + width <= self._samples:
            for part in self._shard.micro_batches:
                yield [self._get_sample(position + offset) for offset in part]
            position += width

    def _get_sample(self, position: int) -> int:
        epoch, index = divmod(position, self._samples)
        if self._order != "cyclic":
            return index
        if self._epoch is None or self._epoch[0] != epoch:
            generator = np.random.default_rng([self._seed, epoch])
            self._epoch = (epoch, generator.permutation(self._samples))
        return int(self._epoch[1][index])
