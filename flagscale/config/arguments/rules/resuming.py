"""Compatibility of a run's arguments with the checkpoint that it starts from.

No torch: the preflight applies these rules to a host's description of the checkpoint, and the ranks
apply them before they read any tensor. ``values`` are derived arguments by name (:mod:`..derive`).
``content`` is the manifest of the checkpoint without its list of files. Older manifests lack some
keys, and a checkpoint of Megatron-LM has none; missing and unknown keys are not checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flagscale.config.arguments.compat.huggingface.models import MODEL_FUNCTION, MTP_LAYERS
from flagscale.config.arguments.rules.adapters import describe_adapters, first_differing_weight
from flagscale.config.arguments.rules.optimizer import schedule_lengths, weight_decays
from flagscale.config.arguments.spec.argument import Values
from flagscale.errors import CheckpointError

Manifest = Mapping[str, Any]
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
"""Arguments that determine the weights of a model: if one differs, the checkpoint is of another
model. Sizes that depend on the parallel layout, such as the padded vocabulary, are not included."""
_DEFAULT_FAMILY = "gpt"
"""Family of checkpoints without the key: they were saved when it was the only family."""
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
"""Values that megatron.core's scheduler compares on load: their keys, and their names in its
messages."""


@dataclass(frozen=True)
class PartsToLoad:
    """Parts of a checkpoint to load in addition to the weights, and notes on parts left out."""

    optimizer: bool
    progress: bool
    rng: bool
    notes: tuple[str, ...]


def describe_arguments(values: Values, world_size: int) -> dict[str, Any]:
    """Return the part of a checkpoint's manifest that follows from the arguments of the run that
    saves it."""
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
    """Return the known values on which a checkpoint and a run that loads it must agree."""
    recorded = {name: values[name] for name in _ARCHITECTURE if name in values}
    recorded[MTP_LAYERS] = values.get(MTP_LAYERS) or None
    return {name: value for name, value in recorded.items() if _is_plain(value)}


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def _layout_of(values: Values, world_size: int) -> dict[str, int | str]:
    """Return the sizes that determine which rank generates which random numbers."""
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
    """Return the schedule of the arguments, with the keys of :data:`SCHEDULE_TERMS`."""
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
    """Return the parts of a checkpoint that a run loads.

    Args:
        content: manifest of the checkpoint.
        values: derived arguments of the run by name.
        world_size: number of ranks of the run.
        vocabulary: minimum and maximum vocabulary size that is padded to the size of the run's
            embedding; None if unknown.

    Raises:
        CheckpointError: the checkpoint is of another model, or its optimizer or schedule differs.
    """
    current = describe_arguments(values, world_size)
    _check_model(content, current, vocabulary)
    _check_adapters(content, current)
    optimizer = not (values["finetune"] or values["no_load_optim"])
    notes = list(_check_mtp_layers(content, current, optimizer=optimizer))
    if values["finetune"]:
        notes.append("weights only (finetune); training starts from step 0")
        return PartsToLoad(optimizer=False, progress=False, rng=False, notes=tuple(notes))
    if optimizer:
        _check_optimizer(content, values, current)
    else:
        notes.append("without optimizer and schedule (no_load_optim)")
    rng = not values["no_load_rng"] and bool(content.get("has_rng", False))
    if rng and content.get("layout") != current["layout"]:
        rng = False
        notes.append(
            "without random number generator states, because the parallel layout changed; "
            "generators start from the seed"
        )
    return PartsToLoad(optimizer=optimizer, progress=True, rng=rng, notes=tuple(notes))


def _check_model(
    content: Manifest, description: Mapping[str, Any], vocabulary: Sequence[int] | None
) -> None:
    saved: Mapping[str, Any] = content.get("architecture", {})
    if saved:
        saved = {"family": _DEFAULT_FAMILY, **saved}
    current = description["architecture"]
    differences = [
        f"{name}: the checkpoint has {saved[name]!r}, the run {current[name]!r}"
        for name in saved
        if None not in (saved[name], current.get(name)) and saved[name] != current[name]
    ]
    # megatron.core would load a smaller embedding into a larger one and not initialize the rest.
    if vocabulary is not None:
        minimum, maximum = vocabulary
        saved_minimum, saved_maximum = content.get("vocabulary", vocabulary)
        if maximum < saved_minimum or saved_maximum < minimum:
            differences.append(
                f"vocabulary: the checkpoint has {saved_minimum} to {saved_maximum} tokens, the "
                f"run {minimum} to {maximum}"
            )
    if differences:
        listed = "\n  ".join(differences)
        raise CheckpointError(
            f"the checkpoint is of another model:\n  {listed}",
            hint="set these keys as in the checkpoint, or load a checkpoint of this model",
        )


def _check_mtp_layers(
    content: Manifest, run_description: Mapping[str, Any], *, optimizer: bool
) -> Iterator[str]:
    """Compare the layers of multi-token prediction and yield notes.

    Args:
        content: manifest of the checkpoint.
        run_description: description of the run (:func:`describe_arguments`).
        optimizer: the optimizer state, which covers all layers, is loaded.

    Raises:
        CheckpointError: the checkpoint has fewer such layers than the run, or its optimizer has
            more.
    """
    if not content.get("architecture"):
        return
    saved, current = (
        description["architecture"].get(MTP_LAYERS) or 0
        for description in (content, run_description)
    )
    if current > saved:
        raise CheckpointError(
            f"the checkpoint has {saved} multi-token prediction layers, this run {current} "
            f"({MTP_LAYERS})",
            hint=f"set {MTP_LAYERS} as in the checkpoint",
        )
    if saved and not current:
        if optimizer:
            raise CheckpointError(
                f"the checkpoint's optimizer state includes {saved} multi-token prediction layers, "
                f"this run has none ({MTP_LAYERS})",
                hint=f"set {MTP_LAYERS}: {saved}, or load the weights only (no_load_optim: true)",
            )
        yield f"without its {saved} multi-token prediction layers ({MTP_LAYERS} is not set)"


def _check_adapters(content: Manifest, run_description: Mapping[str, Any]) -> None:
    saved, current = content.get("adapters"), run_description["adapters"]
    if saved and not current:
        raise CheckpointError(
            "the checkpoint contains low-rank adapters only, but this run trains all weights",
            hint="set peft_type: lora and its keys as in the checkpoint, or merge the adapters "
            "into their base model (flagscale convert) and start from the result",
        )
    if current and not saved:
        raise CheckpointError(
            "the checkpoint contains a whole model, but this run trains adapters (peft_type: lora)",
            hint="set pretrained_checkpoint to it, and load to another directory",
        )
    if (
        saved
        and current
        and current["sample"]
        and (name := first_differing_weight(saved, current["sample"]))
    ):
        raise CheckpointError(
            f"the checkpoint's adapters have another base model than {current['base']}: {name} "
            "differs",
            hint=f"set pretrained_checkpoint to their base model; it was {saved['base']}",
        )
    differences = [
        f"{name} {saved[name]}, this run {current[name]}"
        for name in ("rank", "alpha", "targets")
        if saved and current and saved[name] != current[name]
    ]
    if differences:
        raise CheckpointError(
            f"the checkpoint's adapters have {'; '.join(differences)}",
            hint="set lora_dim, lora_alpha and lora_target_modules as in the checkpoint",
        )


_WITHOUT_OPTIMIZER_HINT = "no_load_optim: true continues with a new optimizer state"


def _check_optimizer(content: Manifest, values: Values, run_description: Mapping[str, Any]) -> None:
    if not content.get("has_optimizer", True):
        raise CheckpointError(
            "the checkpoint contains no optimizer state: it was saved with no_save_optim",
            hint=f"{_WITHOUT_OPTIMIZER_HINT}, finetune: true starts from step 0",
        )
    is_distributed = run_description["distributed_optimizer"]
    saved = content.get("distributed_optimizer", is_distributed)
    if saved != is_distributed:
        raise CheckpointError(
            f"the checkpoint's optimizer was saved with use_distributed_optimizer: {saved}".lower()
            + f", this run has {is_distributed}".lower(),
            hint=f"set use_distributed_optimizer: {saved}".lower()
            + f"; or {_WITHOUT_OPTIMIZER_HINT}",
        )
    _check_experts(content, values, run_description)
    precision = run_description["precision"]
    if content.get("precision", precision) != precision:
        raise CheckpointError(
            f"the checkpoint's optimizer state is of {content['precision']} training, this run "
            f"trains in {precision}",
            hint=_WITHOUT_OPTIMIZER_HINT,
        )
    _check_schedule(content, values)


def _check_experts(content: Manifest, values: Values, run_description: Mapping[str, Any]) -> None:
    """Check that the optimizer state of experts is separate from that of other weights. In older
    checkpoints it is so only with expert parallelism."""
    layout = content.get("layout", run_description["layout"])
    is_separate = content.get(
        "experts_apart", layout.get("expert", 1) > 1 or "layout" not in content
    )
    if values["num_moe_experts"] and not is_separate:
        raise CheckpointError(
            "the checkpoint's optimizer state was saved by an older version with "
            "expert_model_parallel_size 1, which did not separate experts from other weights",
            hint=_WITHOUT_OPTIMIZER_HINT,
        )


def _check_schedule(content: Manifest, values: Values) -> None:
    if values["override_opt_param_scheduler"] or values["use_checkpoint_opt_param_scheduler"]:
        return
    if values["skip_train"]:
        return  # evaluation has no schedule
    differences = list(_schedule_differences(content.get("schedule", {}), _schedule_of(values)))
    if differences:
        raise schedule_error("; ".join(differences))


def _schedule_differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> Iterator[str]:
    for key, term in SCHEDULE_TERMS.items():
        if key in saved and saved[key] != current[key]:
            yield f"{term}: the checkpoint has {saved[key]}, the arguments {current[key]}"


def schedule_error(differences: str) -> CheckpointError:
    """Return the error for a checkpoint whose schedule differs from that of the arguments."""
    return CheckpointError(
        f"the checkpoint's learning-rate schedule differs from the arguments: {differences}",
        hint="train.model.override_opt_param_scheduler: true uses the schedule of the arguments, "
        "train.model.use_checkpoint_opt_param_scheduler: true that of the checkpoint",
    )


def needs_checkpoint(values: Values) -> str | None:
    """Return the argument that requires a checkpoint in ``load``; None if training may start
    without a checkpoint. Arguments that only exclude parts of a checkpoint require none."""
    if values["pretrained_checkpoint"]:
        return None  # training starts from these weights, whose existence is checked elsewhere
    names = ("exit_on_missing_checkpoint", "finetune")
    return next((name for name in names if values[name]), None)


def missing_checkpoint(values: Values) -> tuple[str, str | None]:
    """Return the message about a ``load`` without a checkpoint, and a hint if that is an error."""
    load, name = values["load"], needs_checkpoint(values)
    actual = f"{load} contains no checkpoint" if load else "load is not set"
    if pretrained := values["pretrained_checkpoint"]:
        return f"{actual}; training starts from step 0 with the weights of {pretrained}", None
    if name is None:
        return f"{actual}; training starts from step 0", None
    return f"{actual}, but {name} requires a checkpoint", (
        f"set load to the checkpoint directory of a run; without {name}, training starts from step "
        "0"
    )
