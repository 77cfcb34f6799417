"""Which tokens of a sequence a model like BERT is to tell, and what it sees in their place."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

_MASKED, _OTHER = 0.8, 0.1
"""Of the tokens that are to be told so many are masked, and so many are another token; the rest
stay as they are (Devlin et al., "BERT", 2018)."""


@dataclass(frozen=True)
class Masks:
    """How a sequence is framed and masked. ``share``: of its tokens that are to be told; ``mask``:
    what stands for one; ``first``, ``last``: what frames the text, where anything does; ``end``: of
    a document; ``others``: that many tokens there are to be another one."""

    share: float
    mask: int
    end: int
    others: int
    first: int | None = None
    last: int | None = None

    @property
    def framed(self) -> bool:
        return self.first is not None and self.last is not None


def masked(
    text: torch.Tensor, masks: Masks, generator: np.random.Generator
) -> dict[str, torch.Tensor]:
    """A sample of some ``text``, whose tokens are ``[length]``.

    Every sample has as many tokens to be told as its length asks for, so that the mean of a
    micro-batch's losses does not depend on how micro-batches are cut.

    Returns:
        ``tokens`` with the framing ones, some of them masked; ``labels`` without masks;
        ``loss_mask``, 1.0 where a token is to be told; ``position_ids``.
    """
    labels = text.numpy()
    if masks.framed:
        labels = np.concatenate([[masks.first], labels, [masks.last]])
    special = [token for token in (masks.first, masks.last, masks.end) if token is not None]
    candidates = np.flatnonzero(~np.isin(labels, special))
    count = min(max(1, round(masks.share * len(labels))), len(candidates))
    chosen = generator.choice(candidates, count, replace=False)
    drawn, others = generator.random(count), generator.integers(masks.others, size=count)
    tokens, told = labels.copy(), np.zeros(len(labels), dtype=np.float32)
    told[chosen] = 1.0
    seen = np.where(drawn < _MASKED + _OTHER, others, labels[chosen])
    tokens[chosen] = np.where(drawn < _MASKED, masks.mask, seen)
    return {
        "tokens": torch.from_numpy(tokens),
        "labels": torch.from_numpy(labels),
        "loss_mask": torch.from_numpy(told),
        "position_ids": torch.arange(len(labels)),
    }
