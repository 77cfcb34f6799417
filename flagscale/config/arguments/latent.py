"""What is asked of multi-latent attention (DeepSeek-AI, "DeepSeek-V2", 2024). Imports no torch.

Queries, keys and values are made of a few latent numbers a token; of a head's queries and keys one
part is turned by positions, and of keys this part is one for all heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from flagscale.config.arguments.precision import Broken, Values
from flagscale.config.arguments.spec import arg
from flagscale.config.arguments.values import shown

MLA = "multi_latent_attention"


@dataclass(frozen=True)
class Latent:
    """Of multi-latent attention what megatron.core has no default for that says "without"."""

    q_lora_rank: int | None = arg(
        None,
        "Latent numbers that a token's queries are made of; without it they are made of its "
        "hidden state",
        minimum=1,
    )
    rope_type: str | None = arg(
        None,
        "Rotary positions of multi-latent attention: rope, or yarn, which scales them for longer "
        "sequences (without it yarn); all other attention takes rope",
        choices=("rope", "yarn"),
    )


_EXCLUDED: Mapping[str, str] = {
    "qk_l2_norm": "latent projections are normalised by qk_layernorm",
    "softmax_scale": "scores are scaled by the width of a head, and by mscale_all_dim",
    "window_size": "it has no windows here",
    "attn_logit_softcapping": "it bounds no scores here",
    "window_rotary_base": "it has no windows here",
    "rotary_interleaved": "megatron.core turns its positions in halves",
    "attention_output_gate": "megatron.core has no gate for it",
    "use_rope_scaling": "yarn scales its positions (rope_type)",
    "rotary_seq_len_interpolation_factor": "yarn scales its positions (rope_type)",
}
"""What multi-latent attention does not go with, and why."""


def are_apart(values: Values) -> bool:
    """Whether a token attends to its own document alone. Then positions, of which attention takes
    the distances, may be counted from anywhere."""
    return bool(values["reset_attention_mask"] or values["sft"])


def broken(values: Values) -> Iterator[Broken]:
    """What cannot be, of multi-latent attention."""
    if not values[MLA]:
        if values["rope_type"] == "yarn":
            message = "yarn needs multi_latent_attention; use_rope_scaling scales as Llama 3.1 does"
            yield "rope_type", message
        return
    if values["reset_position_ids"] and not are_apart(values):
        message = f"true with {MLA}: each layer counts positions through the sequence; set "
        yield "reset_position_ids", f"{message}reset_attention_mask, with which that is the same"
    for name, reason in _EXCLUDED.items():
        if values[name]:
            yield name, f"{shown(values[name])} with {MLA}: {reason}; leave it out"
    if values["position_embedding_type"] != "rope":
        found = shown(values["position_embedding_type"])
        yield "position_embedding_type", f"{found} with {MLA}: its positions are rotary; take rope"
    if (backend := values["attention_backend"]) in ("local", "flash"):
        message = f"{backend} with {MLA}: its kernel wants values as wide as keys; take auto"
        yield "attention_backend", message
    if values["family"] != "gpt":
        yield MLA, f"true with family {values['family']}: attention there is not latent"
    yield from _split(values)


def _split(values: Values) -> Iterator[Broken]:
    """Latent numbers are computed in parts by tensor-parallel ranks."""
    tp = values["tensor_model_parallel_size"]
    sizes = {"q_lora_rank": values["q_lora_rank"], "kv_lora_rank": values["kv_lora_rank"]}
    if sizes["kv_lora_rank"]:
        sizes["kv_lora_rank"] += values["qk_pos_emb_head_dim"]
    for name, size in sizes.items():
        if size and size % tp:
            more = f" + qk_pos_emb_head_dim {values['qk_pos_emb_head_dim']} = {size}"
            what = more if name == "kv_lora_rank" else ""
            message = f"{values[name]}{what} is not divisible by tensor_model_parallel_size {tp}"
            yield name, message
