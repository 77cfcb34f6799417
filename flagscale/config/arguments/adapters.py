"""What is asked of fine-tuning by low-rank adapters (LoRA; Hu et al., 2021). Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
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
_EVERY = "all-linear"


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
        0.0, "Share of an adapter's inputs that is dropped in training", minimum=0, maximum=0.99
    )
    lora_target_modules: tuple[str, ...] | None = arg(
        None,
        "Layers that get adapters: linear_qkv, linear_proj, linear_fc1, linear_fc2, or "
        "transformers' names (q_proj, k_proj and v_proj together, o_proj, gate_proj and up_proj "
        "together, down_proj), or all-linear; without it all, but for a mixture's experts. "
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
    if not values["peft_type"]:
        return ()
    given, known = values["lora_target_modules"], _known(values)
    if not given or _EVERY in given:
        return tuple(n for n in known if not (values["num_moe_experts"] and n in (FC1, FC2)))
    named = set(given)
    return tuple(name for name in known if name in named or named.issuperset(THEIRS[name]))


def _known(values: Values) -> tuple[str, ...]:
    """The linear layers of this model that can have adapters."""
    if not values["multi_latent_attention"]:
        return QKV, PROJ, FC1, FC2
    queries = (Q_DOWN, Q_UP) if values["q_lora_rank"] else (Q,)
    return *queries, KV_DOWN, KV_UP, PROJ, FC1, FC2


def description(values: Values) -> dict[str, Any] | None:
    """What a checkpoint says of its adapters; None where it has none."""
    if not values["peft_type"]:
        return None
    return {
        "type": values["peft_type"],
        "rank": values["lora_dim"],
        "alpha": values["lora_alpha"],
        "dropout": values["lora_dropout"],
        "targets": list(targets_of(values)),
        "base": values["pretrained_checkpoint"],
    }


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
    if values["moe_router_enable_expert_bias"]:
        yield (
            "moe_router_enable_expert_bias",
            "true with peft_type lora: the router does not change",
        )
    if values["save"] and not values["pretrained_checkpoint"]:
        yield (
            "pretrained_checkpoint",
            "is required by peft_type lora: checkpoints hold the adapters alone, and these are of "
            "a model; or save: null",
        )


def _unknown(given: Iterable[str], known: tuple[str, ...]) -> Iterator[Broken]:
    """Names of no layer, and parts of layers that are one here."""
    named = set(given)
    parts = {part: name for name in known for part in THEIRS[name]}
    for name in sorted(named - {*known, *parts, _EVERY}):
        there = ", ".join((*known, *parts, _EVERY))
        yield "lora_target_modules", f"{name}: no layer that gets adapters; there is {there}"
    for whole in known:
        several = THEIRS[whole]
        missing = [part for part in several if part not in named]
        if named & set(several) and missing and whole not in named:
            yield (
                "lora_target_modules",
                f"{' and '.join(sorted(named & set(several)))} without {' and '.join(missing)}: "
                f"they are one product here, with one adapter ({whole}); name all of them",
            )
