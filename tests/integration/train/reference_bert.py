"""BERT in plain torch, read from the trained model's weights: what that should compute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def loss(weights: Mapping[str, Tensor], batch: Mapping[str, Tensor], args: Any) -> Tensor:
    """Mean cross-entropy of the tokens to be told of ``[batch, sequence]`` ones, in nats."""
    words = weights["embedding.word_embeddings.weight"]
    places = weights["embedding.position_embeddings.weight"]
    x = words[batch["tokens"]] + places[torch.arange(args.seq_length)]
    for layer in range(args.num_layers):
        start = f"encoder.layers.{layer}."
        own = {n.removeprefix(start): w for n, w in weights.items() if n.startswith(start)}
        x = x + attention(own, norm(own, "input_layernorm", x, args), args)
        x = x + mlp(own, norm(own, "pre_mlp_layernorm", x, args))
    x = norm(weights, "encoder.final_layernorm", x, args)
    x = functional.gelu(linear(weights, "lm_head.dense", x))
    x = norm(weights, "lm_head.layer_norm", x, args)
    logits = x @ words.T + weights["output_layer.bias"]
    each = functional.cross_entropy(
        logits.flatten(0, 1), batch["labels"].flatten(), reduction="none"
    )
    told = batch["loss_mask"].flatten()
    return (each * told).sum() / told.sum()


def linear(weights: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def norm(weights: Mapping[str, Tensor], name: str, x: Tensor, args: Any) -> Tensor:
    x = x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + args.layernorm_epsilon).sqrt()
    return x * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def mlp(own: Mapping[str, Tensor], x: Tensor) -> Tensor:
    return linear(own, "mlp.linear_fc2", functional.gelu(linear(own, "mlp.linear_fc1", x)))


def attention(own: Mapping[str, Tensor], x: Tensor, args: Any) -> Tensor:
    """A head's query, key and value lie side by side in ``linear_qkv``; each token attends to all
    of its sequence."""
    batch, sequence, hidden = x.shape
    heads, size = args.num_attention_heads, hidden // args.num_attention_heads
    mixed = linear(own, "self_attention.linear_qkv", x).view(batch, sequence, heads, 3, size)
    query, key, value = (mixed[..., i, :].transpose(1, 2) for i in range(3))
    out = (query @ key.transpose(2, 3) / size**0.5).softmax(-1) @ value
    return linear(
        own, "self_attention.linear_proj", out.transpose(1, 2).reshape(batch, sequence, hidden)
    )
