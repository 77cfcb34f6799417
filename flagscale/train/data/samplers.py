"""Which samples a data-parallel rank takes when.

The order of samples is one sequence for the whole job, whatever its layout: a step's global batch
is the next ``global_batch_size`` of it. Micro-batch ``m`` of a step takes the next
``micro_batch_size x size`` samples, of which rank ``r`` has the ``r``-th part. So a run that
resumes after ``consumed`` samples, with any other layout, goes on with the very next sample.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Order = Literal["single", "wrapped", "cyclic"]
"""``single`` takes samples 0, 1, 2 ... and ends; ``wrapped`` begins anew after the last;
``cyclic`` takes each epoch in another random order and never ends."""


@dataclass(frozen=True)
class Shard:
    """This rank's part of every micro-batch: ``rank`` of ``size`` data-parallel ranks."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"data-parallel rank {self.rank} is not in [0, {self.size})")


class MicroBatchSampler:
    """Yields the sample indices of one micro-batch after the other; a DataLoader's
    ``batch_sampler``. It is an endless iterable unless ``order`` is ``single``."""

    def __init__(
        self,
        samples: int,
        micro_batch_size: int,
        shard: Shard,
        *,
        consumed: int = 0,
        order: Order = "single",
        seed: int = 0,
    ) -> None:
        """``samples`` are in the data set, ``consumed`` were taken by all ranks before."""
        if samples < 1 or micro_batch_size < 1 or consumed < 0:
            raise ValueError(f"bad sizes: {samples=} {micro_batch_size=} {consumed=}")
        self._samples = samples
        self._micro_batch_size = micro_batch_size
        self._shard = shard
        self._consumed = consumed
        self._order = order
        self._seed = seed
        self._epoch: tuple[int, NDArray[np.int64]] | None = None

    def __iter__(self) -> Iterator[list[int]]:
        width = self._micro_batch_size * self._shard.size
        position = self._consumed
        while self._order != "single" or position + width <= self._samples:
            first = position + self._shard.rank * self._micro_batch_size
            yield [self._sample(first + i) for i in range(self._micro_batch_size)]
            position += width

    def _sample(self, position: int) -> int:
        epoch, index = divmod(position, self._samples)
        if self._order != "cyclic":
            return index
        if self._epoch is None or self._epoch[0] != epoch:
            generator = np.random.default_rng([self._seed, epoch])
            self._epoch = (epoch, generator.permutation(self._samples))
        return int(self._epoch[1][index])
