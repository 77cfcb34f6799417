"""Llama in plain torch, read from megatron.core's weights: what the model should compute."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def loss(weights: Mapping[str, Tensor], batch: Mapping[str, Tensor], args: Any) -> Tensor:
    """Mean cross-entropy of ``[batch, sequence]`` tokens, in nats; of documents that are kept
    apart each by itself, as if there were no others."""
    if args.peft_type:
        weights = with_adapters(weights, args)
    total = torch.zeros((), device=batch["tokens"].device)
    for own in alone(batch):
        found = losses(weights, own["tokens"], own["labels"], args)
        total = total + (found * own["loss_mask"]).sum()
    return total / batch["loss_mask"].sum()


def alone(batch: Mapping[str, Tensor]) -> Iterator[Mapping[str, Tensor]]:
    """What is told without the rest: the whole of a batch, or each document by itself."""
    if "documents" not in batch:
        yield batch
        return
    for row, of in enumerate(batch["documents"]):
        for number in of.unique():
            yield {
                name: batch[name][row][of == number][None]
                for name in ("tokens", "labels", "loss_mask")
            }


def further(weights: Mapping[str, Tensor], batch: Mapping[str, Tensor], args: Any) -> Tensor:
    """Of each layer that predicts further tokens the sum of its losses and the tokens it tells,
    ``[layers, 2]``: a place takes part as long as the text goes on that far."""
    device = batch["tokens"].device
    found = torch.zeros(args.mtp_num_layers or 0, 2, device=device)
    names, table = ("tokens", "labels", "loss_mask"), weights["embedding.word_embeddings.weight"]
    for own in alone(batch):
        x = hidden(weights, own["tokens"], args)
        for layer in range(min(len(found), x.shape[1] - 1)):
            prefix = f"mtp.layers.{layer}."
            at = {name.removeprefix(prefix): w for name, w in weights.items() if prefix in name}
            tokens, labels, mask = (own[name][:, layer + 1 :] for name in names)
            seen = norm(table[tokens], at["enorm.weight"], args)
            before = norm(x[:, :-1], at["hnorm.weight"], args)
            inside = {n.removeprefix("transformer_layer."): w for n, w in at.items()}
            x = layer_of(inside, torch.cat([seen, before], -1) @ at["eh_proj.weight"].T, args)
            x = norm(x, at["final_layernorm.weight"], args)
            each = cross_entropy(weights, x, labels) * mask
            found = found + torch.zeros_like(found).index_put(
                (torch.tensor([layer], device=device),), torch.stack([each.sum(), mask.sum()])
            )
    return found


def with_adapters(weights: Mapping[str, Tensor], args: Any) -> Mapping[str, Tensor]:
    """Each weight with what its low-rank adapter adds."""
    scale = args.lora_alpha / args.lora_dim
    found = dict(weights)
    for name in weights:
        if name.endswith(".lora_a"):
            layer = name.removesuffix(".lora_a")
            outward = weights[f"{layer}.lora_b"]
            there = having(layer, len(outward), args).to(outward.device)
            added = outward * there @ weights[name]
            found[f"{layer}.weight"] = weights[f"{layer}.weight"] + scale * added
    return found


def having(layer: str, rows: int, args: Any) -> Tensor:
    """1 for each row of a layer's adapter that there is, ``[rows, 1]``."""
    named = args.lora_target_modules or ("all-linear",)
    if {layer.rpartition(".")[2], "all-linear"} & set(named):
        return torch.ones(rows, 1)
    if layer.endswith("linear_fc1"):
        halves = [torch.full((rows // 2,), float(n in named)) for n in ("gate_proj", "up_proj")]
        return torch.cat(halves)[:, None]
    if not layer.endswith("linear_qkv"):
        return torch.ones(rows, 1)
    size, each = args.hidden_size // args.num_attention_heads, args.num_query_groups
    each = args.num_attention_heads // each
    heads = [float("q_proj" in named)] * each + [float(n in named) for n in ("k_proj", "v_proj")]
    group = torch.tensor(heads).repeat_interleave(size)
    return group.repeat(args.num_query_groups)[:, None]


def losses(weights: Mapping[str, Tensor], tokens: Tensor, labels: Tensor, args: Any) -> Tensor:
    """Cross-entropy of each of ``[batch, sequence]`` tokens, in nats."""
    return cross_entropy(weights, hidden(weights, tokens, args), labels)


def cross_entropy(weights: Mapping[str, Tensor], x: Tensor, labels: Tensor) -> Tensor:
    logits = x @ weights["output_layer.weight"].T
    found = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return found.view(labels.shape)


def hidden(weights: Mapping[str, Tensor], tokens: Tensor, args: Any) -> Tensor:
    """What the head takes."""
    x = weights["embedding.word_embeddings.weight"][tokens]
    for layer in range(args.num_layers):
        own = {
            name.removeprefix(f"decoder.layers.{layer}."): weight
            for name, weight in weights.items()
            if name.startswith(f"decoder.layers.{layer}.")
        }
        x = layer_of(own, x, args)
    return norm(x, weights["decoder.final_layernorm.weight"], args)


def layer_of(own: Mapping[str, Tensor], x: Tensor, args: Any) -> Tensor:
    x = x + attention(own, norm(x, own["input_layernorm.weight"], args), args)
    return x + mlp(own, norm(x, own["pre_mlp_layernorm.weight"], args))


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
