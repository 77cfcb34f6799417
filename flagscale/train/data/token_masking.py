"""Masked language modeling: selection and replacement of the tokens that a model predicts.

:mod:`flagscale.train.data.masked_dataset` applies it to each sample; the BERT family
(:mod:`flagscale.train.models.bert`) chooses the settings.
"""

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
        predicted_fraction: fraction of a sequence's tokens to predict.
        mask_id: id of the mask token.
        eod_id: id of the end-of-document token, which is never predicted.
        random_id_limit: random tokens are drawn from the ids below this one.
        cls_id: id of the token that begins every sequence (``[CLS]``), if any.
        sep_id: id of the token that ends every sequence (``[SEP]``), if any.
    """

    predicted_fraction: float
    mask_id: int
    eod_id: int
    random_id_limit: int
    cls_id: int | None = None
    sep_id: int | None = None

    @property
    def adds_cls_and_sep(self) -> bool:
        """True if each sequence is put between ``[CLS]`` and ``[SEP]``."""
        return self.cls_id is not None and self.sep_id is not None


def mask_tokens(
    token_ids: torch.Tensor, settings: MaskingSettings, generator: np.random.Generator
) -> dict[str, torch.Tensor]:
    """Mask the tokens of a sample.

    The number of predicted tokens depends only on the length, so the mean loss of micro-batches
    does not depend on the micro-batch size.

    Args:
        token_ids: tokens of the sample, shape ``[length]``.
        settings: masking settings.
        generator: source of randomness.

    Returns:
        ``tokens``, partly masked; ``labels``, the tokens before masking; ``loss_mask``, 1.0 for
        predicted tokens; ``position_ids``. Each has shape ``[length]``, or ``[length + 2]`` with
        the tokens that begin and end a sequence.
    """
    labels = token_ids.numpy()
    if settings.adds_cls_and_sep:
        labels = np.concatenate([[settings.cls_id], labels, [settings.sep_id]])
    special_ids = [
        token for token in (settings.cls_id, settings.sep_id, settings.eod_id) if token is not None
    ]
    candidates = np.flatnonzero(~np.isin(labels, special_ids))
    predicted_count = min(max(1, round(settings.predicted_fraction * len(labels))), len(candidates))
    predicted = generator.choice(candidates, predicted_count, replace=False)
    draws = generator.random(predicted_count)
    random_tokens = generator.integers(settings.random_id_limit, size=predicted_count)
    tokens, loss_mask = labels.copy(), np.zeros(len(labels), dtype=np.float32)
    loss_mask[predicted] = 1.0
    visible_tokens = np.where(
        draws < _MASKED_FRACTION + _RANDOM_FRACTION, random_tokens, labels[predicted]
    )
    tokens[predicted] = np.where(draws < _MASKED_FRACTION, settings.mask_id, visible_tokens)
    return {
        "tokens": torch.from_numpy(tokens),
        "labels": torch.from_numpy(labels),
        "loss_mask": torch.from_numpy(loss_mask),
        "position_ids": torch.arange(len(labels)),
    }
