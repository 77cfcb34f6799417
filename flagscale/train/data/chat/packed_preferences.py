"""Dataset of packed pairs of answers, with their log-probabilities under the reference model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from flagscale.train.data.chat.packed_dataset import PackedSamples

REFERENCE_KEY = "reference_logps"
"""Key of the tensor [2, pairs of a sequence] with the log-probabilities, in nats, of the answers
under the reference model. It is padded with zeros."""


class PackedPreferences(PackedSamples):
    """Dataset of pairs. A sample is two sequences of the same pairs in the same order.

    The tensors of a sample are ``[2, length]``: the chosen answers, then the rejected ones. All but
    the padding has a document number, which is the pair's number in the sequence.
    """

    conversations_per_sample: ClassVar[int] = 2
    noun: ClassVar[str] = "pairs"
    argument: ClassVar[str] = "dpo"

    @cached_property
    def max_pairs(self) -> int:
        """Largest number of pairs in a sequence."""
        return int(np.diff(self._sequences.offsets).max())

    @cached_property
    def _reference(self) -> NDArray[np.float64]:
        """Log-probabilities under the reference model, [pairs, 2]."""
        return np.zeros((self.sample_count, 2))

    @property
    def paths(self) -> list[Path]:
        """The files of the pairs."""
        return [file.path for file in self._files]

    def set_reference(self, scores: Mapping[Path, NDArray[np.float64]]) -> None:
        """Set the log-probabilities under the reference model.

        Args:
            scores: for each file of which pairs are left, their log-probabilities, [pairs, 2].
        """
        for index, file in enumerate(self._files):
            is_here = self._file_indices == index
            if is_here.any():
                self._reference[is_here] = scores[file.path][self._sample_indices[is_here]]

    def pairs_of(self, index: int) -> NDArray[np.int64]:
        """Return the numbers of a sequence's pairs in their file. The dataset has one file."""
        return self._sample_indices[self._sequences[index]]

    @property
    def used_pairs(self) -> NDArray[np.int64]:
        """Numbers of the pairs that are not left out, in their file. The dataset has one file."""
        return self._sample_indices

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        members = [self._build_sequence(index, member) for member in range(2)]
        sample = {name: np.stack([member[name] for member in members]) for name in members[0]}
        pairs = self._sequences[index]
        reference = np.zeros((2, self.max_pairs))
        reference[:, : len(pairs)] = self._reference[pairs].T
        return {
            **{name: torch.from_numpy(array) for name, array in sample.items()},
            REFERENCE_KEY: torch.from_numpy(reference),
        }

    def _can_truncate(self, sample: int) -> bool:
        chosen, rejected = (self._get_tokens(sample, member) for member in range(2))
        return super()._can_truncate(sample) and not np.array_equal(chosen, rejected)


def collate_pairs(
    samples: Sequence[Mapping[str, torch.Tensor]], *, keys: Iterable[str]
) -> dict[str, torch.Tensor]:
    """Concatenate samples to a micro-batch, whose tensors are [2 x samples, …]."""
    return {key: torch.cat([sample[key] for sample in samples]) for key in keys}
