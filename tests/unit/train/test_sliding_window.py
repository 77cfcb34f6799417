"""Sliding-window and soft-capped attention, compared with attention computed per query."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.transformer.enums import AttnMaskType

from flagscale.errors import ConfigError
from flagscale.train.models import sliding_window
from flagscale.train.models.config import LayerConfig
from flagscale.train.models.document_mask import attend_masked, visible_mask
from flagscale.train.models.norm import RMSNorm, ZeroCenteredRMSNorm
from flagscale.train.models.sliding_window import (
    SlidingWindowAttention,
    attend_in_window,
    attend_softcapped,
    window_mask,
)

pytestmark = pytest.mark.torch

# Of two sequences of seven tokens.
DOCUMENT_NUMBERS = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 1]])


def config(**changes: Any) -> LayerConfig:
    return LayerConfig(
        num_layers=4,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        attention_dropout=0.0,
        **changes,
    )


def build_attention(
    layer: int = 1, mask: Any = AttnMaskType.causal, **changes: Any
) -> SlidingWindowAttention:
    groups = SimpleNamespace(cp=SimpleNamespace(size=lambda: 1))
    return SlidingWindowAttention(config(**changes), layer, mask, "self", pg_collection=groups)


def reference_attention(
    q: Any, k: Any, v: Any, window: int | None, softcap: float | None, scale: float, documents: Any
) -> Any:
    """Compute attention query by query; two heads share a query group."""
    out = torch.zeros(7, 2, 4, 8)
    for b in range(2):
        for head in range(4):
            for i in range(7):
                first = 0 if window is None else max(i - window, 0)
                visible = [j for j in range(first, i + 1) if documents[b, j] == documents[b, i]]
                scores = k[visible, b, head // 2] @ q[i, b, head] * scale
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                out[i, b, head] = scores.softmax(0) @ v[visible, b, head // 2]
    return out.reshape(7, 2, 32)


@pytest.mark.parametrize("mask_documents", [False, True], ids=["whole_sequence", "per_document"])
@pytest.mark.parametrize(
    ("layer", "changes", "window", "softcap"),
    [
        pytest.param(1, {"window_size": (2, 0)}, 2, None, id="window"),
        pytest.param(
            2,
            {"window_size": (2, 0), "window_attn_skip_freq": 2},
            None,
            None,
            id="layer_without_window",
        ),
        pytest.param(
            3, {"window_size": (2, 0), "window_attn_skip_freq": 2}, 2, None, id="third_layer"
        ),
        pytest.param(1, {"attn_logit_softcapping": 0.5}, None, 0.5, id="softcap"),
        pytest.param(
            1,
            {"attn_logit_softcapping": 0.5, "window_size": (3, 0), "softmax_scale": 0.7},
            3,
            0.5,
            id="window_and_softcap",
        ),
    ],
)
def test_attention_equals_the_reference(
    layer: int,
    changes: dict[str, Any],
    window: int | None,
    softcap: float | None,
    mask_documents: bool,
) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(7, 2, 4, 8, generator=generator)
    key, value = torch.randn(2, 7, 2, 2, 8, generator=generator)
    documents = DOCUMENT_NUMBERS if mask_documents else torch.zeros_like(DOCUMENT_NUMBERS)
    same_document = documents[:, :, None] == documents[:, None, :]
    mask = same_document.tril()[:, None] if mask_documents else None
    output = build_attention(layer, **changes)(query, key, value, mask)
    scale = changes.get("softmax_scale", 8**-0.5)
    expected = reference_attention(query, key, value, window, softcap, scale, documents)
    torch.testing.assert_close(output, expected)


@given(
    queries=st.integers(1, 50),
    earlier_keys=st.integers(0, 20),
    window=st.integers(0, 14),
    cap=st.sampled_from([None, 0.5]),
    has_documents=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_blocks_equal_the_whole(
    queries: int, earlier_keys: int, window: int, cap: float | None, has_documents: bool
) -> None:
    """Outputs and gradients of attention in blocks of 4 to 16 queries are those with one mask."""
    generator = torch.Generator().manual_seed(queries)
    keys = queries + earlier_keys
    query = torch.randn(2, 4, queries, 8, generator=generator)
    key, value = torch.randn(2, 2, 2, keys, 8, generator=generator)
    attend: Any = partial(attend_masked, scale=None, dropout=0.0)
    if cap is not None:
        attend = partial(attend_softcapped, cap=cap, scale=None, dropout=0.0)
    documents = torch.randint(2, (2, keys), generator=generator).cumsum(1)
    visible = visible_mask(documents[:, earlier_keys:], documents) if has_documents else None
    results: list[list[Any]] = []
    for multiple in (4, 1000):
        inputs = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sliding_window, "_BLOCK_MULTIPLE", multiple)
            q, k, v = inputs
            output: Any = attend_in_window(q, k, v, window, attend, visible)
        output.square().sum().backward()
        results.append([output, *(tensor.grad for tensor in inputs)])
    for in_blocks, whole in zip(*results, strict=True):
        torch.testing.assert_close(in_blocks, whole)
    position = queries // 2
    mask = window_mask(queries, keys, window, query.device)
    positions = range(max(position + earlier_keys - window, 0), position + earlier_keys + 1)
    assert mask[position].nonzero().flatten().tolist() == [*positions]


def test_long_sequences_are_computed_in_blocks() -> None:
    """The mask is as wide as two blocks, and not as the sequence."""
    widths = set()

    def attend(q: Any, k: Any, v: Any, mask: Any) -> Any:
        widths.add(mask.shape[-1])
        return attend_masked(q, k, v, mask, scale=None, dropout=0.0)

    query = torch.randn(1, 2, 4096, 8)
    attend_in_window(query, query, query, 255, attend)
    assert widths == {256, 512}


def test_window_with_bidirectional_attention_is_rejected() -> None:
    with pytest.raises(ConfigError, match="must be causal"):
        build_attention(mask=AttnMaskType.no_mask, window_size=(2, 0))


def test_zero_centered_norm_is_computed_in_fp32() -> None:
    """The sum 1 + w is not rounded: 1.001 would be 1 in bf16."""
    norm_config = config(normalization="RMSNorm")
    norm_config.params_dtype = torch.bfloat16
    zero_centered_norm, norm = (
        norm_class(norm_config, 64, 1e-6) for norm_class in (ZeroCenteredRMSNorm, RMSNorm)
    )
    hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert zero_centered_norm.weight.tolist() == [0.0] * 64
    assert zero_centered_norm(hidden).equal(norm(hidden))
    with torch.no_grad():
        zero_centered_norm.weight.fill_(0.001)
    exact = hidden.float() * torch.rsqrt(hidden.float().square().mean(-1, keepdim=True) + 1e-6)
    torch.testing.assert_close(
        zero_centered_norm(hidden), (exact * 1.001).bfloat16(), rtol=1e-2, atol=0
    )
    # Some values change in bf16 although 1.001 itself would be rounded to 1.
    changed_fraction = (zero_centered_norm(hidden) != norm(hidden)).float().mean()
    assert 0.05 < changed_fraction < 0.9
