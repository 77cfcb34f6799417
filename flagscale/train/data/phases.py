"""Data phases (``data_phases``): blends of training data that follow each other.

Each phase is a blend as in megatron.core: the next sample comes from the dataset that is furthest
behind its weight. A dataset continues in a phase where the earlier phases left off, so a change of
weights repeats no data. The order of samples is fixed for the whole run: a resumed run continues
with the very next sample, whatever the phase.

megatron.core builds one blend of all datasets (:attr:`Phases.combined_blend`);
:func:`apply_phases` then replaces its order of samples.
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

from flagscale.config.arguments.spec.paths import DATA_PHASES, parse_phase
from flagscale.errors import CheckpointError, DataError
from flagscale.train.data.blends import Blend, parse_blend

_KEY = DATA_PHASES


@dataclass(frozen=True)
class Phases:
    """Data phases of a run.

    Attributes:
        first_samples: number of the first training sample of each phase, counted from 0.
        blends: blend of each phase.
        total_samples: number of training samples of the run.
    """

    first_samples: tuple[int, ...]
    blends: tuple[Blend, ...]
    total_samples: int

    @property
    def prefixes(self) -> tuple[str, ...]:
        """Prefixes of all datasets, in the order in which the blends first name them."""
        return tuple(dict.fromkeys(p for blend in self.blends for p in blend.prefixes))

    def phase_lengths(self) -> list[int]:
        """Return the number of samples of each phase; 0 for phases that training does not reach."""
        ends = [*self.first_samples[1:], max(self.total_samples, self.first_samples[-1])]
        ranges = zip(self.first_samples, ends, strict=True)
        return [max(min(end, self.total_samples) - begin, 0) for begin, end in ranges]

    def dataset_weights(self, phase: int) -> NDArray[np.float64]:
        """Return the weight of each dataset in a phase; they sum to 1. Shape ``[datasets]``."""
        blend = self.blends[phase]
        blend_weights = blend.weights or (1.0,) * len(blend.prefixes)
        weight_sums = np.zeros(len(self.prefixes))
        for prefix, weight in zip(blend.prefixes, blend_weights, strict=True):
            weight_sums[self.prefixes.index(prefix)] += weight
        normalized_weights: NDArray[np.float64] = weight_sums / weight_sums.sum()
        return normalized_weights

    def sample_bounds(self) -> list[int]:
        """Return an upper bound of the samples that the phases take from each dataset.

        The blending never lets a dataset get more than one sample ahead of its weight. The list
        has the order of :attr:`prefixes`.
        """
        counts = np.ones(len(self.prefixes))
        for phase, length in enumerate(self.phase_lengths()):
            weights = self.dataset_weights(phase)
            counts += np.where(weights > 0, np.floor(weights * length) + 2, 0) if length else 0
        return [int(count) for count in counts]

    @property
    def max_samples(self) -> int:
        """Sum of :meth:`sample_bounds`."""
        return sum(self.sample_bounds())

    @property
    def combined_blend(self) -> Blend:
        """Blend of all datasets, weighted by :meth:`sample_bounds`."""
        return Blend(self.prefixes, tuple(map(float, self.sample_bounds())))


def parse_phases(args: Any, first_blend: Blend | None, total_samples: int) -> Phases | None:
    """Parse the phases in the arguments.

    Args:
        args: the resolved training arguments.
        first_blend: blend of the first phase (``data_path`` or ``train_data_path``).
        total_samples: number of training samples of the run.

    Returns:
        None without ``data_phases``, or with a single dataset.

    Raises:
        DataError: a phase is not a blend, or has several datasets without weights.
    """
    if not args.data_phases or first_blend is None:
        return None
    first_samples, blends = [0], [first_blend]
    for text in args.data_phases:
        try:
            phase = parse_phase(text)
        except ValueError as error:
            raise DataError(f"{_KEY}: {error}") from error
        first_samples.append(phase.first_sample(args.seq_length))
        blends.append(parse_blend(phase.words, _KEY))
    for blend in blends:
        if blend.weights is None and len(blend.prefixes) > 1:
            names = ", ".join(blend.prefixes)
            raise DataError(f"{_KEY}: data sets without weights ({names}) cannot be a phase")
    phases = Phases(tuple(first_samples), tuple(blends), total_samples)
    return phases if len(phases.prefixes) > 1 else None


def order_samples(phases: Phases) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """Return, for every training sample, its dataset and its number in that dataset.

    Returns:
        Index into :attr:`Phases.prefixes` (int16), and number of the sample in that dataset
        (int64), each of shape ``[total_samples]``.
    """
    from megatron.core.datasets import helpers

    dataset_indices = np.zeros(phases.total_samples, dtype=np.int16)
    sample_indices = np.zeros(phases.total_samples, dtype=np.int64)
    consumed_samples = np.zeros(len(phases.prefixes), dtype=np.int64)
    for phase, begin, length in _iter_phase_ranges(phases):
        phase_datasets = dataset_indices[begin : begin + length]
        phase_samples = sample_indices[begin : begin + length]
        # Datasets with weight 0 are left out, because megatron.core's helper would give them a
        # sample whenever no other dataset is behind its weight.
        used_datasets = np.flatnonzero(phases.dataset_weights(phase))
        weights = phases.dataset_weights(phase)[used_datasets]
        helpers.build_blending_indices(
            phase_datasets, phase_samples, weights, len(used_datasets), length, False
        )
        phase_datasets[:] = used_datasets[phase_datasets]
        phase_samples += consumed_samples[phase_datasets]
        consumed_samples += np.bincount(phase_datasets, minlength=len(consumed_samples))
    return dataset_indices, sample_indices


def _iter_phase_ranges(phases: Phases) -> Iterator[tuple[int, int, int]]:
    """Yield index, first sample and length of each phase that training reaches."""
    for phase, (begin, length) in enumerate(
        zip(phases.first_samples, phases.phase_lengths(), strict=True)
    ):
        if length:
            yield phase, begin, length


def apply_phases(blended_dataset: Any, phases: Phases, cache_directory: Path | None) -> None:
    """Replace the sample order of a blend of all datasets by that of the phases. Collective.

    With a cache directory, rank 0 writes the order there and all ranks memory-map it.

    Args:
        blended_dataset: megatron.core's ``BlendedDataset`` of :attr:`Phases.combined_blend`.
        phases: the phases.
        cache_directory: directory of the index cache, or None to compute the order on each rank.

    Raises:
        DataError: the cache cannot be written or read, or a dataset has too few samples.
    """
    dataset_indices, sample_indices = (
        order_samples(phases) if cache_directory is None else _load_order(phases, cache_directory)
    )
    for prefix, dataset, needed_samples in zip(
        phases.prefixes, blended_dataset.datasets, phases.sample_bounds(), strict=True
    ):
        if len(dataset) < needed_samples:
            raise DataError(
                f"{_KEY}: {prefix} has {len(dataset)} samples, the phases take {needed_samples}"
            )
    blended_dataset.dataset_index = dataset_indices
    blended_dataset.dataset_sample_index = sample_indices


def _load_order(
    phases: Phases, cache_directory: Path
) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """Return the order, memory-mapped from files that rank 0 writes."""
    from flagscale.train.checkpoint.collective_errors import run_on_rank_0

    weights = [phases.dataset_weights(phase).tolist() for phase in range(len(phases.first_samples))]
    description = json.dumps([phases.first_samples, weights, phases.total_samples])
    name = hashlib.sha256(description.encode()).hexdigest()[:32]
    files = [cache_directory / f"{name}-phases-{kind}.npy" for kind in ("sets", "samples")]

    def write_order() -> None:
        if not all(file.exists() for file in files):
            cache_directory.mkdir(parents=True, exist_ok=True)
            arrays: tuple[NDArray[Any], ...] = order_samples(phases)
            for file, array in zip(files, arrays, strict=True):
                partial = file.with_name(f"{file.name}.partial-{os.getpid()}")
                with partial.open("wb") as stream:
                    np.save(stream, array)
                partial.replace(file)

    try:
        run_on_rank_0(write_order)
        dataset_indices, sample_indices = (np.load(file, mmap_mode="r") for file in files)
    except (CheckpointError, OSError, ValueError) as error:
        raise DataError(
            f"the order of {_KEY} cannot be kept in {cache_directory}: {error}",
            hint="all hosts must see data_cache_path, and rank 0 write there",
        ) from error
    return dataset_indices, sample_indices
