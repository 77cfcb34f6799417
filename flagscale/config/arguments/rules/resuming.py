"""Rules between a run's arguments and the checkpoint that it starts from.

Pure, no torch: the preflight applies them to a host's description of the checkpoint, and the ranks
apply them before they read any tensor. ``values`` are derived arguments by name (:mod:`..derive`).
``content`` is the manifest of the checkpoint except for its files; older manifests lack some keys,
and one that Megatron-LM wrote has none. Unknown keys are not judged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flagscale.config.arguments.compat.huggingface.models import MODEL_FUNCTION, MTP_LAYERS
from flagscale.config.arguments.rules.adapters import describe_adapters, first_differing_weight
from flagscale.config.arguments.rules.schedule import schedule_lengths, weight_decays
from flagscale.config.arguments.spec.argument import Values
from flagscale.errors import CheckpointError

Manifest = Mapping[str, Any]
# What makes a model's weights what they are; without any of these equal, a checkpoint is another
# model's. Sizes that only follow from the layout (the padded vocabulary) are left out.
_ARCHITECTURE = (
    "family",
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "normalization",
    "layernorm_zero_centered_gamma",
    "sandwich_norm",
    "multi_latent_attention",
    "q_lora_rank",
    "gated_linear_unit",
    "swiglu",
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "untie_embeddings_and_output_weights",
    "position_embedding_type",
    "num_moe_experts",
    "moe_ffn_hidden_size",
    "vocab_size",
    MTP_LAYERS,
)
_BEFORE_FAMILIES = "gpt"
"""The family of checkpoints that were saved when there was one."""
SCHEDULE_TERMS: Mapping[str, str] = {
    "max_lr": "learning rate",
    "min_lr": "minimum learning rate",
    "lr_warmup_steps": "warmup iterations (in samples)",
    "lr_decay_steps": "total number of iterations (in samples)",
    "lr_decay_style": "learning rate decay style",
    "start_wd": "start weight decay",
    "end_wd": "end weight decay",
    "wd_incr_steps": "total number of weight decay iterations (in samples)",
    "wd_incr_style": "weight decay incr style",
}
"""What megatron.core's scheduler compares on load: its names, and its words for them."""


@dataclass(frozen=True)
class PartsToLoad:
    """Parts of a checkpoint to load, with notes."""

    optimizer: bool
    progress: bool
    rng: bool
    notes: tuple[str, ...]


def describe_arguments(values: Values, world_size: int) -> dict[str, Any]:
    """The manifest's words on a run that saves, as far as its arguments tell."""
    return {
        "architecture": architecture(values),
        "model": {name: values[name] for name in (*MODEL_FUNCTION, MTP_LAYERS) if name in values},
        "layout": _layout_of(values, world_size),
        "adapters": describe_adapters(values),
        "precision": _precision_of(values),
        "distributed_optimizer": bool(values["use_distributed_optimizer"]),
        "experts_apart": True,
        "has_optimizer": not values["no_save_optim"],
        "has_rng": not values["no_save_rng"],
    }


def architecture(values: Values) -> dict[str, Any]:
    """Return the values on which a checkpoint and a run that loads it must agree, as far as
    known."""
    recorded = {name: values[name] for name in _ARCHITECTURE if name in values}
    recorded[MTP_LAYERS] = values.get(MTP_LAYERS) or None
    return {name: value for name, value in recorded.items() if _is_plain(value)}


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def _layout_of(values: Values, world_size: int) -> dict[str, int | str]:
    """Sizes that decide which rank draws which random numbers."""
    if values["meshes"] is not None:
        return {"meshes": values["meshes"].describe(), "world": world_size}
    sizes: dict[str, int | str] = {
        "tensor": values["tensor_model_parallel_size"],
        "pipeline": values["pipeline_model_parallel_size"],
        "virtual": values["virtual_pipeline_model_parallel_size"] or 1,
        "expert": values["expert_model_parallel_size"],
        "world": world_size,
    }
    if values["shares"] is not None and values["pipeline_model_parallel_size"] > 1:
        sizes["order"] = "replica by replica"
    return sizes


def _precision_of(values: Values) -> str:
    return "bf16" if values["bf16"] else "fp16" if values["fp16"] else "fp32"


def _schedule_of(values: Values) -> dict[str, Any]:
    """The schedule of the arguments, by the names of :data:`SCHEDULE_TERMS`."""
    start, end = weight_decays(values)
    return {
        **schedule_lengths(values),
        "max_lr": values["lr"],
        "min_lr": values["min_lr"],
        "lr_decay_style": values["lr_decay_style"],
        "start_wd": start,
        "end_wd": end,
        "wd_incr_style": values["weight_decay_incr_style"],
    }


def parts_to_load(
    content: Manifest, values: Values, world_size: int, vocabulary: Sequence[int] | None = None
) -> PartsToLoad:
    """Return the parts of a checkpoint that a run loads. ``vocabulary`` is the range of vocabulary
    sizes that the model's padded vocabulary can hold, if known.

    Raises:
        CheckpointError: it is of another model, or its optimizer or schedule of another kind.
    """
    ours = describe_arguments(values, world_size)
    _check_model(content, ours, vocabulary)
    _check_adapters(content, ours)
    optimizer = not (values["finetune"] or values["no_load_optim"])
    problems = list(_check_mtp_layers(content, ours, optimizer=optimizer))
    if values["finetune"]:
        problems.append("finetune: the weights alone; training starts from step 0")
        return PartsToLoad(optimizer=False, progress=False, rng=False, notes=tuple(problems))
    if optimizer:
        _check_optimizer(content, values, ours)
    else:
        problems.append("without optimizer and schedule (no_load_optim)")
    rng = not values["no_load_rng"] and bool(content.get("has_rng", False))
    if rng and content.get("layout") != ours["layout"]:
        rng = False
        problems.append("without random states: the layout changed, generators start from the seed")
    return PartsToLoad(optimizer=optimizer, progress=True, rng=rng, notes=tuple(problems))


def _check_model(
    content: Manifest, description: Mapping[str, Any], vocabulary: Sequence[int] | None
) -> None:
    saved: Mapping[str, Any] = content.get("architecture", {})
    if saved:
        saved = {"family": _BEFORE_FAMILIES, **saved}
    ours = description["architecture"]
    differing = [
        f"{name}: the checkpoint has {saved[name]!r}, the model {ours[name]!r}"
        for name in saved
        if None not in (saved[name], ours.get(name)) and saved[name] != ours[name]
    ]
    # megatron.core would load a smaller embedding into a larger one and leave the rest as it is.
    if vocabulary is not None:
        least, most = vocabulary
        low, high = content.get("vocabulary", vocabulary)
        if most < low or high < least:
            differing.append(
                f"vocabulary: the checkpoint has {low} to {high} tokens, the model {least} to "
                f"{most}"
            )
    if differing:
        listed = "\n  ".join(differing)
        raise CheckpointError(
            f"the checkpoint is of another model:\n  {listed}",
            hint="load one of this model, or set these keys as in the checkpoint",
        )


def _check_mtp_layers(
    content: Manifest, ours: Mapping[str, Any], *, optimizer: bool
) -> Iterator[str]:
    """Compare the layers of multi-token prediction and yield notes. ``optimizer``: whether the
    optimizer state, which covers all layers, is loaded.

    Raises:
        CheckpointError: the checkpoint lacks some of them, or its optimizer has more.
    """
    if not content.get("architecture"):
        return
    saved, current = (record["architecture"].get(MTP_LAYERS) or 0 for record in (content, ours))
    if current > saved:
        raise CheckpointError(
            f"the checkpoint has {saved} layers that predict further tokens, this run {current} "
            f"({MTP_LAYERS})",
            hint=f"set {MTP_LAYERS} as in the checkpoint",
        )
    if saved and not current:
        if optimizer:
            raise CheckpointError(
                f"the checkpoint's optimizer is of {saved} layers that predict further tokens, "
                f"too, and this run has none ({MTP_LAYERS})",
                hint=f"set {MTP_LAYERS}: {saved}, or load the weights alone (no_load_optim: true)",
            )
        yield f"without its {saved} layers that predict further tokens ({MTP_LAYERS} is not set)"


def _check_adapters(content: Manifest, ours: Mapping[str, Any]) -> None:
    saved, current = content.get("adapters"), ours["adapters"]
    if saved and not current:
        raise CheckpointError(
            "the checkpoint holds low-rank adapters alone, and this run trains all weights",
            hint="set peft_type: lora and its keys as in the checkpoint, or merge it into its "
            "model (flagscale convert) and start from that",
        )
    if current and not saved:
        raise CheckpointError(
            "the checkpoint holds a whole model, and this run trains adapters (peft_type: lora)",
            hint="name it as pretrained_checkpoint, and another directory as load",
        )
    if (
        saved
        and current
        and current["sample"]
        and (name := first_differing_weight(saved, current["sample"]))
    ):
        raise CheckpointError(
            f"the checkpoint's adapters are of another model than {current['base']}: {name} "
            "differs",
            hint=f"name theirs as pretrained_checkpoint; it was {saved['base']}",
        )
    differing = [
        f"{name} {saved[name]}, this run's {current[name]}"
        for name in ("rank", "alpha", "targets")
        if saved and current and saved[name] != current[name]
    ]
    if differing:
        raise CheckpointError(
            f"the checkpoint's adapters have {'; '.join(differing)}",
            hint="set lora_dim, lora_alpha and lora_target_modules as in the checkpoint",
        )


def _check_optimizer(content: Manifest, values: Values, ours: Mapping[str, Any]) -> None:
    if not content.get("has_optimizer", True):
        raise CheckpointError(
            "the checkpoint holds no optimizer state: it was saved with no_save_optim",
            hint="no_load_optim: true goes on without it, finetune: true starts from step 0",
        )
    kind = ours["distributed_optimizer"]
    saved = content.get("distributed_optimizer", kind)
    if saved != kind:
        raise CheckpointError(
            f"the checkpoint's optimizer was saved with use_distributed_optimizer: {saved}".lower()
            + f", this run has {kind}".lower(),
            hint=f"set use_distributed_optimizer: {saved}".lower()
            + ", or no_load_optim: true to go on with a fresh optimizer",
        )
    _check_experts(content, values, ours)
    if content.get("precision", ours["precision"]) != ours["precision"]:
        raise CheckpointError(
            f"the checkpoint was trained in {content['precision']}, this run in "
            f"{ours['precision']}: the optimizer's state does not fit",
            hint="no_load_optim: true takes the weights and the progress alone",
        )
    _check_schedule(content, values)


def _check_experts(content: Manifest, values: Values, ours: Mapping[str, Any]) -> None:
    """The experts have a part of the optimizer of their own; in older checkpoints only where they
    lay on several ranks."""
    layout = content.get("layout", ours["layout"])
    apart = content.get("experts_apart", layout.get("expert", 1) > 1 or "layout" not in content)
    if values["num_moe_experts"] and not apart:
        raise CheckpointError(
            "the checkpoint's optimizer was saved by an older version with "
            "expert_model_parallel_size 1, which kept experts and other weights together",
            hint="no_load_optim: true takes the weights and the progress alone",
        )


def _check_schedule(content: Manifest, values: Values) -> None:
    if values["override_opt_param_scheduler"] or values["use_checkpoint_opt_param_scheduler"]:
        return
    if values["skip_train"]:
        return  # evaluation has no schedule
    differing = list(_schedule_differences(content.get("schedule", {}), _schedule_of(values)))
    if differing:
        raise schedule_error("; ".join(differing))


def _schedule_differences(saved: Mapping[str, Any], ours: Mapping[str, Any]) -> Iterator[str]:
    for name, words in SCHEDULE_TERMS.items():
        if name in saved and saved[name] != ours[name]:
            yield f"{words}: the checkpoint has {saved[name]}, the arguments {ours[name]}"


def schedule_error(differing: str) -> CheckpointError:
    """The error where a checkpoint's schedule is not that of the arguments."""
    return CheckpointError(
        f"the checkpoint's learning-rate schedule differs from the arguments': {differing}",
        hint="train.model.override_opt_param_scheduler: true takes the arguments', "
        "train.model.use_checkpoint_opt_param_scheduler: true the checkpoint's",
    )


def needs_checkpoint(values: Values) -> str | None:
    """Return the argument that requires a checkpoint in ``load``; None if training may start
    without one. Arguments that only exclude parts of a checkpoint require none."""
    if values["pretrained_checkpoint"]:
        return None  # which is there, or training does not begin
    names = ("exit_on_missing_checkpoint", "finetune")
    return next((name for name in names if values[name]), None)


def missing_checkpoint(values: Values) -> tuple[str, str | None]:
    """Return the message for a ``load`` without a checkpoint, and a hint if that is an error."""
    load, name = values["load"], needs_checkpoint(values)
    actual = f"{load} holds no checkpoint" if load else "no checkpoint is named"
    if pretrained := values["pretrained_checkpoint"]:
        return f"{actual}; training starts from step 0 with the weights of {pretrained}", None
    if name is None:
        return f"{actual}; training starts from step 0", None
    return f"{actual}, and {name} asks for one", (
        f"set load to the directory of a run's checkpoints; without {name} training would start "
        "from step 0"
    )
