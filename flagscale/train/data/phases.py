"""Data phases (``data_phases``): blends of training data that follow each other.

Each phase is a blend as in megatron.core: the next sample comes from the dataset that is furthest
behind its weight. A dataset continues in a phase where the earlier phases left off, so a change of
weights repeats no data. The order of samples is fixed for the whole run: a resumed run continues
with the very next sample, whatever the phase.
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

from flagscale.config.arguments.spec.data_phases import DATA_PHASES, parse_phase
from flagscale.errors import CheckpointError, DataError
from flagscale.train.data.blends import Blend, parse_blend

_KEY = DATA_PHASES


@dataclass(frozen=True)
class Phases:
    """First sample and blend of each phase, and the total number of training samples."""

    begins: tuple[int, ...]
    blends: tuple[Blend, ...]
    total: int

    @property
    def prefixes(self) -> tuple[str, ...]:
        """All datasets, in the order in which they are first named."""
        return tuple(dict.fromkeys(p for blend in self.blends for p in blend.prefixes))

    def phase_lengths(self) -> list[int]:
        """Return the number of samples of each phase; 0 for phases that training does not reach."""
        ends = [*self.begins[1:], max(self.total, self.begins[-1])]
        pairs = zip(self.begins, ends, strict=True)
        return [max(min(end, self.total) - begin, 0) for begin, end in pairs]

    def dataset_shares(self, phase: int) -> NDArray[np.float64]:
        """Return the weight of each dataset in a phase; they sum to 1. Shape ``[datasets]``."""
        blend = self.blends[phase]
        weights = blend.weights or (1.0,) * len(blend.prefixes)
        weight_sums = np.zeros(len(self.prefixes))
        for prefix, weight in zip(blend.prefixes, weights, strict=True):
            weight_sums[self.prefixes.index(prefix)] += weight
        shares: NDArray[np.float64] = weight_sums / weight_sums.sum()
        return shares

    def sample_bounds(self) -> list[int]:
        """Return an upper bound of the samples that the phases take from each dataset.

        The blending never lets a dataset get more than one sample ahead of its weight.
        """
        counts = np.ones(len(self.prefixes))
        for phase, length in enumerate(self.phase_lengths()):
            shares = self.dataset_shares(phase)
            counts += np.where(shares > 0, np.floor(shares * length) + 2, 0) if length else 0
        return [int(count) for count in counts]

    @property
    def max_samples(self) -> int:
        """Upper bound of the samples of all datasets."""
        return sum(self.sample_bounds())

    @property
    def combined_blend(self) -> Blend:
        """All datasets, weighted by the samples that the whole run takes of them."""
        return Blend(self.prefixes, tuple(map(float, self.sample_bounds())))


def parse_phases(args: Any, first: Blend | None, total: int) -> Phases | None:
    """Parse the phases in the arguments.

    Args:
        args: the resolved training arguments.
        first: blend of the first phase.
        total: number of training samples.

    Returns:
        None without ``data_phases``, or with a single dataset.

    Raises:
        DataError: a phase is not a blend, or has several datasets without weights.
    """
    if not args.data_phases or first is None:
        return None
    begins, blends = [0], [first]
    for text in args.data_phases:
        try:
            phase = parse_phase(text)
        except ValueError as error:
            raise DataError(f"{_KEY}: {error}") from error
        begins.append(phase.begin(args.seq_length))
        blends.append(parse_blend(phase.words, _KEY))
    for blend in blends:
        if blend.weights is None and len(blend.prefixes) > 1:
            names = ", ".join(blend.prefixes)
            raise DataError(f"{_KEY}: data sets without weights ({names}) cannot be a phase")
    phases = Phases(tuple(begins), tuple(blends), total)
    return phases if len(phases.prefixes) > 1 else None


def order_samples(phases: Phases) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """Return, for every training sample, its dataset and its number in that dataset.

    Returns:
        Two arrays of shape ``[samples]``.
    """
    from megatron.core.datasets import helpers

    sets = np.zeros(phases.total, dtype=np.int16)
    samples = np.zeros(phases.total, dtype=np.int64)
    consumed = np.zeros(len(phases.prefixes), dtype=np.int64)
    for phase, begin, length in _iter_spans(phases):
        phase_sets, phase_samples = sets[begin : begin + length], samples[begin : begin + length]
        # Datasets with weight 0 are left out, because megatron.core's helper would give them a
        # sample whenever no other dataset is behind its weight.
        used = np.flatnonzero(phases.dataset_shares(phase))
        shares = phases.dataset_shares(phase)[used]
        helpers.build_blending_indices(phase_sets, phase_samples, shares, len(used), length, False)
        phase_sets[:] = used[phase_sets]
        phase_samples += consumed[phase_sets]
        consumed += np.bincount(phase_sets, minlength=len(consumed))
    return sets, samples


def _iter_spans(phases: Phases) -> Iterator[tuple[int, int, int]]:
    """Yield number, first sample and length of each phase that training reaches."""
    for phase, (begin, length) in enumerate(
        zip(phases.begins, phases.phase_lengths(), strict=True)
    ):
        if length:
            yield phase, begin, length


def apply_phases(data: Any, phases: Phases, cache: Path | None) -> None:
    """Replace the sample order of a blend of all datasets by that of the phases. Collective.

    With ``cache``, rank 0 writes the order there and all ranks memory-map it.

    Raises:
        DataError: the cache cannot be written or read, or a dataset has too few samples.
    """
    sets, samples = order_samples(phases) if cache is None else _load_order(phases, cache)
    for prefix, dataset, needed in zip(
        phases.prefixes, data.datasets, phases.sample_bounds(), strict=True
    ):
        if len(dataset) < needed:
            raise DataError(
                f"{_KEY}: {prefix} has {len(dataset)} samples, the phases take {needed}"
            )
    data.dataset_index, data.dataset_sample_index = sets, samples


def _load_order(phases: Phases, cache: Path) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """Return the order, memory-mapped from files that rank 0 writes."""
    from flagscale.train.checkpoint.collective_errors import run_on_rank_0

    shares = [phases.dataset_shares(phase).tolist() for phase in range(len(phases.begins))]
    description = json.dumps([phases.begins, shares, phases.total])
    name = hashlib.sha256(description.encode()).hexdigest()[:32]
    files = [cache / f"{name}-phases-{kind}.npy" for kind in ("sets", "samples")]

    def write() -> None:
        if not all(file.exists() for file in files):
            cache.mkdir(parents=True, exist_ok=True)
            arrays: tuple[NDArray[Any], ...] = order_samples(phases)
            for file, array in zip(files, arrays, strict=True):
                partial = file.with_name(f"{file.name}.partial-{os.getpid()}")
                with partial.open("wb") as stream:
                    np.save(stream, array)
                partial.replace(file)

    try:
        run_on_rank_0(write)
        sets, samples = (np.load(file, mmap_mode="r") for file in files)
    except (CheckpointError, OSError, ValueError) as error:
        raise DataError(
            f"the order of {_KEY} cannot be kept in {cache}: {error}",
            hint="all hosts must see data_cache_path, and rank 0 write there",
        ) from error
    return sets, samples
