"""megatron.core's data sets of text: made up in a moment, and with samples that tell which document
each token is of."""

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


class MadeUpText(MockGPTLowLevelDataset):  # type: ignore[misc]
    """As many sequences at any length as megatron.core has at its documents' longest, some 50,000:
    its 100,000 documents are millions of short sequences, which take seconds to shuffle."""

    def __init__(self, config: GPTDatasetConfig) -> None:
        share = min(1.0, config.sequence_length / self.max_sequence_length)
        self.size = max(1, round(MockGPTLowLevelDataset.size * share))
        super().__init__(config.tokenizer)


class MadeUpDataset(MockGPTDataset):  # type: ignore[misc]
    """Of text that is made up; it reads no file."""

    @staticmethod
    def build_low_level_dataset(_: str | None, config: GPTDatasetConfig) -> MadeUpText:
        """The text that samples are cut from."""
        return MadeUpText(config)


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


class MadeUpNumberedDataset(_Numbered, MadeUpDataset):
    """Made up."""


def data_sets(*, apart: bool) -> tuple[type, type]:
    """The data set of indexed files and the one that is made up; whether documents are told."""
    if apart:
        return NumberedDataset, MadeUpNumberedDataset
    return GPTDataset, MadeUpDataset
