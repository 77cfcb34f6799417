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

VOCABULARY, END, FIRST, LAST, MASK = 50, 49, 48, 47, 46


def sample(text: list[int], share: float, *, framed: bool = True, seed: int = 0) -> dict[str, Any]:
    frame = {"first": FIRST, "last": LAST} if framed else {}
    masks = MaskingSettings(share, MASK, END, VOCABULARY, **frame)
    masked = mask_tokens(torch.tensor(text), masks, np.random.default_rng(seed))
    return {name: tensor.tolist() for name, tensor in masked.items()}


@given(
    text=st.lists(st.integers(0, 40) | st.just(END), min_size=1, max_size=60),
    share=st.floats(0.001, 0.9),
    framed=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_a_sample(text: list[int], share: float, framed: bool) -> None:
    masked = sample(text, share, framed=framed)
    whole = [FIRST, *text, LAST] if framed else text
    assert masked["labels"] == whole
    assert masked["position_ids"] == list(range(len(whole)))
    predicted = [place for place, weight in enumerate(masked["loss_mask"]) if weight]
    ordinary = [place for place, token in enumerate(whole) if token not in (FIRST, LAST, END)]
    assert set(predicted) <= set(ordinary)
    assert len(predicted) == min(max(1, round(share * len(whole))), len(ordinary))
    changed = [p for p, token in enumerate(masked["tokens"]) if token != whole[p]]
    assert set(changed) <= set(predicted)


def test_eight_of_ten_are_masked_one_is_another_and_one_stays() -> None:
    text = [token % 40 for token in range(20_000)]
    masked = sample(text, 0.5, framed=False)
    predicted = [place for place, weight in enumerate(masked["loss_mask"]) if weight]
    hidden = sum(masked["tokens"][place] == MASK for place in predicted) / len(predicted)
    same = sum(masked["tokens"][place] == text[place] for place in predicted) / len(predicted)
    # Another token is the same, or the mask, one time in fifty.
    assert hidden == pytest.approx(0.802, abs=0.02)
    assert same == pytest.approx(0.102, abs=0.02)


def test_the_generator_decides() -> None:
    text = list(range(40))
    assert sample(text, 0.3, seed=1) == sample(text, 0.3, seed=1)
    assert sample(text, 0.3, seed=1) != sample(text, 0.3, seed=2)
