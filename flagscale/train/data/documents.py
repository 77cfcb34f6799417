"""megatron.core's data sets of text, whose samples tell which document each token is of."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset

from flagscale.train.models.base import DOCUMENTS


def numbered(tokens: torch.Tensor, end: int) -> torch.Tensor:
    """A number for each of the ``[sequence]`` tokens, one higher behind each end of a document,
    which is of the document that it ends: int32."""
    behind = torch.zeros_like(tokens, dtype=torch.int32)
    behind[1:] = tokens[:-1] == end
    return behind.cumsum(0, dtype=torch.int32)


class _Numbered:
    """Goes before one of megatron.core's data sets."""

    config: GPTDatasetConfig

    def __getitem__(self, index: int | None) -> dict[str, torch.Tensor]:
        sample: dict[str, Any] = super().__getitem__(index)  # type: ignore[misc]
        return {**sample, DOCUMENTS: numbered(sample["tokens"], self.config.tokenizer.eod)}


class NumberedDataset(_Numbered, GPTDataset):  # type: ignore[misc]
    """Of indexed files."""


class MockNumberedDataset(_Numbered, MockGPTDataset):  # type: ignore[misc]
    """Made up."""


def data_sets(*, apart: bool) -> tuple[type, type]:
    """The data set of indexed files and the one that is made up; whether documents are told."""
    if apart:
        return NumberedDataset, MockNumberedDataset
    return GPTDataset, MockGPTDataset
