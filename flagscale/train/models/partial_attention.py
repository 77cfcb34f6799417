"""Attention to some of the keys, and the merging of such parts.

Softmax attention to a set of keys can be computed in parts, one for each subset of the keys. With
the logarithm of the sum of exponentiated scores of each query (log-sum-exp), the parts merge into
the exact result (Dao et al., "FlashAttention", 2022; Liu et al., "Ring Attention", 2023). Given
output and log-sum-exp of the merged result, the backward pass of a kernel on one subset returns
exactly the contribution of this subset to the gradients.

The functions are operators, so that a compiler takes them as they are. They have no autograd
formula, which would be that of a part.
"""

from __future__ import annotations

from typing import Any

import torch

from flagscale.accelerators.registry import list_accelerators

_LIBRARY: Any = torch.library.Library("flagscale", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "attend_part(Tensor query, Tensor key, Tensor value, bool causal, float scale) "
    "-> (Tensor, Tensor)"
)
_LIBRARY.define(
    "attend_part_backward(Tensor gradient, Tensor query, Tensor key, Tensor value, Tensor output, "
    "Tensor log_sum_exp, bool causal, float scale) -> (Tensor, Tensor, Tensor)"
)
_ATEN: Any = torch.ops.aten
_CUDA_SWITCHES: Any = torch.backends.cuda
_MAX_CUDNN_HEAD_DIM = 128
_MAX_FLASH_HEAD_DIM = 256


def attend_part(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention to some keys.

    Args:
        query: [b, heads, queries, d].
        key: [b, query groups, keys, d].
        value: as ``key``.
        causal: whether query i attends to keys 0 to i; the numbers of queries and keys are equal.
        scale: factor of the scores.

    Returns:
        The output [b, heads, queries, d], and the log-sum-exp of the scores in fp32, [b, heads,
        queries].
    """
    output, log_sum_exp = torch.ops.flagscale.attend_part(query, key, value, causal, scale)
    return output, log_sum_exp


def attend_part_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    log_sum_exp: torch.Tensor,
    *,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the contribution of some keys to the gradients.

    Args:
        gradient: gradient of the merged output.
        query: as in :func:`attend_part`.
        key: the keys of this part.
        value: the values of this part.
        output: merged output.
        log_sum_exp: merged log-sum-exp.
        causal: as in :func:`attend_part`.
        scale: as in :func:`attend_part`.

    Returns:
        The contribution to the gradient of ``query``, and the gradients of ``key`` and ``value``.
    """
    gradients = torch.ops.flagscale.attend_part_backward(
        gradient, query, key, value, output, log_sum_exp, causal, scale
    )
    return gradients[0], gradients[1], gradients[2]


def split_heads(key_value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values, [b, query groups, s, d], of a tensor [s, b, 2 · query groups, d]."""
    keys, values = key_value.permute(1, 2, 0, 3).chunk(2, 1)
    return keys, values


def compute_gradients_of_part(
    gradient: torch.Tensor,
    queries: torch.Tensor,
    key_value: torch.Tensor,
    output: torch.Tensor,
    log_sum_exp: torch.Tensor,
    *,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a part's contribution to the gradient of the queries in fp32, [b, heads, s, d], and
    the gradient of ``key_value`` in its shape.
    """
    query_gradient, key_gradient, value_gradient = attend_part_backward(
        gradient, queries, *split_heads(key_value), output, log_sum_exp, causal=causal, scale=scale
    )
    key_value_gradient = torch.cat((key_gradient, value_gradient), 1).permute(2, 0, 1, 3)
    return query_gradient.float(), key_value_gradient


def add_gradients_of_second_chunk(
    query_gradient: torch.Tensor,
    gradient: torch.Tensor,
    queries: torch.Tensor,
    key_value: torch.Tensor,
    output: torch.Tensor,
    log_sum_exp: torch.Tensor,
    *,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient of the queries of both chunks with the contribution of keys that only the
    second chunk sees, all of them, and the gradient of ``key_value`` in its shape.
    """
    length = queries.shape[2] // 2
    second_gradient, key_value_gradient = compute_gradients_of_part(
        gradient[:, :, length:],
        queries[:, :, length:],
        key_value,
        output[:, :, length:],
        log_sum_exp[:, :, length:].contiguous(),
        causal=False,
        scale=scale,
    )
    second_gradient = query_gradient[:, :, length:] + second_gradient
    return torch.cat((query_gradient[:, :, :length], second_gradient), 2), key_value_gradient


def merge_parts(
    output: torch.Tensor,
    log_sum_exp: torch.Tensor,
    part_output: torch.Tensor,
    part_log_sum_exp: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge a part into the result of other keys; shapes as returned by :func:`attend_part`.

    Returns:
        Output in fp32, and log-sum-exp.
    """
    total = torch.logaddexp(log_sum_exp, part_log_sum_exp)
    weight = (log_sum_exp - total).exp()[..., None]
    part_weight = (part_log_sum_exp - total).exp()[..., None]
    return output.float() * weight + part_output.float() * part_weight, total


def _select_kernel(query: torch.Tensor) -> str:
    """Return the fastest kernel that the device, the dtype and ``attention_backend`` allow."""
    width = query.shape[-1]
    if query.device.type == "cpu":
        return "cpu"
    if query.device.type != "cuda" or query.dtype == torch.float32 or width % 8:
        return "math"
    if width <= _MAX_CUDNN_HEAD_DIM and _CUDA_SWITCHES.cudnn_sdp_enabled():
        return "cudnn"
    is_flash = width <= _MAX_FLASH_HEAD_DIM and _CUDA_SWITCHES.flash_sdp_enabled()
    return "flash" if is_flash else "math"


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    kernel = _select_kernel(query)
    if kernel == "math":
        output, log_sum_exp = _attend_math(query, key, value, causal, scale)
    elif kernel == "cpu":
        output, log_sum_exp = _ATEN._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, scale=scale
        )
    elif kernel == "cudnn":
        output, log_sum_exp, *_ = _ATEN._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, causal, False, scale=scale
        )
    else:
        output, log_sum_exp, *_ = _ATEN._scaled_dot_product_flash_attention(
            query, key, value, 0.0, causal, False, scale=scale
        )
    log_sum_exp = log_sum_exp.reshape(query.shape[:3]).contiguous()
    return _with_layout_of(output, query), log_sum_exp


def _attend_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    log_sum_exp: torch.Tensor,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    kernel = _select_kernel(query)
    inputs = gradient, query, key, value, output
    if kernel == "math":
        gradients = _attend_math_backward(*inputs, log_sum_exp, causal, scale)
    elif kernel == "cpu":
        gradients = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
            *inputs, log_sum_exp, 0.0, causal, scale=scale
        )
    else:
        lengths = query.shape[2], key.shape[2]
        # The state of the random number generator, which dropout alone would read.
        seed, offset = torch.zeros(2, dtype=torch.int64, device=query.device)
        if kernel == "cudnn":
            gradients = _ATEN._scaled_dot_product_cudnn_attention_backward(
                *inputs, log_sum_exp[..., None], seed, offset, None, None, None, *lengths, 0.0,
                causal, scale=scale
            )  # fmt: skip
        else:
            gradients = _ATEN._scaled_dot_product_flash_attention_backward(
                *inputs, log_sum_exp, None, None, *lengths, 0.0, causal, seed, offset, scale=scale
            )
    query_gradient, key_gradient, value_gradient = gradients
    return (
        _with_layout_of(query_gradient, query),
        key_gradient.contiguous(),
        value_gradient.contiguous(),
    )


def _attend_math(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = _compute_scores(query, key, causal, scale)
    log_sum_exp = scores.logsumexp(-1)
    weights = (scores - log_sum_exp[..., None]).exp()
    groups = query.shape[1] // key.shape[1]
    output = weights @ value.float().repeat_interleave(groups, 1)
    return output.to(query.dtype), log_sum_exp


def _attend_math_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    log_sum_exp: torch.Tensor,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    groups = query.shape[1] // key.shape[1]
    weights = (_compute_scores(query, key, causal, scale) - log_sum_exp[..., None]).exp()
    gradient = gradient.float()
    weight_gradients = gradient @ value.float().repeat_interleave(groups, 1).transpose(-1, -2)
    row_products = (gradient * output.float()).sum(-1, keepdim=True)
    score_gradients = weights * (weight_gradients - row_products) * scale
    query_gradient = score_gradients @ key.float().repeat_interleave(groups, 1)
    key_gradient = score_gradients.transpose(-1, -2) @ query.float()
    value_gradient = weights.transpose(-1, -2) @ gradient

    def sum_heads(head_gradients: torch.Tensor) -> torch.Tensor:
        batch, heads, keys, width = head_gradients.shape
        return head_gradients.view(batch, heads // groups, groups, keys, width).sum(2)

    return (
        query_gradient.to(query.dtype),
        sum_heads(key_gradient).to(key.dtype),
        sum_heads(value_gradient).to(value.dtype),
    )


def _compute_scores(
    query: torch.Tensor, key: torch.Tensor, causal: bool, scale: float
) -> torch.Tensor:
    """Return the scores in fp32, [b, heads, queries, keys]; -inf where a key is not visible."""
    groups = query.shape[1] // key.shape[1]
    keys = key.float().repeat_interleave(groups, 1)
    scores = query.float() @ keys.transpose(-1, -2) * scale
    if causal:
        hidden = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores


def _with_layout_of(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` in the memory layout that a compiler expects: that of ``like``."""
    expected = torch.empty_like(like)
    return tensor if tensor.stride() == expected.stride() else expected.copy_(tensor)


def _fake_attend(query: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(query), query.new_empty(query.shape[:3], dtype=torch.float32)


def _fake_attend_backward(
    _: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *__: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(query), key.new_empty(key.shape), value.new_empty(value.shape)


for _key in {kind.dispatch_key for kind in list_accelerators()}:
    _LIBRARY.impl("attend_part", _attend, _key)
    _LIBRARY.impl("attend_part_backward", _attend_backward, _key)
_LIBRARY.impl("attend_part", _fake_attend, "Meta")
_LIBRARY.impl("attend_part_backward", _fake_attend_backward, "Meta")
