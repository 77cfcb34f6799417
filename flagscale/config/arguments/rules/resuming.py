"""Compatibility of a run's arguments with the checkpoint that it starts from.

No torch: the preflight applies these rules to a host's description of the checkpoint, and the ranks
apply them before they read any tensor. ``values`` are derived arguments by name (:mod:`..derive`).
``content`` is the manifest of the checkpoint without its list of files. Older manifests lack some
keys, and a checkpoint of Megatron-LM has none; missing and unknown keys are not checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flagscale.config.arguments.compat.huggingface.models import MTP_LAYERS, effective
from flagscale.config.arguments.rules.adapters import describe_adapters, first_differing_weight
from flagscale.config.arguments.rules.freezing import describe_freezing, freezing_differences
from flagscale.config.arguments.rules.muon import hyperparameter_names, optimizer_kind
from flagscale.config.arguments.rules.optimizer import schedule_lengths, weight_decays
from flagscale.config.arguments.rules.optimizer_states import OPTIMIZER_DTYPES, model_format
from flagscale.config.arguments.rules.resume_effects import (
    FUNCTION,
    RECORDED,
    WEIGHTS_KEPT,
    Effect,
    resume_effects,
)
from flagscale.config.arguments.spec.argument import Values
from flagscale.config.arguments.spec.values import format_value
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
"""Arguments of the model that manifests of all versions record; older ones lack the others of
:data:`FUNCTION`. Sizes that depend on the parallel layout, such as the padded vocabulary, are not
included."""
_DEFAULT_FAMILY = "gpt"
"""Family of checkpoints without the key: they were saved when it was the only family."""
WEIGHTS_ONLY = "weights only (finetune); training starts from step 0"
"""Note of a run with ``finetune``."""
SCHEDULE_TERMS: Mapping[str, str] = {
    "max_lr": "learning rate (lr)",
    "min_lr": "minimum learning rate (min_lr)",
    "decoupled_lr": "learning rate of embedding and output layer (decoupled_lr)",
    "decoupled_min_lr": "minimum learning rate of embedding and output layer (decoupled_min_lr)",
    "init_lr": "learning rate at the start of the warm-up (lr_warmup_init)",
    "lr_warmup_steps": "length of the warm-up in samples (lr_warmup_iters x global_batch_size, "
    "lr_warmup_samples, lr_warmup_fraction)",
    "lr_decay_steps": "length of the decay in samples (lr_decay_iters x global_batch_size or "
    "lr_decay_samples; without them train_iters or train_samples)",
    "lr_decay_style": "shape of the decay (lr_decay_style)",
    "wsd_decay_steps": "length of the final phase of WSD in samples (lr_wsd_decay_iters x "
    "global_batch_size, lr_wsd_decay_samples)",
    "lr_wsd_decay_style": "shape of the final phase of WSD (lr_wsd_decay_style)",
    "start_wd": "initial weight decay (weight_decay, start_weight_decay)",
    "end_wd": "final weight decay (weight_decay, end_weight_decay)",
    "wd_incr_steps": "length of the change of weight decay in samples (train_iters x "
    "global_batch_size, train_samples)",
    "wd_incr_style": "shape of the change of weight decay (weight_decay_incr_style)",
    "adam_beta1": "adam_beta1",
    "adam_beta2": "adam_beta2",
    "adam_eps": "adam_eps",
    "lion_beta1": "lion_beta1",
    "lion_beta2": "lion_beta2",
    "sgd_momentum": "sgd_momentum",
}
"""Hyperparameters of the optimizer and its schedule, with their names in messages. Keys of the
schedule are attributes of megatron.core's scheduler."""


@dataclass(frozen=True)
class PartsToLoad:
    """Parts of a checkpoint to load in addition to the weights.

    Attributes:
        optimizer: whether to load the state of optimizer and schedule.
        progress: whether to load step and data position.
        rng: whether to load the states of the random number generators.
        notes: messages on parts left out and on differences from the checkpoint.
        kept_schedule: hyperparameters of the checkpoint that replace those of the arguments, with
            keys of :data:`SCHEDULE_TERMS`.
    """

    optimizer: bool
    progress: bool
    rng: bool
    notes: tuple[str, ...]
    kept_schedule: Mapping[str, Any] = field(default_factory=dict)


def describe_arguments(values: Values, world_size: int) -> dict[str, Any]:
    """Return the part of a checkpoint's manifest that follows from the arguments of the run that
    saves it."""
    return {
        "architecture": architecture(values),
        "model": {name: values[name] for name in FUNCTION if name in values},
        "arguments": _recorded_arguments(values),
        "layout": _layout_of(values, world_size),
        "adapters": describe_adapters(values),
        "precision": model_format(values),
        "distributed_optimizer": bool(values["use_distributed_optimizer"]),
        "experts_apart": True,
        "freezing": describe_freezing(values),
        "has_optimizer": not values["no_save_optim"],
        "has_rng": not values["no_save_rng"],
    }


def architecture(values: Values) -> dict[str, Any]:
    """Return the arguments of the model that manifests of all versions record."""
    recorded = {name: values[name] for name in _ARCHITECTURE if name in values}
    recorded[MTP_LAYERS] = values.get(MTP_LAYERS) or None
    return {name: value for name, value in recorded.items() if _is_plain(value)}


def _recorded_arguments(values: Values) -> dict[str, Any]:
    """Return the arguments whose changes a later run notes, as JSON represents them."""
    return {
        name: list(values[name]) if isinstance(values[name], tuple) else values[name]
        for name, effect in resume_effects().items()
        if effect in RECORDED and name in values
    }


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


def _schedule_of(values: Values) -> dict[str, Any]:
    """Return the hyperparameters of the arguments, with keys of :data:`SCHEDULE_TERMS`."""
    start, end = weight_decays(values)
    decoupled_lr, decoupled_min_lr = values["decoupled_lr"], None
    if decoupled_lr is not None:
        decoupled_min_lr = values["decoupled_min_lr"]
        if decoupled_min_lr is None:
            decoupled_min_lr = values["min_lr"]
    return {
        **schedule_lengths(values),
        **{name: values[name] for name in hyperparameter_names(values)},
        "max_lr": values["lr"],
        "min_lr": values["min_lr"],
        "decoupled_lr": decoupled_lr,
        "decoupled_min_lr": decoupled_min_lr,
        "init_lr": values["lr_warmup_init"],
        "lr_decay_style": values["lr_decay_style"],
        "lr_wsd_decay_style": values["lr_wsd_decay_style"],
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
        CheckpointError: the checkpoint is of another model, its optimizer differs, or its
            hyperparameters differ and the user has not chosen.
    """
    current = describe_arguments(values, world_size)
    notes = list(_check_model(content, values, current, vocabulary))
    _check_adapters(content, current)
    optimizer = loads_optimizer(values)
    notes += _check_mtp_layers(content, current, optimizer=optimizer)
    if values["finetune"]:
        notes.append(WEIGHTS_ONLY)
        return PartsToLoad(optimizer=False, progress=False, rng=False, notes=tuple(notes))
    kept_schedule: Mapping[str, Any] = {}
    if optimizer:
        _check_optimizer(content, values, current)
        kept_schedule, schedule_notes = _choose_schedule(content.get("schedule", {}), values)
        notes += schedule_notes
    else:
        reason = "no_load_optim" if values["no_load_optim"] else "skip_train"
        notes.append(f"without optimizer and schedule ({reason})")
    rng = not values["no_load_rng"] and bool(content.get("has_rng", False))
    if rng and content.get("layout") != current["layout"]:
        rng = False
        notes.append(
            "without random number generator states, because the parallel layout changed; "
            "generators start from the seed"
        )
    if not values["skip_train"]:
        recorded = content.get("arguments", {})
        notes += _note_changes(recorded, current["arguments"], optimizer=optimizer)
    return PartsToLoad(
        optimizer=optimizer,
        progress=True,
        rng=rng,
        notes=tuple(notes),
        kept_schedule=kept_schedule,
    )


def loads_optimizer(values: Values) -> bool:
    """Return whether a run needs the optimizer state of the checkpoint. Evaluation does not."""
    return not (values["finetune"] or values["no_load_optim"] or values["skip_train"])


_CHANGE_NOTES: Mapping[Effect, str] = {
    Effect.STATES: "the optimizer's states are converted, rounded to nearest: {}",
    Effect.TRAINING: "changed since the checkpoint: {}",
    Effect.DATA: "data changed since the checkpoint: {}; the position in it is kept, so samples "
    "may be repeated or left out",
    Effect.START: "changed since the checkpoint, without effect on a resumed run: {}",
}


def _note_changes(
    recorded: Mapping[str, Any], current: Mapping[str, Any], *, optimizer: bool
) -> Iterator[str]:
    """Yield a note for each effect of arguments that differ from those of the checkpoint.

    Args:
        recorded: arguments that the checkpoint records. Older ones had fp32 states.
        current: arguments of the run.
        optimizer: whether the optimizer's state is loaded.
    """
    saved = {**dict.fromkeys(OPTIMIZER_DTYPES, "fp32"), **recorded}
    for effect, text in _CHANGE_NOTES.items():
        if effect is Effect.STATES and not optimizer:
            continue
        changes = [
            f"{name} from {format_value(saved[name])} to {format_value(value)}"
            for name, value in current.items()
            if resume_effects()[name] is effect and name in saved and saved[name] != value
        ]
        if changes:
            yield text.format(", ".join(changes))


def _check_model(
    content: Manifest,
    values: Values,
    description: Mapping[str, Any],
    vocabulary: Sequence[int] | None,
) -> Iterator[str]:
    """Compare the model of a checkpoint with that of the run.

    Yields:
        a note on a function that differs although the weights fit, with ``finetune``.

    Raises:
        CheckpointError: weights or, without ``finetune``, the function differ.
    """
    changes = dict(_model_changes(content, values, description["architecture"]))
    kept = [name for name in changes if name in WEIGHTS_KEPT]
    differences = [
        f"{name}: the checkpoint has {saved!r}, the run {current!r}"
        for name, (saved, current) in changes.items()
        if not (values["finetune"] and name in WEIGHTS_KEPT)
    ]
    # megatron.core would load a smaller embedding into a larger one and not initialize the rest.
    if vocabulary is not None:
        minimum, maximum = vocabulary
        saved_minimum, saved_maximum = content.get("vocabulary", vocabulary)
        if maximum < saved_minimum or saved_maximum < minimum:
            differences.append(
                f"vocabulary: the checkpoint has {saved_minimum} to {saved_maximum} tokens, the "
                f"run {minimum} to {maximum} (vocab_size, make_vocab_size_divisible_by)"
            )
    if differences:
        listed = "\n  ".join(differences)
        hint = "set these keys as in the checkpoint, or load a checkpoint of this model"
        if len(kept) == len(differences):
            hint = (
                "set these keys as in the checkpoint; finetune: true starts from step 0 with its "
                "weights and these keys as they are"
            )
        raise CheckpointError(f"the checkpoint is of another model:\n  {listed}", hint=hint)
    if kept:
        listed = ", ".join(f"{name} from {changes[name][0]} to {changes[name][1]}" for name in kept)
        yield f"its weights with another function: {listed}"


_UNKNOWN_IF_NONE = ("vocab_size", MTP_LAYERS)
"""Arguments of which None is not compared: the tokenizer decides, or :func:`_check_mtp_layers`."""


def _model_changes(
    content: Manifest, values: Values, architecture_of_run: Mapping[str, Any]
) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yield the names of arguments of the model that differ, with both values.

    Every argument of :data:`FUNCTION` that the checkpoint records is compared in effective form.
    Of an older checkpoint, only the architecture is known.
    """
    recorded: Mapping[str, Any] = content.get("model", {})
    if recorded:
        saved_model, model = _comparable_model(recorded), _comparable_model(values)
        for name in FUNCTION:
            saved, current = saved_model[name], model[name]
            is_unknown = name in _UNKNOWN_IF_NONE and None in (saved, current)
            if name in recorded and saved != current and not is_unknown:
                yield name, (saved, current)
    saved_architecture: Mapping[str, Any] = content.get("architecture", {})
    if saved_architecture:
        saved_architecture = {"family": _DEFAULT_FAMILY, **saved_architecture}
    for name, saved in saved_architecture.items():
        current = architecture_of_run.get(name)
        if name not in recorded and None not in (saved, current) and saved != current:
            yield name, (saved, current)


def _comparable_model(values: Values) -> dict[str, Any]:
    """Return the arguments of :data:`FUNCTION`. Values without effect are the defaults, and
    sequences are lists."""
    model = effective(values)
    if model["position_embedding_type"] != "learned_absolute":
        model["max_position_embeddings"] = None
    has_shared_experts = model["moe_shared_expert_intermediate_size"] is not None
    gate = "moe_shared_expert_gate"
    model[gate] = has_shared_experts and bool(values.get(gate))
    return {
        name: list(value) if isinstance(value, tuple) else value for name, value in model.items()
    }


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
    optimizer = optimizer_kind(values)
    if (saved_optimizer := content.get("optimizer", optimizer)) != optimizer:
        raise CheckpointError(
            f"the checkpoint's optimizer is {saved_optimizer}, this run's is {optimizer} "
            "(optimizer), and neither can use the other's state",
            hint=f"set optimizer: {saved_optimizer}; or {_WITHOUT_OPTIMIZER_HINT}",
        )
    if differences := freezing_differences(content.get("freezing"), run_description["freezing"]):
        raise CheckpointError(
            "the checkpoint's optimizer state is of other parameters, because others were frozen: "
            f"{differences}",
            hint=f"set freeze_parameters and trainable_parameters as in the checkpoint; or "
            f"{_WITHOUT_OPTIMIZER_HINT}",
        )
    precision = run_description["precision"]
    if content.get("precision", precision) != precision:
        raise CheckpointError(
            f"the checkpoint's optimizer state is of {content['precision']} training, this run "
            f"trains in {precision}",
            hint=_WITHOUT_OPTIMIZER_HINT,
        )


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


def _choose_schedule(
    saved: Mapping[str, Any], values: Values
) -> tuple[Mapping[str, Any], Sequence[str]]:
    """Choose between the hyperparameters of a checkpoint and those of the arguments.

    Args:
        saved: hyperparameters of the checkpoint, with keys of :data:`SCHEDULE_TERMS`.
        values: derived arguments of the run by name.

    Returns:
        The hyperparameters of the checkpoint that replace those of the arguments, and notes.

    Raises:
        CheckpointError: they differ, and the user has not chosen.
    """
    current = _schedule_of(values)
    unused = _terms_without_effect(saved) & _terms_without_effect(current)
    differing = [
        key
        for key in SCHEDULE_TERMS
        if key in saved and key in current and key not in unused and saved[key] != current[key]
    ]
    if not differing:
        return {}, ()
    listed = "; ".join(
        f"{SCHEDULE_TERMS[key]}: the checkpoint has {format_value(saved[key])}, the arguments "
        f"{format_value(current[key])}"
        for key in differing
    )
    if values["override_opt_param_scheduler"]:
        return {}, (
            f"with the arguments' hyperparameters (override_opt_param_scheduler): {listed}",
        )
    if not values["use_checkpoint_opt_param_scheduler"]:
        raise CheckpointError(
            f"the hyperparameters of the checkpoint differ from the arguments: {listed}",
            hint="train.model.override_opt_param_scheduler: true uses the values of the arguments, "
            "train.model.use_checkpoint_opt_param_scheduler: true those of the checkpoint",
        )
    if saved.get("decoupled_lr") is not None and current["decoupled_lr"] is None:
        raise CheckpointError(
            f"the checkpoint's {SCHEDULE_TERMS['decoupled_lr']} is {saved['decoupled_lr']}, the "
            "arguments have none, and use_checkpoint_opt_param_scheduler cannot add it",
            hint=f"set decoupled_lr: {saved['decoupled_lr']}",
        )
    note = f"with the checkpoint's hyperparameters (use_checkpoint_opt_param_scheduler): {listed}"
    return {key: saved[key] for key in differing}, (note,)


def _terms_without_effect(schedule: Mapping[str, Any]) -> set[str]:
    """Return the keys of :data:`SCHEDULE_TERMS` that do not influence a schedule."""
    keys: set[str] = set()
    if schedule.get("lr_decay_style") == "constant":
        keys |= {"min_lr", "decoupled_min_lr", "lr_decay_steps"}
    if schedule.get("lr_decay_style") != "WSD":
        keys |= {"wsd_decay_steps", "lr_wsd_decay_style"}
    if schedule.get("wd_incr_style") == "constant":
        keys.add("wd_incr_steps")
    if not schedule.get("lr_warmup_steps"):
        keys.add("init_lr")
    return keys


def needs_checkpoint(values: Values) -> str | None:
    """Return the argument that requires a checkpoint in ``load``; None if training may start
    without a checkpoint. Arguments that only exclude parts of a checkpoint require none."""
    if values["pretrained_checkpoint"]:
        return None  # training starts from these weights, whose existence is checked elsewhere
    names = ("exit_on_missing_checkpoint", "finetune", "skip_train")
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
