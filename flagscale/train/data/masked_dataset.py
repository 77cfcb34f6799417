"""Datasets with masked tokens, for models like BERT.

megatron.core's GPTDataset concatenates and cuts documents as for GPT, so blends, splits, epochs and
caches are the same. The masked tokens depend on the sample's number: a resumed run masks the same
tokens as an uninterrupted one, and each epoch masks different ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

from flagscale.train.data.document_datasets import FastMockDataset, TextDataset
from flagscale.train.data.token_masking import MaskingSettings, mask_tokens


@dataclass
class MaskedConfig(GPTDatasetConfig):  # type: ignore[misc]
    """megatron.core's GPT dataset configuration with masking settings."""

    masking: MaskingSettings | None = None


class _MaskingMixin:
    """Mixin for megatron.core's text datasets that masks the tokens of each sample."""

    config: MaskedConfig

    def __getitem__(self, index: int | None) -> dict[str, torch.Tensor]:
        sample: dict[str, Any] = super().__getitem__(index)  # type: ignore[misc]
        assert self.config.masking is not None
        seeds = [self.config.random_seed, 0 if index is None else int(index)]
        return mask_tokens(sample["tokens"], self.config.masking, np.random.default_rng(seeds))


class MaskedDataset(_MaskingMixin, TextDataset):
    """Masked dataset of indexed files."""


class MockMaskedDataset(_MaskingMixin, FastMockDataset):
    """Masked dataset of mock text."""
