"""Reference implementation of BERT with torch only, with the weights of the trained model.

:mod:`layout_worker` compares losses and gradients with it. ``weights`` are by global parameter
name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def loss(weights: Mapping[str, Tensor], batch: Mapping[str, Tensor], args: Any) -> Tensor:
    """Return the mean cross-entropy in nats of the masked tokens of a batch [b, s]."""
    word_embeddings = weights["embedding.word_embeddings.weight"]
    position_embeddings = weights["embedding.position_embeddings.weight"]
    x = word_embeddings[batch["tokens"]] + position_embeddings[torch.arange(args.seq_length)]
    for layer in range(args.num_layers):
        prefix = f"encoder.layers.{layer}."
        layer_weights = {
            n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)
        }
        x = x + attention(layer_weights, norm(layer_weights, "input_layernorm", x, args), args)
        x = x + mlp(layer_weights, norm(layer_weights, "pre_mlp_layernorm", x, args))
    x = norm(weights, "encoder.final_layernorm", x, args)
    x = functional.gelu(linear(weights, "lm_head.dense", x))
    x = norm(weights, "lm_head.layer_norm", x, args)
    logits = x @ word_embeddings.T + weights["output_layer.bias"]
    token_losses = functional.cross_entropy(
        logits.flatten(0, 1), batch["labels"].flatten(), reduction="none"
    )
    mask = batch["loss_mask"].flatten()
    return (token_losses * mask).sum() / mask.sum()


def linear(weights: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def norm(weights: Mapping[str, Tensor], name: str, x: Tensor, args: Any) -> Tensor:
    x = x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + args.layernorm_epsilon).sqrt()
    return x * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def mlp(weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
    return linear(weights, "mlp.linear_fc2", functional.gelu(linear(weights, "mlp.linear_fc1", x)))


def attention(weights: Mapping[str, Tensor], x: Tensor, args: Any) -> Tensor:
    """Compute attention of each token to its whole sequence.

    Query, key and value of a head are adjacent in ``linear_qkv``.
    """
    batch, sequence, hidden = x.shape
    heads, head_dim = args.num_attention_heads, hidden // args.num_attention_heads
    qkv = linear(weights, "self_attention.linear_qkv", x).view(batch, sequence, heads, 3, head_dim)
    query, key, value = (qkv[..., i, :].transpose(1, 2) for i in range(3))
    output = (query @ key.transpose(2, 3) / head_dim**0.5).softmax(-1) @ value
    return linear(
        weights,
        "self_attention.linear_proj",
        output.transpose(1, 2).reshape(batch, sequence, hidden),
    )
