"""All rules between arguments of this project's training program: :func:`check_values`.

Pure, no torch: the launcher applies the rules before anything starts, and the training program
applies them again, since it can be started by hand. Values that megatron.core cannot do without
Transformer Engine or Apex, or does wrongly without an error, are refused with the reason.

``values`` are arguments by name, aliases resolved, defaults filled in. A violation is the name of
the argument to change and a description of the problem.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from flagscale.config.arguments.compat.huggingface.models import config_of
from flagscale.config.arguments.compat.substitutions import apply_substitutions, check_substitutions
from flagscale.config.arguments.compat.unused import check_refused
from flagscale.config.arguments.layout import check_layout
from flagscale.config.arguments.rules.adapters import UNSUPPORTED_BY_PEFT, check_adapters
from flagscale.config.arguments.rules.attention import (
    check_attention,
    check_documents,
    check_latent_attention,
    check_layer_options,
    check_local_attention,
)
from flagscale.config.arguments.rules.data import (
    check_conversations,
    check_data_phases,
    check_external_data,
    check_split_text,
    check_tokenizer,
)
from flagscale.config.arguments.rules.model_family import check_family
from flagscale.config.arguments.rules.moe import check_moe
from flagscale.config.arguments.rules.multi_token_prediction import check_mtp
from flagscale.config.arguments.rules.optimizer import (
    check_bounded_all_reduce,
    check_cuda_graphs,
    check_optimizer,
    check_overlap,
)
from flagscale.config.arguments.rules.precision import (
    check_compiled_only,
    check_device,
    check_fp8,
    check_precision,
)
from flagscale.config.arguments.rules.schedule import check_batch_size_rampup, check_schedule
from flagscale.config.arguments.spec.argument import Values, Violation
from flagscale.errors import CheckpointError

_NOT_RECOMPUTED: Mapping[str, str] = {
    "layernorm": "needs Transformer Engine",
    "moe_act": "needs Transformer Engine's grouped experts",
    "mla_up_proj": "needs a checkpoint inside multi-latent attention, which is not built",
}


def check_values(values: Values) -> list[Violation]:
    """Return the violations that do not depend on the number of ranks. If required arguments are
    missing, only those are reported, because the other rules need them."""
    missing = list(_check_required(values))
    if missing:
        return missing
    refused = list(check_substitutions(values))
    values = apply_substitutions(values)
    rules = (
        check_device,
        check_bounded_all_reduce,
        check_family,
        check_optimizer,
        check_refused,
        _check_not_built,
        check_cuda_graphs,
        check_local_attention,
        check_layer_options,
        check_attention,
        check_moe,
        check_mtp,
        check_latent_attention,
        check_documents,
        check_conversations,
        check_external_data,
        check_adapters,
        check_precision,
        check_compiled_only,
        check_fp8,
        check_layout,
        _check_export,
        _check_length,
        check_batch_size_rampup,
        check_data_phases,
        check_overlap,
        _check_profiling,
        check_schedule,
        check_split_text,
        check_tokenizer,
    )
    return refused + [violation for rule in rules for violation in rule(values)]


def _check_required(values: Values) -> Iterator[Violation]:
    for name in ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "lr"):
        if values[name] is None:
            yield name, "is required"


def _check_not_built(values: Values) -> Iterator[Violation]:
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


def _check_export(values: Values) -> Iterator[Violation]:
    """Check that a config.json can express the trained model, and that peft can load its
    adapters."""
    for_peft = values["peft_type"] and values["export_peft"]
    if not values["export_huggingface"] and not for_peft:
        return
    longest = values["max_position_embeddings"] or values["seq_length"]
    complete = {
        **values,
        "vocab_size": values["vocab_size"] or 1,
        "max_position_embeddings": longest,
    }
    requested = [name for name in ("export_huggingface", "export_peft") if values[name]]
    try:
        kind = config_of(complete)["model_type"]
    except CheckpointError as error:
        yield requested[0], error.message
        return
    if for_peft and (reason := UNSUPPORTED_BY_PEFT.get(kind)):
        yield (
            "export_peft",
            f"adapters of {kind} are not written for peft: {reason}; leave it out, and take "
            "export_huggingface, which merges them",
        )


def _check_length(values: Values) -> Iterator[Violation]:
    iters, samples = values["train_iters"], values["train_samples"]
    if (iters is None) == (samples is None):
        actual = "neither" if iters is None else "both"
        name = "train_iters" if iters is None else "train_samples"
        yield name, f"give either train_iters or train_samples, found {actual}"
    longest = values["max_position_embeddings"]
    if longest is not None and longest < values["seq_length"]:
        yield (
            "max_position_embeddings",
            f"{longest} is less than seq_length {values['seq_length']}",
        )


def _check_profiling(values: Values) -> Iterator[Violation]:
    first, end = values["profile_step_start"], values["profile_step_end"]
    if values["profile"] and end <= first:
        yield "profile_step_end", f"{end} is not after profile_step_start {first}"
