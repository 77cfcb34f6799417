"""Data sets of sequences some of whose tokens are masked: what a model like BERT is trained on.

Documents are laid one behind the other and cut as for GPT, by megatron.core's GPTDataset, so that
blends, splits, epochs and caches are the same. Which tokens are masked is drawn by the number of a
sample: a resumed run masks as an uninterrupted one, and an epoch later other tokens are masked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

from flagscale.train.data.documents import MadeUpDataset
from flagscale.train.data.masking import Masks, masked


@dataclass
class MaskedConfig(GPTDatasetConfig):  # type: ignore[misc]
    """``masks``: what is done to the text."""

    masks: Masks | None = None


class _Masked:
    """Goes before one of megatron.core's data sets of text."""

    config: MaskedConfig

    def __getitem__(self, index: int | None) -> dict[str, torch.Tensor]:
        sample: dict[str, Any] = super().__getitem__(index)  # type: ignore[misc]
        assert self.config.masks is not None
        seed = [self.config.random_seed, 0 if index is None else int(index)]
        return masked(sample["tokens"], self.config.masks, np.random.default_rng(seed))


class MaskedDataset(_Masked, GPTDataset):  # type: ignore[misc]
    """Of indexed files."""


class MadeUpMaskedDataset(_Masked, MadeUpDataset):
    """Made up."""
