"""What must hold between the arguments of this project's training program.

Pure, and free of torch: the launcher applies the rules before anything starts, and the training
program applies them again, since it can be started by hand. What megatron.core cannot do without
Transformer Engine or Apex, or does silently wrong, is refused here with its reason.

``values`` are arguments by name, aliases folded, defaults filled in. A broken rule is the name of
the argument to change and what is wrong with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from flagscale.config.arguments import (
    adapters,
    architecture,
    bounded,
    conversations,
    devices,
    external,
    fallbacks,
    families,
    graphs,
    growth,
    heads,
    idle,
    latent,
    layout,
    mixtures,
    mtp,
    phases,
    precision,
    schedule,
)
from flagscale.config.arguments.huggingface.models import config_of
from flagscale.config.arguments.precision import Broken, Values
from flagscale.config.arguments.values import shown
from flagscale.errors import CheckpointError

_NOT_RECOMPUTED: Mapping[str, str] = {
    "layernorm": "needs Transformer Engine",
    "moe_act": "needs Transformer Engine's grouped experts",
    "mla_up_proj": "needs a checkpoint inside multi-latent attention, which is not built",
}
_LOCAL_ATTENTION: Mapping[str, Any] = {
    "softmax_type": "vanilla",
    "qk_clip": False,
    "log_max_attention_logit": False,
}
"""What torch's scaled_dot_product_attention cannot do, and the values that ask for nothing."""

weight_decays = schedule.weight_decays  # the training program takes it from here

OPTIMIZER_DTYPES = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
"""Precisions of the optimizer's state, which only Transformer Engine's optimizer can lower."""


def broken(values: Values) -> list[Broken]:
    """Rules that do not depend on the number of ranks. Where arguments are missing that the others
    are measured by, only those are told."""
    missing = list(_required(values))
    if missing:
        return missing
    refused = list(fallbacks.broken(values))
    values = fallbacks.settled(values)
    rules = (
        devices.known,
        bounded.broken,
        families.broken,
        _unsupported,
        idle.broken,
        _not_built,
        graphs.broken,
        _attention,
        architecture.broken,
        heads.broken,
        mixtures.broken,
        mtp.broken,
        latent.broken,
        _documents,
        conversations.broken,
        external.broken,
        adapters.broken,
        precision.precision,
        precision.compiled_only,
        precision.eight_bits,
        layout.broken,
        _exported,
        _length,
        growth.broken,
        phases.broken,
        _overlap,
        _profiling,
        schedule.broken,
        _split,
        _tokenizer,
    )
    return refused + [found for rule in rules for found in rule(values)]


def needs_checkpoint(values: Values) -> str | None:
    """The argument that asks for a checkpoint in ``load``; None where training may start without
    one. To leave out a part of it, should there be one, asks for nothing.
    """
    if values["pretrained_checkpoint"]:
        return None  # which is there, or training does not begin
    names = ("exit_on_missing_checkpoint", "finetune")
    return next((name for name in names if values[name]), None)


def missing_checkpoint(values: Values) -> tuple[str, str | None]:
    """What is to be said where ``load`` holds no checkpoint, and a hint where that is an error."""
    load, name = values["load"], needs_checkpoint(values)
    found = f"{load} holds no checkpoint" if load else "no checkpoint is named"
    if pretrained := values["pretrained_checkpoint"]:
        return f"{found}; training starts from step 0 with the weights of {pretrained}", None
    if name is None:
        return f"{found}; training starts from step 0", None
    return f"{found}, and {name} asks for one", (
        f"set load to the directory of a run's checkpoints; without {name} training would start "
        "from step 0"
    )


def _required(values: Values) -> Iterator[Broken]:
    for name in ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "lr"):
        if values[name] is None:
            yield name, "is required"


def _unsupported(values: Values) -> Iterator[Broken]:
    for name in OPTIMIZER_DTYPES:
        if str(values.get(name) or "fp32").rpartition(".")[2] not in ("fp32", "float32"):
            yield name, f"{values[name]!r} needs Transformer Engine's optimizer; leave it out"
    if values["optimizer"] not in ("adam", "sgd"):
        yield "optimizer", f"{values['optimizer']!r}: expected 'adam' or 'sgd'"
    if values["optimizer"] == "sgd" and values["use_distributed_optimizer"]:
        yield "optimizer", "sgd with use_distributed_optimizer: megatron.core shards Adam alone"
    for other in ("swiglu", "squared_relu"):
        if values["openai_gelu"] and values[other]:
            yield "openai_gelu", f"excludes {other}: an MLP has one function"


def _not_built(values: Values) -> Iterator[Broken]:
    if values["cross_entropy_fusion_impl"] == "te":
        yield "cross_entropy_fusion_impl", "te needs Transformer Engine; native fuses without it"
    instances = values["num_distributed_optimizer_instances"]
    if instances > 1:
        message = f"{instances}: the optimizer here is sharded over all data-parallel ranks; use 1"
        yield "num_distributed_optimizer_instances", message
    if values["recompute_granularity"] == "selective":
        for name in values["recompute_modules"] or ():
            if name in _NOT_RECOMPUTED:
                yield "recompute_modules", f"{name} {_NOT_RECOMPUTED[name]}"


def _attention(values: Values) -> Iterator[Broken]:
    if values["attention_backend"] == "local":
        return
    for name, nothing in _LOCAL_ATTENTION.items():
        if (values[name] or nothing) != nothing:
            yield (
                name,
                f"{shown(values[name])} is not possible with scaled_dot_product_attention; "
                "attention_backend: local takes megatron.core's own attention",
            )


def _documents(values: Values) -> Iterator[Broken]:
    """What attention can be kept within documents."""
    if not values["reset_attention_mask"]:
        return
    if values["window_size"] and values["attention_backend"] == "local":
        yield (
            "window_size",
            f"{shown(values['window_size'])} with reset_attention_mask: megatron.core's own "
            "attention makes the window's mask itself, and passes over that of documents; take "
            "attention_backend: auto",
        )
    if values["attention_backend"] == "fused":
        yield (
            "attention_backend",
            "fused: cuDNN's kernel takes no documents (reset_attention_mask); take auto or flash",
        )


def _exported(values: Values) -> Iterator[Broken]:
    """What is trained can be said by a config.json, and its adapters to peft."""
    for_peft = values["peft_type"] and values["export_peft"]
    if not values["export_huggingface"] and not for_peft:
        return
    longest = values["max_position_embeddings"] or values["seq_length"]
    known = {**values, "vocab_size": values["vocab_size"] or 1, "max_position_embeddings": longest}
    wanted = [name for name in ("export_huggingface", "export_peft") if values[name]]
    try:
        kind = config_of(known)["model_type"]
    except CheckpointError as error:
        yield wanted[0], error.message
        return
    if for_peft and (reason := adapters.NOT_FOR_PEFT.get(kind)):
        yield (
            "export_peft",
            f"adapters of {kind} are not written for peft: {reason}; leave it out, and take "
            "export_huggingface, which merges them",
        )


def _length(values: Values) -> Iterator[Broken]:
    iters, samples = values["train_iters"], values["train_samples"]
    if (iters is None) == (samples is None):
        found = "neither" if iters is None else "both"
        name = "train_iters" if iters is None else "train_samples"
        yield name, f"give either train_iters or train_samples, found {found}"
    longest = values["max_position_embeddings"]
    if longest is not None and longest < values["seq_length"]:
        yield (
            "max_position_embeddings",
            f"{longest} is less than seq_length {values['seq_length']}",
        )


def _overlap(values: Values) -> Iterator[Broken]:
    if values["overlap_param_gather"] and not values["use_distributed_optimizer"]:
        yield "overlap_param_gather", "needs use_distributed_optimizer"
    elif values["overlap_param_gather"] and not values["overlap_grad_reduce"]:
        yield "overlap_param_gather", "needs overlap_grad_reduce"


def _profiling(values: Values) -> Iterator[Broken]:
    first, end = values["profile_step_start"], values["profile_step_end"]
    if values["profile"] and end <= first:
        yield "profile_step_end", f"{end} is not after profile_step_start {first}"


def split_shares(text: str) -> tuple[float, float, float] | None:
    """Shares of training, validation and test of a ``split`` such as ``969,30,1``, which sum to 1;
    None unless they are one to three numbers of at least 0 with a positive sum."""
    try:
        shares = [float(part) for part in text.replace("/", ",").split(",") if part.strip()]
    except ValueError:
        return None
    shares += [0.0] * (3 - len(shares))
    if len(shares) != 3 or not all(math.isfinite(share) and share >= 0 for share in shares):
        return None
    total = sum(shares)
    return (shares[0] / total, shares[1] / total, shares[2] / total) if total > 0 else None


def _split(values: Values) -> Iterator[Broken]:
    text = values["split"]
    if text and split_shares(text) is None:
        yield (
            "split",
            f"expected up to three numbers for training, validation and test, such as 969,30,1, "
            f"found {text!r}",
        )


def _tokenizer(values: Values) -> Iterator[Broken]:
    if values["tokenizer_type"] == "AquilaTokenizerFS":
        for name in ("tokenizer_path", "merge_file", "special_tokens_file"):
            if values[name] is None:
                yield name, "is required by tokenizer_type AquilaTokenizerFS"
