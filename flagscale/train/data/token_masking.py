"""Masked language modeling: selection and replacement of the tokens that a model predicts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

_MASKED_FRACTION, _RANDOM_FRACTION = 0.8, 0.1
"""Fractions of the predicted tokens that are masked, and that are replaced by a random token. The
remaining ones are unchanged (Devlin et al., "BERT", 2018).
"""


@dataclass(frozen=True)
class MaskingSettings:
    """Settings of masked language modeling.

    Attributes:
        share: fraction of a sequence's tokens to predict.
        mask: id of the mask token.
        end: id of the end-of-document token, which is never predicted.
        others: number of ids that random tokens are drawn from.
        first: id that begins a sequence, if any.
        last: id that ends a sequence, if any.
    """

    share: float
    mask: int
    end: int
    others: int
    first: int | None = None
    last: int | None = None

    @property
    def has_frame(self) -> bool:
        return self.first is not None and self.last is not None


def mask_tokens(
    text: torch.Tensor, masks: MaskingSettings, generator: np.random.Generator
) -> dict[str, torch.Tensor]:
    """Mask the tokens of a sample.

    The number of predicted tokens depends only on the length, so the mean loss of micro-batches
    does not depend on the micro-batch size.

    Args:
        text: token ids, shape ``[length]``.
        masks: the settings.
        generator: source of randomness.

    Returns:
        ``tokens`` with framing tokens, partly masked; ``labels`` before masking; ``loss_mask``, 1.0
        for predicted tokens; ``position_ids``.
    """
    labels = text.numpy()
    if masks.has_frame:
        labels = np.concatenate([[masks.first], labels, [masks.last]])
    special = [token for token in (masks.first, masks.last, masks.end) if token is not None]
    candidates = np.flatnonzero(~np.isin(labels, special))
    count = min(max(1, round(masks.share * len(labels))), len(candidates))
    chosen = generator.choice(candidates, count, replace=False)
    drawn, random_tokens = generator.random(count), generator.integers(masks.others, size=count)
    tokens, loss_mask = labels.copy(), np.zeros(len(labels), dtype=np.float32)
    loss_mask[chosen] = 1.0
    unmasked = np.where(drawn < _MASKED_FRACTION + _RANDOM_FRACTION, random_tokens, labels[chosen])
    tokens[chosen] = np.where(drawn < _MASKED_FRACTION, masks.mask, unmasked)
    return {
        "tokens": torch.from_numpy(tokens),
        "labels": torch.from_numpy(labels),
        "loss_mask": torch.from_numpy(loss_mask),
        "position_ids": torch.arange(len(labels)),
    }
