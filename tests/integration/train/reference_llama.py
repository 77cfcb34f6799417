"""Reference implementation of Llama with torch only, with the weights of megatron.core's model.

:mod:`layout_worker` compares losses and gradients with it. ``weights`` are by global
parameter name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def loss(weights: Mapping[str, Tensor], batch: Mapping[str, Tensor], args: Any) -> Tensor:
    """Return the mean cross-entropy in nats of a batch [b, s].

    If documents are masked, each is computed separately.
    """
    if args.peft_type:
        weights = merge_adapters(weights, args)
    loss_sum = torch.zeros((), device=batch["tokens"].device)
    for document in split_documents(batch):
        token_losses = compute_token_losses(weights, document["tokens"], document["labels"], args)
        loss_sum = loss_sum + (token_losses * document["loss_mask"]).sum()
    return loss_sum / batch["loss_mask"].sum()


def split_documents(batch: Mapping[str, Tensor]) -> Iterator[Mapping[str, Tensor]]:
    """Yield the batch, or each of its documents as a batch if documents are masked."""
    if "documents" not in batch:
        yield batch
        return
    for row, documents in enumerate(batch["documents"]):
        for number in documents.unique():
            yield {
                name: batch[name][row][documents == number][None]
                for name in ("tokens", "labels", "loss_mask")
            }


def mtp_loss_sums(weights: Mapping[str, Tensor], batch: Mapping[str, Tensor], args: Any) -> Tensor:
    """Return the sum of losses and the number of tokens of each MTP layer, [layers, 2].

    A position counts if its document has the token that the layer predicts.
    """
    device = batch["tokens"].device
    sums_and_counts = torch.zeros(args.mtp_num_layers or 0, 2, device=device)
    names, table = ("tokens", "labels", "loss_mask"), weights["embedding.word_embeddings.weight"]
    for document in split_documents(batch):
        x = hidden_states(weights, document["tokens"], args)
        for layer in range(min(len(sums_and_counts), x.shape[1] - 1)):
            prefix = f"mtp.layers.{layer}."
            mtp_weights = {
                name.removeprefix(prefix): w for name, w in weights.items() if prefix in name
            }
            tokens, labels, mask = (document[name][:, layer + 1 :] for name in names)
            embeddings = norm(table[tokens], mtp_weights["enorm.weight"], args)
            previous = norm(x[:, :-1], mtp_weights["hnorm.weight"], args)
            layer_weights = {
                n.removeprefix("transformer_layer."): w for n, w in mtp_weights.items()
            }
            x = run_layer(
                layer_weights,
                torch.cat([embeddings, previous], -1) @ mtp_weights["eh_proj.weight"].T,
                args,
            )
            x = norm(x, mtp_weights["final_layernorm.weight"], args)
            token_losses = cross_entropy(weights, x, labels) * mask
            sums_and_counts = sums_and_counts + torch.zeros_like(sums_and_counts).index_put(
                (torch.tensor([layer], device=device),),
                torch.stack([token_losses.sum(), mask.sum()]),
            )
    return sums_and_counts


def merge_adapters(weights: Mapping[str, Tensor], args: Any) -> Mapping[str, Tensor]:
    """Return the weights with merged LoRA adapters."""
    scale = args.lora_alpha / args.lora_dim
    merged = dict(weights)
    for name in weights:
        if name.endswith(".lora_a"):
            layer = name.removesuffix(".lora_a")
            lora_b = weights[f"{layer}.lora_b"]
            row_mask = build_adapter_row_mask(layer, len(lora_b), args).to(lora_b.device)
            delta = lora_b * row_mask @ weights[name]
            merged[f"{layer}.weight"] = weights[f"{layer}.weight"] + scale * delta
    return merged


def build_adapter_row_mask(layer: str, rows: int, args: Any) -> Tensor:
    """Return a mask [rows, 1] of the rows of a layer that have an adapter."""
    target_modules = args.lora_target_modules or ("all-linear",)
    if {layer.rpartition(".")[2], "all-linear"} & set(target_modules):
        return torch.ones(rows, 1)
    if layer.endswith("linear_fc1"):
        halves = [
            torch.full((rows // 2,), float(n in target_modules)) for n in ("gate_proj", "up_proj")
        ]
        return torch.cat(halves)[:, None]
    if not layer.endswith("linear_qkv"):
        return torch.ones(rows, 1)
    head_dim = args.hidden_size // args.num_attention_heads
    group_size = args.num_attention_heads // args.num_query_groups
    # Rows of a query group: its queries, key, value.
    heads = [float("q_proj" in target_modules)] * group_size + [
        float(n in target_modules) for n in ("k_proj", "v_proj")
    ]
    group = torch.tensor(heads).repeat_interleave(head_dim)
    return group.repeat(args.num_query_groups)[:, None]


def compute_token_losses(
    weights: Mapping[str, Tensor], tokens: Tensor, labels: Tensor, args: Any
) -> Tensor:
    """Return the cross-entropy in nats of each token, [b, s]."""
    return cross_entropy(weights, hidden_states(weights, tokens, args), labels)


def cross_entropy(weights: Mapping[str, Tensor], x: Tensor, labels: Tensor) -> Tensor:
    logits = x @ weights["output_layer.weight"].T
    token_losses = functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="none"
    )
    return token_losses.view(labels.shape)


def hidden_states(weights: Mapping[str, Tensor], tokens: Tensor, args: Any) -> Tensor:
    """Return the input of the output layer, [b, s, h]."""
    x = weights["embedding.word_embeddings.weight"][tokens]
    for layer in range(args.num_layers):
        layer_weights = {
            name.removeprefix(f"decoder.layers.{layer}."): weight
            for name, weight in weights.items()
            if name.startswith(f"decoder.layers.{layer}.")
        }
        x = run_layer(layer_weights, x, args)
    return norm(x, weights["decoder.final_layernorm.weight"], args)


def run_layer(weights: Mapping[str, Tensor], x: Tensor, args: Any) -> Tensor:
    x = x + attention(weights, norm(x, weights["input_layernorm.weight"], args), args)
    return x + mlp(weights, norm(x, weights["pre_mlp_layernorm.weight"], args))


def norm(x: Tensor, weight: Tensor, args: Any) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + args.layernorm_epsilon).sqrt() * weight


def mlp(weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
    gate, up = (x @ weights["mlp.linear_fc1.weight"].T).chunk(2, -1)
    return (functional.silu(gate) * up) @ weights["mlp.linear_fc2.weight"].T


def attention(weights: Mapping[str, Tensor], x: Tensor, args: Any) -> Tensor:
    """Compute causal attention. A group's queries, key and value are adjacent in ``linear_qkv``."""
    batch, sequence, hidden = x.shape
    heads, groups = args.num_attention_heads, args.num_query_groups
    head_dim, group_size = hidden // heads, heads // groups
    qkv = (x @ weights["self_attention.linear_qkv.weight"].T).view(
        batch, sequence, groups, group_size + 2, head_dim
    )
    query = rotate(
        qkv[..., :group_size, :].reshape(batch, sequence, heads, head_dim), args.rotary_base
    )
    key = rotate(qkv[..., group_size, :], args.rotary_base)
    value = qkv[..., group_size + 1, :]
    key, value = (t.repeat_interleave(group_size, dim=2).transpose(1, 2) for t in (key, value))
    scores = query.transpose(1, 2) @ key.transpose(2, 3) / head_dim**0.5
    future_mask = torch.ones(sequence, sequence, dtype=torch.bool, device=scores.device).triu(1)
    output = scores.masked_fill(future_mask, float("-inf")).softmax(-1) @ value
    output = output.transpose(1, 2).reshape(batch, sequence, hidden)
    return output @ weights["self_attention.linear_proj.weight"].T


def rotate(x: Tensor, base: float) -> Tensor:
    """Apply rotary positions to ``x`` [b, s, heads, d]; pairs are half a head apart."""
    head_dim = x.shape[-1]
    frequencies = base ** (-torch.arange(0, head_dim, 2, device=x.device) / head_dim)
    angles = torch.outer(torch.arange(x.shape[1], device=x.device), frequencies)[None, :, None, :]
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
