"""megatron.core's text datasets with checked token ids, fast mock data, and document numbers.

A model family names these classes in its dataset specification
(:class:`flagscale.train.models.base.DatasetSpec`). Document numbers restrict attention to tokens
of the same document.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.datasets.gpt_dataset import (
    GPTDataset,
    GPTDatasetConfig,
    MockGPTDataset,
    MockGPTLowLevelDataset,
)

from flagscale.errors import DataError
from flagscale.train.models.base import DOCUMENT_NUMBERS_KEY


class TextDataset(GPTDataset):  # type: ignore[misc]
    """Dataset of indexed files that refuses token ids outside the vocabulary.

    megatron.core would take -1 for padding and mask it, and fail on other ids in the middle of a
    step.
    """

    def _query_document_sample_shuffle_indices(self, index: int) -> Any:
        text, documents = super()._query_document_sample_shuffle_indices(index)
        # Only the end of the last sample is padding.
        padding_begin = len(text)
        while padding_begin and text[padding_begin - 1] == self._pad_token_id:
            padding_begin -= 1
        tokens, vocab_size = text[:padding_begin], self.config.tokenizer.vocab_size
        if len(tokens) and (tokens.min() < 0 or tokens.max() >= vocab_size):
            wrong_id = int(tokens.min() if tokens.min() < 0 else tokens.max())
            raise DataError(
                f"{self.dataset.path_prefix}: sample {index} has the token id {wrong_id}, but ids "
                f"are 0 to {vocab_size - 1}: the file is damaged or was made with another tokenizer"
            )
        return text, documents


class MockText(MockGPTLowLevelDataset):  # type: ignore[misc]
    """Mock text with about the same number of sequences, some 50,000, at any sequence length.

    megatron.core's 100,000 mock documents make millions of short sequences, which take seconds to
    shuffle.
    """

    def __init__(self, config: GPTDatasetConfig) -> None:
        size_ratio = min(1.0, config.sequence_length / self.max_sequence_length)
        self.size = max(1, round(MockGPTLowLevelDataset.size * size_ratio))
        super().__init__(config.tokenizer)


class FastMockDataset(MockGPTDataset):  # type: ignore[misc]
    """Dataset of mock text, which reads no file."""

    @staticmethod
    def build_low_level_dataset(_: str | None, config: GPTDatasetConfig) -> MockText:
        """Return the text that samples are cut from."""
        return MockText(config)


def number_documents(tokens: torch.Tensor, eod_id: int) -> torch.Tensor:
    """Number the documents in a sequence.

    An end-of-document token belongs to the document that it ends.

    Args:
        tokens: shape ``[length]``.
        eod_id: id of the end-of-document token.

    Returns:
        Document numbers from 0, shape ``[length]``, int32.
    """
    starts = torch.zeros_like(tokens, dtype=torch.int32)
    starts[1:] = tokens[:-1] == eod_id
    return starts.cumsum(0, dtype=torch.int32)


class _DocumentNumberMixin:
    """Mixin for megatron.core's datasets that adds document numbers to each sample."""

    config: GPTDatasetConfig

    def __getitem__(self, index: int | None) -> dict[str, torch.Tensor]:
        sample: dict[str, Any] = super().__getitem__(index)  # type: ignore[misc]
        return {
            **sample,
            DOCUMENT_NUMBERS_KEY: number_documents(sample["tokens"], self.config.tokenizer.eod),
        }


class NumberedDataset(_DocumentNumberMixin, TextDataset):
    """Dataset of indexed files, with document numbers."""


class MockNumberedDataset(_DocumentNumberMixin, FastMockDataset):
    """Dataset of mock text, with document numbers."""


def select_dataset_classes(*, with_documents: bool) -> tuple[type, type]:
    """Return the dataset classes for indexed files and for mock data.

    Args:
        with_documents: samples have document numbers, to mask attention between documents.
    """
    if with_documents:
        return NumberedDataset, MockNumberedDataset
    return TextDataset, FastMockDataset
