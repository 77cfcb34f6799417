"""Rules of fine-tuning with low-rank adapters (LoRA; Hu et al., 2021). No torch.

Also lists the layers that get adapters: ``flagscale.train.layers.lora`` adds them, and
``flagscale.train.checkpoint.formats.adapters`` exports them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from flagscale.config.arguments.parameters import moe_layer_flags
from flagscale.config.arguments.spec.argument import Values, Violation
from flagscale.config.arguments.spec.values import format_value

QKV, PROJ, FC1, FC2 = "linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"
Q, Q_DOWN, Q_UP = "linear_q_proj", "linear_q_down_proj", "linear_q_up_proj"
KV_DOWN, KV_UP = "linear_kv_down_proj", "linear_kv_up_proj"
HUGGINGFACE_LAYERS: Mapping[str, tuple[str, ...]] = {
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
"""Linear layers that can have adapters: megatron.core's name to the Hugging Face layers that
megatron.core fuses in it."""
UNSUPPORTED_BY_PEFT: Mapping[str, str] = {
    "gpt2": "peft expects GPT-2's Conv1D layers, whose weights are transposed",
}
"""``model_type`` of models whose adapters cannot be exported for peft, with the reason."""
UNSUPPORTED_MIXTURE = (
    "peft cannot load adapters of experts together with those of shared experts or dense MLPs"
)
"""Why adapters of a model cannot be exported for peft, which takes one name, such as ``up_proj``,
for the experts' fused parameter alone."""
_ALL_LINEAR = "all-linear"
_MAX_RELATIVE_ROUNDING = 0.02
"""Largest difference between elements of one weight stored in two precisions, relative to the
largest magnitude in the sample."""


def adapter_targets(values: Values) -> tuple[str, ...]:
    """Return megatron.core's names of the layers that get adapters; none without ``peft_type``."""
    return tuple(adapter_parts(values))


def adapter_parts(values: Values) -> dict[str, tuple[str, ...]]:
    """Return, for each layer of megatron.core, those of its Hugging Face layers that get
    adapters."""
    if not values["peft_type"]:
        return {}
    names, layers = values["lora_target_modules"], _adaptable_layers(values)
    if not _names_layers(values):
        experts = values["num_moe_experts"]
        return {n: parts for n, parts in layers.items() if not (experts and n in (FC1, FC2))}
    named = {
        layer: parts if layer in names else tuple(part for part in parts if part in names)
        for layer, parts in layers.items()
    }
    return {layer: parts for layer, parts in named.items() if parts}


def _adaptable_layers(values: Values) -> dict[str, tuple[str, ...]]:
    """Return the entries of :data:`HUGGINGFACE_LAYERS` that this model has."""
    names: tuple[str, ...] = (QKV, PROJ, FC1, FC2)
    if values["multi_latent_attention"]:
        queries = (Q_DOWN, Q_UP) if values["q_lora_rank"] else (Q,)
        names = (*queries, KV_DOWN, KV_UP, PROJ, FC1, FC2)
    layers = {name: HUGGINGFACE_LAYERS[name] for name in names}
    if not (values["swiglu"] or values["gated_linear_unit"]):
        layers[FC1] = HUGGINGFACE_LAYERS[FC1][1:]
    return layers


def note_adapters(values: Values) -> Iterator[str]:
    """Yield notes about adapters."""
    if values["peft_type"] and values["num_moe_experts"] and not _names_layers(values):
        name = "lora_target_modules" if values["lora_target_modules"] else "peft_type"
        layers = ", ".join(adapter_targets(values))
        yield (
            f"{name}: {format_value(values[name])} trains adapters of {layers} only: in a model "
            f"with experts (num_moe_experts), MLPs and experts get adapters if {FC1} and {FC2} are "
            "in lora_target_modules"
        )


def adapts_experts(values: Values) -> bool:
    """Return whether the experts of the model get adapters."""
    return bool(values["num_moe_experts"] and {FC1, FC2} & set(adapter_targets(values)))


def _names_layers(values: Values) -> bool:
    """Return whether layers are named individually."""
    names = values["lora_target_modules"]
    return bool(names) and _ALL_LINEAR not in names


def describe_adapters(values: Values) -> dict[str, Any] | None:
    """Return the description of the adapters for a checkpoint; None without adapters."""
    if not values["peft_type"]:
        return None
    return {
        "type": values["peft_type"],
        "rank": values["lora_dim"],
        "alpha": values["lora_alpha"],
        "dropout": values["lora_dropout"],
        "targets": [
            name
            for layer, parts in adapter_parts(values).items()
            for name in ([layer] if parts == _adaptable_layers(values)[layer] else parts)
        ],
        "base": values["pretrained_checkpoint"],
        "sample": values.get("base_sample"),
    }


def first_differing_weight(
    saved: Mapping[str, Any], expected: Mapping[str, Sequence[float]]
) -> str | None:
    """Return the name of the first weight by which the base model of saved adapters differs from
    the model of this run.

    Args:
        saved: description of the adapters in the checkpoint (:func:`describe_adapters`).
        expected: a sample of elements of each weight of this run's base model.

    Returns:
        The name of the weight; None if the models agree up to rounding, or if the checkpoint has no
        sample.
    """
    for name, numbers in (saved.get("sample") or {}).items():
        sample = expected.get(name)
        if sample is None or len(sample) != len(numbers):
            return str(name)
        largest = max(map(abs, numbers), default=0.0)
        difference = max((abs(a - b) for a, b in zip(numbers, sample, strict=True)), default=0.0)
        if difference > _MAX_RELATIVE_ROUNDING * largest:
            return str(name)
    return None


def check_adapters(values: Values) -> Iterator[Violation]:
    """Check the settings of low-rank adapters."""
    if not values["peft_type"]:
        return
    yield from _check_targets(values["lora_target_modules"] or (), _adaptable_layers(values))
    if adapts_experts(values):
        yield from _check_expert_adapters(values)
    if values["enable_hetero"]:
        yield "peft_type", "lora is not supported with enable_hetero"
    if values["fp8"]:
        yield (
            "fp8",
            f"{values['fp8']} is not supported with peft_type: lora, because frozen weights are "
            "not cast",
        )
    if values["save"] and not values["pretrained_checkpoint"]:
        yield (
            "pretrained_checkpoint",
            "is required by peft_type: lora, because checkpoints contain the adapters without "
            "their base model; to train without checkpoints set save: null",
        )


def _check_expert_adapters(values: Values) -> Iterator[Violation]:
    """Check settings that the adapters of experts do not support."""
    expert_tp = values["expert_tensor_parallel_size"] or values["tensor_model_parallel_size"]
    if values["lora_dropout"] and expert_tp > 1:
        yield (
            "lora_dropout",
            "is not supported with adapters of experts that are split over tensor-parallel ranks, "
            "which would drop different elements; set expert_tensor_parallel_size: 1, or "
            "lora_dropout: 0",
        )
    has_other_mlps = values["moe_shared_expert_intermediate_size"] or not all(
        moe_layer_flags(values)
    )
    if values["export_peft"] and has_other_mlps:
        yield "export_peft", f"{UNSUPPORTED_MIXTURE}; use export_huggingface, which merges them"


def _check_targets(
    names: Iterable[str], layers: Mapping[str, tuple[str, ...]]
) -> Iterator[Violation]:
    """Check that ``lora_target_modules`` names layers of this model."""
    valid_names = [*layers, *(part for parts in layers.values() for part in parts), _ALL_LINEAR]
    for name in sorted(set(names) - set(valid_names)):
        listed = ", ".join(valid_names)
        yield "lora_target_modules", f"expected names of {listed}; found {name}"
