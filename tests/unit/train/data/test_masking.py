"""Masked language modeling: selection and replacement of tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flagscale.train.data.token_masking import MaskingSettings, mask_tokens

pytestmark = pytest.mark.torch

VOCABULARY, EOD, CLS, SEP, MASK = 50, 49, 48, 47, 46


def mask_sample(
    text: list[int], fraction: float, *, with_cls_and_sep: bool = True, seed: int = 0
) -> dict[str, Any]:
    special_ids = {"cls_id": CLS, "sep_id": SEP} if with_cls_and_sep else {}
    mask_settings = MaskingSettings(fraction, MASK, EOD, VOCABULARY, **special_ids)
    masked = mask_tokens(torch.tensor(text), mask_settings, np.random.default_rng(seed))
    return {name: tensor.tolist() for name, tensor in masked.items()}


@given(
    text=st.lists(st.integers(0, 40) | st.just(EOD), min_size=1, max_size=60),
    fraction=st.floats(0.001, 0.9),
    with_cls_and_sep=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_only_ordinary_tokens_are_predicted_and_changed(
    text: list[int], fraction: float, with_cls_and_sep: bool
) -> None:
    masked = mask_sample(text, fraction, with_cls_and_sep=with_cls_and_sep)
    labels = [CLS, *text, SEP] if with_cls_and_sep else text
    assert masked["labels"] == labels
    assert masked["position_ids"] == list(range(len(labels)))
    predicted_positions = [
        position for position, weight in enumerate(masked["loss_mask"]) if weight
    ]
    ordinary_positions = [
        position for position, token in enumerate(labels) if token not in (CLS, SEP, EOD)
    ]
    assert set(predicted_positions) <= set(ordinary_positions)
    assert len(predicted_positions) == min(
        max(1, round(fraction * len(labels))), len(ordinary_positions)
    )
    changed_positions = [p for p, token in enumerate(masked["tokens"]) if token != labels[p]]
    assert set(changed_positions) <= set(predicted_positions)


def test_eight_of_ten_are_masked_one_is_another_and_one_stays() -> None:
    text = [token % 40 for token in range(20_000)]
    masked = mask_sample(text, 0.5, with_cls_and_sep=False)
    predicted_positions = [
        position for position, weight in enumerate(masked["loss_mask"]) if weight
    ]
    masked_fraction = sum(
        masked["tokens"][position] == MASK for position in predicted_positions
    ) / len(predicted_positions)
    unchanged_fraction = sum(
        masked["tokens"][position] == text[position] for position in predicted_positions
    ) / len(predicted_positions)
    # Another token is the same, or the mask, one time in fifty.
    assert masked_fraction == pytest.approx(0.802, abs=0.02)
    assert unchanged_fraction == pytest.approx(0.102, abs=0.02)


def test_masks_depend_on_the_seed() -> None:
    text = list(range(40))
    assert mask_sample(text, 0.3, seed=1) == mask_sample(text, 0.3, seed=1)
    assert mask_sample(text, 0.3, seed=1) != mask_sample(text, 0.3, seed=2)
