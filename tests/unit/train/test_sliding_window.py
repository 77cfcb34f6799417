"""Sliding-window and soft-capped attention, compared with attention computed per query."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType

from flagscale.errors import ConfigError
from flagscale.train.models.config import LayerConfig
from flagscale.train.models.norm import RMSNorm, ZeroCenteredRMSNorm
from flagscale.train.models.sliding_window import SlidingWindowAttention

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
