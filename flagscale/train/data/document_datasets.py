"""megatron.core's text datasets with fast mock data and with document numbers in samples."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.datasets.gpt_dataset import (
    GPTDataset,
    GPTDatasetConfig,
    MockGPTDataset,
    MockGPTLowLevelDataset,
)

from flagscale.train.models.base import DOCUMENTS


class MockText(MockGPTLowLevelDataset):  # type: ignore[misc]
    """Mock text with about the same number of sequences, some 50,000, at any sequence length.

    megatron.core's 100,000 mock documents make millions of short sequences, which take seconds to
    shuffle.
    """

    def __init__(self, config: GPTDatasetConfig) -> None:
        share = min(1.0, config.sequence_length / self.max_sequence_length)
        self.size = max(1, round(MockGPTLowLevelDataset.size * share))
        super().__init__(config.tokenizer)


class FastMockDataset(MockGPTDataset):  # type: ignore[misc]
    """Dataset of mock text; reads no file."""

    @staticmethod
    def build_low_level_dataset(_: str | None, config: GPTDatasetConfig) -> MockText:
        """Return the text that samples are cut from."""
        return MockText(config)


def number_documents(tokens: torch.Tensor, end: int) -> torch.Tensor:
    """Number the documents in a sequence.

    An end-of-document token belongs to the document that it ends.

    Args:
        tokens: shape ``[sequence]``.
        end: the end-of-document token.

    Returns:
        Document numbers from 0, shape ``[sequence]``, int32.
    """
    starts = torch.zeros_like(tokens, dtype=torch.int32)
    starts[1:] = tokens[:-1] == end
    return starts.cumsum(0, dtype=torch.int32)


class _DocumentNumberMixin:
    """Mixin for megatron.core's datasets that adds document numbers to each sample."""

    config: GPTDatasetConfig

    def __getitem__(self, index: int | None) -> dict[str, torch.Tensor]:
        sample: dict[str, Any] = super().__getitem__(index)  # type: ignore[misc]
        return {**sample, DOCUMENTS: number_documents(sample["tokens"], self.config.tokenizer.eod)}


class NumberedDataset(_DocumentNumberMixin, GPTDataset):  # type: ignore[misc]
    """Dataset of indexed files, with document numbers."""


class MockNumberedDataset(_DocumentNumberMixin, FastMockDataset):
    """Dataset of mock text, with document numbers."""


def select_dataset_classes(*, with_documents: bool) -> tuple[type, type]:
    """Return the dataset classes for indexed files and for mock data.

    Args:
        with_documents: samples have document numbers.
    """
    if with_documents:
        return NumberedDataset, MockNumberedDataset
    return GPTDataset, FastMockDataset
