"""What is asked of fine-tuning by low-rank adapters (LoRA; Hu et al., 2021). Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flagscale.config.arguments.precision import Broken, Values
from flagscale.config.arguments.spec import arg
from flagscale.config.arguments.values import shown

QKV, PROJ, FC1, FC2 = "linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"
Q, Q_DOWN, Q_UP = "linear_q_proj", "linear_q_down_proj", "linear_q_up_proj"
KV_DOWN, KV_UP = "linear_kv_down_proj", "linear_kv_up_proj"
THEIRS: Mapping[str, tuple[str, ...]] = {
    QKV: ("q_proj", "k_proj", "v_proj"),
    Q: ("q_proj",),
    Q_DOWN: ("q_a_proj",),
    Q_UP: ("q_b_proj",),
    KV_DOWN: ("kv_a_proj_with_mqa",),
    KV_UP: ("kv_b_proj",),
    PROJ: ("o_proj",),
    FC1: ("gate_proj", "up_proj"),
    FC2: ("down_proj",),
}
"""Linear layers that can have adapters, by megatron.core's names, and those of Hugging Face's that
each is made of."""
NOT_FOR_PEFT: Mapping[str, str] = {
    "gpt2": "it takes this model's linear layers for another class, with weights the other way",
}
"""Kinds of models (``model_type``) whose adapters are not written for peft, and why."""
_EVERY = "all-linear"
_ROUNDING = 0.02
"""How far, beside the largest of them, numbers of the same weight are apart in two precisions."""


@dataclass(frozen=True)
class Adapters:
    """Training a few weights beside frozen ones (docs/finetuning.md)."""

    peft_type: str | None = arg(
        None,
        "lora: train low-rank adapters beside linear layers, and nothing else; all weights without "
        "it",
        choices=("lora",),
    )
    lora_dim: int = arg(16, "Rank of the adapters", minimum=1)
    lora_alpha: float = arg(
        32.0, "What adapters add is multiplied by this over their rank", minimum=0.001
    )
    lora_dropout: float = arg(
        0.0,
        "Share that is dropped in training, of an adapter's inputs or of what it adds",
        minimum=0,
        maximum=0.99,
    )
    lora_dropout_position: str = arg(
        "pre",
        "Where that is: pre, before the first of an adapter's matrices, as in peft; post, behind "
        "the second",
        choices=("pre", "post"),
    )
    lora_in_init_method: str = arg(
        "kaiming",
        "How the first of an adapter's matrices is drawn: kaiming, with the spread of peft's, "
        "1 / sqrt(3 in); xavier, with sqrt(2 / (in + rank)); normal, with 0.2",
        choices=("kaiming", "xavier", "normal"),
    )
    lora_out_init_method: str | None = arg(
        None,
        "How the second is drawn: zero, so that training starts from the base, which is so "
        "without it",
        choices=("zero",),
    )
    lora_target_modules: tuple[str, ...] | None = arg(
        None,
        "Layers that get adapters: linear_qkv, linear_proj, linear_fc1, linear_fc2, or "
        "transformers' names (q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj), or "
        "all-linear; without it all, but for a mixture's experts. "
        "Multi-latent attention has linear_q_down_proj and linear_q_up_proj (q_a_proj, q_b_proj; "
        "linear_q_proj without q_lora_rank), linear_kv_down_proj and linear_kv_up_proj",
    )
    export_peft: str | None = arg(
        None,
        "Directory below which a run that has come to its end writes its adapters for peft, in "
        "iter_<steps> (needs save)",
    )


def targets_of(values: Values) -> tuple[str, ...]:
    """The layers that get adapters, by megatron.core's names; none without ``peft_type``."""
    return tuple(parts_of(values))


def parts_of(values: Values) -> dict[str, tuple[str, ...]]:
    """Of each of these layers what gets an adapter, by Hugging Face's names."""
    if not values["peft_type"]:
        return {}
    given, known = values["lora_target_modules"], _known(values)
    if not _chosen(values):
        experts = values["num_moe_experts"]
        return {n: parts for n, parts in known.items() if not (experts and n in (FC1, FC2))}
    named = {
        layer: parts if layer in given else tuple(part for part in parts if part in given)
        for layer, parts in known.items()
    }
    return {layer: parts for layer, parts in named.items() if parts}


def _known(values: Values) -> dict[str, tuple[str, ...]]:
    """The linear layers of this model that can have adapters, and what each is made of."""
    names: tuple[str, ...] = (QKV, PROJ, FC1, FC2)
    if values["multi_latent_attention"]:
        queries = (Q_DOWN, Q_UP) if values["q_lora_rank"] else (Q,)
        names = (*queries, KV_DOWN, KV_UP, PROJ, FC1, FC2)
    known = {name: THEIRS[name] for name in names}
    if not (values["swiglu"] or values["gated_linear_unit"]):
        known[FC1] = THEIRS[FC1][1:]
    return known


def notes(values: Values) -> Iterator[str]:
    """What is worth saying of adapters that is not wrong."""
    if values["peft_type"] and values["num_moe_experts"] and not _chosen(values):
        name = "lora_target_modules" if values["lora_target_modules"] else "peft_type"
        layers = ", ".join(targets_of(values))
        yield (
            f"{name}: {shown(values[name])} trains {layers}: of a mixture attention alone gets "
            "adapters, experts, shared ones, and layers without experts have none"
        )


def _chosen(values: Values) -> bool:
    """Whether layers are named one by one."""
    given = values["lora_target_modules"]
    return bool(given) and _EVERY not in given


def description(values: Values) -> dict[str, Any] | None:
    """What a checkpoint says of its adapters; None where it has none."""
    if not values["peft_type"]:
        return None
    return {
        "type": values["peft_type"],
        "rank": values["lora_dim"],
        "alpha": values["lora_alpha"],
        "dropout": values["lora_dropout"],
        "targets": [
            name
            for layer, parts in parts_of(values).items()
            for name in ([layer] if parts == _known(values)[layer] else parts)
        ],
        "base": values["pretrained_checkpoint"],
        "sample": values.get("base_sample"),
    }


def other_weight(saved: Mapping[str, Any], own: Mapping[str, Sequence[float]]) -> str | None:
    """The first weight in which the model that saved adapters are of is not the one whose sample is
    ``own``; None where they are the same but for rounding, or where nobody knows."""
    for name, numbers in (saved.get("sample") or {}).items():
        found = own.get(name)
        if found is None or len(found) != len(numbers):
            return str(name)
        largest = max(map(abs, numbers), default=0.0)
        apart = max((abs(a - b) for a, b in zip(numbers, found, strict=True)), default=0.0)
        if apart > _ROUNDING * largest:
            return str(name)
    return None


def broken(values: Values) -> Iterator[Broken]:
    """What cannot be, of adapters."""
    if not values["peft_type"]:
        return
    yield from _unknown(values["lora_target_modules"] or (), _known(values))
    if values["num_moe_experts"] and {FC1, FC2} & set(targets_of(values)):
        others = " and ".join(name for name in _known(values) if name not in (FC1, FC2))
        message = f"{shown(values['lora_target_modules'])}: experts get no adapters; take {others}"
        yield "lora_target_modules", message
    if values["enable_hetero"]:
        yield (
            "peft_type",
            "lora with enable_hetero: adapters are not shared out over unlike devices",
        )
    if values["fp8"]:
        yield "fp8", f"{values['fp8']} with peft_type lora: weights that do not change are not cast"
    if values["save"] and not values["pretrained_checkpoint"]:
        yield (
            "pretrained_checkpoint",
            "is required by peft_type lora: checkpoints hold the adapters alone, and these are of "
            "a model; or save: null",
        )


def _unknown(given: Iterable[str], known: Mapping[str, tuple[str, ...]]) -> Iterator[Broken]:
    """Names of no layer."""
    there = [*known, *(part for parts in known.values() for part in parts), _EVERY]
    for name in sorted(set(given) - set(there)):
        listed = ", ".join(there)
        yield "lora_target_modules", f"{name}: no layer that gets adapters; there is {listed}"
