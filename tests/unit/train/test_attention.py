from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from flagscale.errors import ConfigError
from flagscale.train.models.attention import SDPAttention
from flagscale.train.models.context import in_order, own_pieces

pytestmark = pytest.mark.torch


def attention(mask: Any = AttnMaskType.causal, **changes: Any) -> SDPAttention:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        attention_dropout=0.0,
        **changes,
    )
    alone = SimpleNamespace(size=lambda: 1)
    return SDPAttention(config, 1, mask, "self", pg_collection=SimpleNamespace(cp=alone))


def inputs() -> tuple[Any, Any, Any]:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(6, 2, 4, 8, generator=generator)
    key, value = torch.randn(2, 6, 2, 2, 8, generator=generator)
    return query, key, value


def by_hand(query: Any, key: Any, value: Any, *, causal: bool, scale: float) -> Any:
    """Softmax attention, head by head; two heads share a group's keys and values."""
    out = torch.zeros(6, 2, 4, 8)
    for batch in range(2):
        for head in range(4):
            q, k, v = query[:, batch, head], key[:, batch, head // 2], value[:, batch, head // 2]
            scores = q @ k.T * scale
            if causal:
                hidden = torch.ones(6, 6, dtype=torch.bool).triu(1)
                scores = scores.masked_fill(hidden, -math.inf)
            out[:, batch, head] = scores.softmax(-1) @ v
    return out.reshape(6, 2, 32)


@pytest.mark.parametrize("backend", list(AttnBackend), ids=lambda backend: backend.name)
def test_causal_attention_by_hand(backend: Any) -> None:
    query, key, value = inputs()
    found = attention(attention_backend=backend)(query, key, value)
    expected = by_hand(query, key, value, causal=True, scale=8**-0.5)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str
)
@pytest.mark.parametrize("backend", list(AttnBackend), ids=lambda backend: backend.name)
def test_its_gradients_are_those_of_plain_fp32(
    backend: Any, dtype: torch.dtype, tolerance: float
) -> None:
    own = [tensor.to(dtype).requires_grad_() for tensor in inputs()]
    plain = [tensor.detach().float().requires_grad_() for tensor in own]
    found = attention(attention_backend=backend)(*own)
    expected = by_hand(*plain, causal=True, scale=8**-0.5)
    wanted = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    found.backward(wanted.to(dtype))
    expected.backward(wanted.to(dtype).float())
    for one, other in zip(own, plain, strict=True):
        assert one.grad is not None and other.grad is not None
        difference = (one.grad.float() - other.grad).norm() / other.grad.norm()
        assert difference < tolerance


def test_attention_in_both_directions_with_a_scale() -> None:
    query, key, value = inputs()
    found = attention(AttnMaskType.no_mask, softmax_scale=0.3)(query, key, value)
    torch.testing.assert_close(found, by_hand(query, key, value, causal=False, scale=0.3))


def test_an_arbitrary_mask_is_refused() -> None:
    with pytest.raises(ConfigError, match="padding mask"):
        attention(AttnMaskType.padding)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_pieces_come_back_in_order(size: int) -> None:
    """Each rank has one piece from the front and one from the end."""
    whole = torch.arange(size * 4)
    own = [own_pieces(whole, 0, rank, size) for rank in range(size)]
    assert own[0].tolist() == [0, 1, size * 4 - 2, size * 4 - 1]
    assert in_order(torch.cat(own), size).tolist() == whole.tolist()
