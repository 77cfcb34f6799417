"""Core attention, compared with attention computed per head; order of context-parallel chunks."""

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
from flagscale.train.models.context_parallel import restore_sequence_order, select_chunks

pytestmark = pytest.mark.torch


def build_attention(mask: Any = AttnMaskType.causal, **changes: Any) -> SDPAttention:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        attention_dropout=0.0,
        **changes,
    )
    single_rank_group = SimpleNamespace(size=lambda: 1)
    return SDPAttention(
        config, 1, mask, "self", pg_collection=SimpleNamespace(cp=single_rank_group)
    )


def random_query_key_value() -> tuple[Any, Any, Any]:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(6, 2, 4, 8, generator=generator)
    key, value = torch.randn(2, 6, 2, 2, 8, generator=generator)
    return query, key, value


def reference_attention(query: Any, key: Any, value: Any, *, causal: bool, scale: float) -> Any:
    """Compute softmax attention head by head; two heads share a query group."""
    # Shape [sequence, batch, heads, head dimension].
    output = torch.zeros(6, 2, 4, 8)
    for batch in range(2):
        for head in range(4):
            q, k, v = query[:, batch, head], key[:, batch, head // 2], value[:, batch, head // 2]
            scores = q @ k.T * scale
            if causal:
                hidden = torch.ones(6, 6, dtype=torch.bool).triu(1)
                scores = scores.masked_fill(hidden, -math.inf)
            output[:, batch, head] = scores.softmax(-1) @ v
    return output.reshape(6, 2, 32)


@pytest.mark.parametrize("backend", list(AttnBackend), ids=lambda backend: backend.name)
def test_causal_attention_equals_the_reference(backend: Any) -> None:
    query, key, value = random_query_key_value()
    output = build_attention(attention_backend=backend)(query, key, value)
    expected = reference_attention(query, key, value, causal=True, scale=8**-0.5)
    torch.testing.assert_close(output, expected)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str
)
@pytest.mark.parametrize("backend", list(AttnBackend), ids=lambda backend: backend.name)
def test_gradients_are_close_to_fp32_reference(
    backend: Any, dtype: torch.dtype, tolerance: float
) -> None:
    inputs_with_grad = [tensor.to(dtype).requires_grad_() for tensor in random_query_key_value()]
    fp32_inputs = [tensor.detach().float().requires_grad_() for tensor in inputs_with_grad]
    output = build_attention(attention_backend=backend)(*inputs_with_grad)
    expected = reference_attention(*fp32_inputs, causal=True, scale=8**-0.5)
    output_gradient = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    output.backward(output_gradient.to(dtype))
    expected.backward(output_gradient.to(dtype).float())
    for tensor_with_grad, fp32_tensor in zip(inputs_with_grad, fp32_inputs, strict=True):
        assert tensor_with_grad.grad is not None and fp32_tensor.grad is not None
        difference = (
            tensor_with_grad.grad.float() - fp32_tensor.grad
        ).norm() / fp32_tensor.grad.norm()
        assert difference < tolerance


def test_bidirectional_attention_with_a_scale() -> None:
    query, key, value = random_query_key_value()
    output = build_attention(AttnMaskType.no_mask, softmax_scale=0.3)(query, key, value)
    torch.testing.assert_close(
        output, reference_attention(query, key, value, causal=False, scale=0.3)
    )


def test_padding_mask_is_rejected() -> None:
    with pytest.raises(ConfigError, match="padding mask"):
        build_attention(AttnMaskType.padding)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_chunks_are_restored_to_sequence_order(size: int) -> None:
    """Rank 0 of ``size`` has the first and the last of 2 x ``size`` chunks of two tokens."""
    sequence = torch.arange(size * 4)
    rank_chunks = [select_chunks(sequence, 0, rank, size) for rank in range(size)]
    assert rank_chunks[0].tolist() == [0, 1, size * 4 - 2, size * 4 - 1]
    assert restore_sequence_order(torch.cat(rank_chunks), size).tolist() == sequence.tolist()
