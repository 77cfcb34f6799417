"""Mixtures of training data that follow each other (``data_phases``).

Each phase is a blend as megatron.core makes one: the next sample is of the data set that is
furthest behind its weight. A data set goes on in a phase where the phases before have left it, so
that nothing is repeated for a change of weights. Which sample comes when is fixed for the whole
run: one that resumes goes on with the very next sample, in whichever phase it is.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flagscale.config.arguments import phases as given
from flagscale.errors import CheckpointError, DataError
from flagscale.train.data.blends import Blend, parse_blend

_KEY = given.NAME


@dataclass(frozen=True)
class Phases:
    """Of ``total`` samples of training, the first of each phase, and the phase's blend."""

    begins: tuple[int, ...]
    blends: tuple[Blend, ...]
    total: int

    @property
    def prefixes(self) -> tuple[str, ...]:
        """All data sets, in the order in which they are named."""
        return tuple(dict.fromkeys(p for blend in self.blends for p in blend.prefixes))

    def lengths(self) -> list[int]:
        """Samples of each phase; none of those that training does not come to."""
        ends = [*self.begins[1:], max(self.total, self.begins[-1])]
        pairs = zip(self.begins, ends, strict=True)
        return [max(min(end, self.total) - begin, 0) for begin, end in pairs]

    def shares(self, phase: int) -> NDArray[np.float64]:
        """The weight of each data set in a phase; they sum to 1. Shape ``[data sets]``."""
        blend = self.blends[phase]
        weights = blend.weights or (1.0,) * len(blend.prefixes)
        found = np.zeros(len(self.prefixes))
        for prefix, weight in zip(blend.prefixes, weights, strict=True):
            found[self.prefixes.index(prefix)] += weight
        shares: NDArray[np.float64] = found / found.sum()
        return shares

    def bounds(self) -> list[int]:
        """Samples of each data set that the phases take at most: the blending never gives a data
        set more than one sample ahead of its weight."""
        found = np.ones(len(self.prefixes))
        for phase, length in enumerate(self.lengths()):
            own = self.shares(phase)
            found += np.where(own > 0, np.floor(own * length) + 2, 0) if length else 0
        return [int(count) for count in found]

    @property
    def most(self) -> int:
        """Samples of all data sets to have at hand."""
        return sum(self.bounds())

    @property
    def whole(self) -> Blend:
        """All data sets, weighted by what the whole run takes of them."""
        return Blend(self.prefixes, tuple(map(float, self.bounds())))


def phases_of(args: Any, first: Blend | None, total: int) -> Phases | None:
    """The phases that arguments say; None without ``data_phases``, or with one data set.

    Raises:
        DataError: a phase says no blend, or one with data sets that have no weights.
    """
    if not args.data_phases or first is None:
        return None
    begins, blends = [0], [first]
    for text in args.data_phases:
        try:
            phase = given.parse(text)
        except ValueError as error:
            raise DataError(f"{_KEY}: {error}") from error
        begins.append(phase.begin(args.seq_length))
        blends.append(parse_blend(phase.words, _KEY))
    for blend in blends:
        if blend.weights is None and len(blend.prefixes) > 1:
            names = ", ".join(blend.prefixes)
            raise DataError(f"{_KEY}: data sets without weights ({names}) cannot be a phase")
    found = Phases(tuple(begins), tuple(blends), total)
    return found if len(found.prefixes) > 1 else None


def order(phases: Phases) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """Of every sample of training its data set, and which of its samples it is. Shape
    ``[samples]`` each."""
    from megatron.core.datasets import helpers

    sets = np.zeros(phases.total, dtype=np.int16)
    samples = np.zeros(phases.total, dtype=np.int64)
    taken = np.zeros(len(phases.prefixes), dtype=np.int64)
    for phase, begin, length in _spans(phases):
        own_sets, own_samples = sets[begin : begin + length], samples[begin : begin + length]
        # A data set without a weight would get a sample where no other is behind its own.
        used = np.flatnonzero(phases.shares(phase))
        shares = phases.shares(phase)[used]
        helpers.build_blending_indices(own_sets, own_samples, shares, len(used), length, False)
        own_sets[:] = used[own_sets]
        own_samples += taken[own_sets]
        taken += np.bincount(own_sets, minlength=len(taken))
    return sets, samples


def _spans(phases: Phases) -> Iterator[tuple[int, int, int]]:
    """Of each phase that training comes to: its number, its first sample, its samples."""
    for phase, (begin, length) in enumerate(zip(phases.begins, phases.lengths(), strict=True)):
        if length:
            yield phase, begin, length


def take_turns(data: Any, phases: Phases, cache: Path | None) -> None:
    """Give a blend of all data sets the order of the phases. All ranks call it; with a ``cache``
    rank 0 writes the order there, and all map it.

    Raises:
        DataError: the cache cannot be written or read, or a data set has too few samples.
    """
    sets, samples = order(phases) if cache is None else _shared(phases, cache)
    for prefix, own, least in zip(phases.prefixes, data.datasets, phases.bounds(), strict=True):
        if len(own) < least:
            raise DataError(f"{_KEY}: {prefix} has {len(own)} samples, the phases take {least}")
    data.dataset_index, data.dataset_sample_index = sets, samples


def _shared(phases: Phases, cache: Path) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """The order, mapped from files that rank 0 has written."""
    from flagscale.train.checkpoint.agreement import on_rank_0

    shares = [phases.shares(phase).tolist() for phase in range(len(phases.begins))]
    said = json.dumps([phases.begins, shares, phases.total])
    name = hashlib.sha256(said.encode()).hexdigest()[:32]
    files = [cache / f"{name}-phases-{what}.npy" for what in ("sets", "samples")]

    def write() -> None:
        if not all(file.exists() for file in files):
            cache.mkdir(parents=True, exist_ok=True)
            made: tuple[NDArray[Any], ...] = order(phases)
            for file, array in zip(files, made, strict=True):
                partial = file.with_name(f"{file.name}.partial-{os.getpid()}")
                with partial.open("wb") as stream:
                    np.save(stream, array)
                partial.replace(file)

    try:
        on_rank_0(write)
        sets, samples = (np.load(file, mmap_mode="r") for file in files)
    except (CheckpointError, OSError, ValueError) as error:
        raise DataError(
            f"the order of {_KEY} cannot be kept in {cache}: {error}",
            hint="all hosts must see data_cache_path, and rank 0 write there",
        ) from error
    return sets, samples
