"""Parts of attention, and their merging, compared with attention to all keys at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from flagscale.train.models import partial_attention
from flagscale.train.models.partial_attention import (
    attend_part,
    attend_part_backward,
    merge_parts,
)

pytestmark = pytest.mark.torch

QUERIES, HEADS, QUERY_GROUPS, WIDTH = 8, 4, 2, 16
SCALE = 0.3


@pytest.fixture(params=["cpu", "math"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial_attention, "_select_kernel", lambda _: request.param)


def random_inputs(keys: int) -> list[torch.Tensor]:
    """Return random queries, keys, values, and a gradient of the output."""
    generator = torch.Generator().manual_seed(keys)
    shapes = (
        (2, HEADS, QUERIES, WIDTH),
        (2, QUERY_GROUPS, keys, WIDTH),
        (2, QUERY_GROUPS, keys, WIDTH),
        (2, HEADS, QUERIES, WIDTH),
    )
    return [torch.randn(shape, generator=generator) for shape in shapes]


def whole_attention(query: Any, key: Any, value: Any, mask: Any) -> Any:
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=SCALE, enable_gqa=True
    )


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("others", [0, 3, 8, 20])
def test_merged_parts_equal_attention_to_all_keys(others: int) -> None:
    # Causal attention to the last keys, and attention to all keys before them.
    query, key, value, gradient = random_inputs(QUERIES + others)
    mask = torch.ones(QUERIES, QUERIES + others, dtype=torch.bool).tril(others)
    reference_inputs = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    expected = whole_attention(*reference_inputs, mask)
    expected.backward(gradient)

    own, other = slice(others, None), slice(0, others)
    output, log_sum_exp = attend_part(
        query, key[:, :, own], value[:, :, own], causal=True, scale=SCALE
    )
    if others:
        part = attend_part(query, key[:, :, other], value[:, :, other], causal=False, scale=SCALE)
        output, log_sum_exp = merge_parts(output, log_sum_exp, *part)
    torch.testing.assert_close(output, expected)

    query_gradient, key_gradient, value_gradient = torch.zeros(()), [], []
    for keys, causal in ((other, False), (own, True)):
        if key[:, :, keys].shape[2]:
            gradients = attend_part_backward(
                gradient,
                query,
                key[:, :, keys],
                value[:, :, keys],
                output,
                log_sum_exp,
                causal=causal,
                scale=SCALE,
            )
            query_gradient = query_gradient + gradients[0]
            key_gradient.append(gradients[1])
            value_gradient.append(gradients[2])
    merged = (query_gradient, torch.cat(key_gradient, 2), torch.cat(value_gradient, 2))
    for actual, reference in zip(merged, reference_inputs, strict=True):
        torch.testing.assert_close(actual, reference.grad)


@pytest.mark.usefixtures("kernel")
def test_results_have_the_layout_that_a_compiler_expects() -> None:
    query, key, value, gradient = random_inputs(QUERIES)
    query = query.transpose(0, 2).contiguous().transpose(0, 2)  # as views of [s, b, heads, d]
    options = {"causal": True, "scale": SCALE}
    output, log_sum_exp = attend_part(query, key, value, **options)
    gradients = attend_part_backward(gradient, query, key, value, output, log_sum_exp, **options)
    inputs_on_meta = [tensor.to("meta") for tensor in (query, key, value)]
    expected = attend_part(*inputs_on_meta, **options)
    expected_gradients = attend_part_backward(
        gradient.to("meta"), *inputs_on_meta, *expected, **options
    )
    for actual, fake in zip(
        (output, log_sum_exp, *gradients), (*expected, *expected_gradients), strict=True
    ):
        assert (actual.shape, actual.stride(), actual.dtype) == (
            fake.shape,
            fake.stride(),
            fake.dtype,
        )
