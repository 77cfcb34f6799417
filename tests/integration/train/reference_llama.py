"""Llama in plain torch, read from megatron.core's weights: what the model should compute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def loss(weights: Mapping[str, Tensor], batch: Mapping[str, Tensor], args: Any) -> Tensor:
    """Mean cross-entropy of ``[batch, sequence]`` tokens, in nats; of documents that are kept
    apart each by itself, as if there were no others."""
    if args.peft_type:
        weights = with_adapters(weights, args.lora_alpha / args.lora_dim)
    counts = batch["loss_mask"]
    if "documents" not in batch:
        return (
            losses(weights, batch["tokens"], batch["labels"], args) * counts
        ).sum() / counts.sum()
    total = torch.zeros(())
    for row in range(len(counts)):
        of = batch["documents"][row]
        for number in of.unique():
            own = {name: batch[name][row][of == number][None] for name in ("tokens", "labels")}
            total = total + (losses(weights, **own, args=args) * counts[row][of == number]).sum()
    return total / counts.sum()


def with_adapters(weights: Mapping[str, Tensor], scale: float) -> Mapping[str, Tensor]:
    """Each weight with what its low-rank adapter adds."""
    found = dict(weights)
    for name in weights:
        if name.endswith(".lora_a"):
            layer = name.removesuffix(".lora_a")
            added = weights[f"{layer}.lora_b"] @ weights[name]
            found[f"{layer}.weight"] = weights[f"{layer}.weight"] + scale * added
    return found


def losses(weights: Mapping[str, Tensor], tokens: Tensor, labels: Tensor, args: Any) -> Tensor:
    """Cross-entropy of each of ``[batch, sequence]`` tokens, in nats."""
    x = weights["embedding.word_embeddings.weight"][tokens]
    for layer in range(args.num_layers):
        own = {
            name.removeprefix(f"decoder.layers.{layer}."): weight
            for name, weight in weights.items()
            if name.startswith(f"decoder.layers.{layer}.")
        }
        x = x + attention(own, norm(x, own["input_layernorm.weight"], args), args)
        x = x + mlp(own, norm(x, own["pre_mlp_layernorm.weight"], args))
    logits = norm(x, weights["decoder.final_layernorm.weight"], args)
    logits = logits @ weights["output_layer.weight"].T
    found = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return found.view(tokens.shape)


def norm(x: Tensor, weight: Tensor, args: Any) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + args.layernorm_epsilon).sqrt() * weight


def mlp(own: Mapping[str, Tensor], x: Tensor) -> Tensor:
    gate, up = (x @ own["mlp.linear_fc1.weight"].T).chunk(2, -1)
    return (functional.silu(gate) * up) @ own["mlp.linear_fc2.weight"].T


def attention(own: Mapping[str, Tensor], x: Tensor, args: Any) -> Tensor:
    """A group's queries, its key and its value lie side by side in ``linear_qkv``."""
    batch, sequence, hidden = x.shape
    heads, groups = args.num_attention_heads, args.num_query_groups
    size, each = hidden // heads, heads // groups
    mixed = (x @ own["self_attention.linear_qkv.weight"].T).view(
        batch, sequence, groups, each + 2, size
    )
    query = rotate(mixed[..., :each, :].reshape(batch, sequence, heads, size), args.rotary_base)
    key = rotate(mixed[..., each, :], args.rotary_base)
    value = mixed[..., each + 1, :]
    key, value = (t.repeat_interleave(each, dim=2).transpose(1, 2) for t in (key, value))
    scores = query.transpose(1, 2) @ key.transpose(2, 3) / size**0.5
    hidden_ones = torch.ones(sequence, sequence, dtype=torch.bool, device=scores.device).triu(1)
    out = scores.masked_fill(hidden_ones, float("-inf")).softmax(-1) @ value
    out = out.transpose(1, 2).reshape(batch, sequence, hidden)
    return out @ own["self_attention.linear_proj.weight"].T


def rotate(x: Tensor, base: float) -> Tensor:
    """Rotary positions on ``[batch, sequence, heads, size]``; pairs are half a head apart."""
    size = x.shape[-1]
    frequencies = base ** (-torch.arange(0, size, 2, device=x.device) / size)
    angles = torch.outer(torch.arange(x.shape[1], device=x.device), frequencies)[None, :, None, :]
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
