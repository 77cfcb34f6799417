"""Sequences of text some of whose tokens are masked: what a model like BERT is trained on.

Documents are laid one behind the other and cut as for GPT, by megatron.core's GPTDataset, so that
blends, splits, epochs and caches are the same. Which tokens are masked is drawn by the number of a
sample: a resumed run masks as an uninterrupted one, and an epoch later other tokens are masked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset

_MASKED, _OTHER = 0.8, 0.1
"""Of the tokens that are to be told so many are masked, and so many are another token; the rest
stay as they are."""


@dataclass
class MaskedConfig(GPTDatasetConfig):  # type: ignore[misc]
    """``mask_probability``: the share of a sequence's tokens that are to be told.
    ``first_token``, ``last_token``: what frames the text, where anything does."""

    mask_probability: float = 0.15
    mask_token: int = 0
    first_token: int | None = None
    last_token: int | None = None


def masked(
    text: torch.Tensor, config: MaskedConfig, generator: np.random.Generator
) -> dict[str, torch.Tensor]:
    """A sample of some ``text``, whose tokens are ``[length]``.

    Every sample has as many tokens to be told as its length asks for, so that the mean of a
    micro-batch's losses does not depend on how micro-batches are cut.

    Returns:
        ``tokens`` with the framing ones, some of them masked; ``labels`` without masks;
        ``loss_mask``, 1.0 where a token is to be told; ``position_ids``.
    """
    first, last = config.first_token, config.last_token
    parts = [torch.tensor([first])] if first is not None else []
    parts += [text, *([torch.tensor([last])] if last is not None else [])]
    labels = torch.cat(parts)
    special = torch.tensor([t for t in (first, last, config.tokenizer.eod) if t is not None])
    candidates = torch.isin(labels, special, invert=True).nonzero().squeeze(1).numpy()
    count = min(max(1, round(config.mask_probability * len(labels))), len(candidates))
    chosen = generator.choice(candidates, count, replace=False)
    drawn = generator.random(count)
    others = generator.integers(config.tokenizer.vocab_size, size=count)
    tokens = labels.numpy().copy()
    tokens[chosen] = np.where(
        drawn < _MASKED,
        config.mask_token,
        np.where(drawn < _MASKED + _OTHER, others, tokens[chosen]),
    )
    told = torch.zeros(len(labels))
    told[torch.from_numpy(chosen)] = 1.0
    return {
        "tokens": torch.from_numpy(tokens),
        "labels": labels,
        "loss_mask": told,
        "position_ids": torch.arange(len(labels)),
    }


class _Masked:
    """Goes before one of megatron.core's data sets of text."""

    config: MaskedConfig

    def __getitem__(self, index: int | None) -> dict[str, torch.Tensor]:
        sample: dict[str, Any] = super().__getitem__(index)  # type: ignore[misc]
        seed = [self.config.random_seed, 0 if index is None else int(index)]
        return masked(sample["tokens"], self.config, np.random.default_rng(seed))


class MaskedDataset(_Masked, GPTDataset):  # type: ignore[misc]
    """Of indexed files."""


class MockMaskedDataset(_Masked, MockGPTDataset):  # type: ignore[misc]
    """Made up."""
