"""Rules of the optimizer, its schedules, gradient reduction and CUDA graphs. No torch.

The schedules are those of learning rate, weight decay and batch size (ramp-up). ``cuda_graph_impl:
local`` with ``cuda_graph_scope: full_iteration`` launches a whole step as one graph. ``comm: {tail:
bounded}`` bounds the time of an all_reduce of gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

from flagscale.config.arguments.rules.data import check_data_phases
from flagscale.config.arguments.rules.muon import OPTIMIZERS
from flagscale.config.arguments.spec.argument import Values, Violation
from flagscale.config.arguments.spec.model_arguments import LearningRate
from flagscale.config.arguments.spec.paths import DATA_PHASES, parse_phase
from flagscale.config.arguments.spec.registry import arguments
from flagscale.config.arguments.spec.system_arguments import STAGE_RECOMPUTE
from flagscale.config.arguments.spec.values import format_value

CUDA_GRAPH, CUDA_GRAPH_SCOPE, FULL_ITERATION = (
    "cuda_graph_impl",
    "cuda_graph_scope",
    "full_iteration",
)
_WITHOUT_COMMUNICATION = {
    "tensor_model_parallel_size": 1,
    "context_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "enable_hetero": False,
    "overlap_grad_reduce": False,
    "overlap_param_gather": False,
}
"""Values with which ranks do not communicate during the forward and backward passes of a step."""
_RANDOM_STATE = "the state of its random number generator is on the host"
_CAPTURABLE = {
    "fp16": (False, "the host updates the loss scale; use bf16, which has none"),
    "num_moe_experts": (None, "the host reads the number of tokens per expert from the device"),
    "recompute_granularity": (None, _RANDOM_STATE),
    "hidden_dropout": (0.0, _RANDOM_STATE),
    "attention_dropout": (0.0, _RANDOM_STATE),
    "lora_dropout": (0.0, _RANDOM_STATE),
}
"""Values with which a step can be captured, and the reason why other values are rejected."""


def captures_steps(values: Values) -> bool:
    """Return whether the forward and backward passes of a step are captured once and then launched
    as one CUDA graph."""
    return bool(values[CUDA_GRAPH] == "local")


def check_cuda_graphs(values: Values) -> Iterator[Violation]:
    """Check that a step can be captured."""
    if values[CUDA_GRAPH] == "none":
        return
    if values[CUDA_GRAPH] != "local":
        yield (
            CUDA_GRAPH,
            f"{values[CUDA_GRAPH]} requires Transformer Engine; use local with {CUDA_GRAPH_SCOPE}: "
            f"{FULL_ITERATION}, which captures whole steps",
        )
        return
    scope = values[CUDA_GRAPH_SCOPE] or ()
    if list([scope] if isinstance(scope, str) else scope) != [FULL_ITERATION]:
        yield (
            CUDA_GRAPH_SCOPE,
            f"expected {FULL_ITERATION}, the only supported scope; found {format_value(scope)}",
        )
    for name, local_value in _WITHOUT_COMMUNICATION.items():
        if (values[name] or local_value) != local_value:
            yield (
                name,
                f"{format_value(values[name])} is not supported with {CUDA_GRAPH}: local: ranks "
                "cannot communicate within a captured step",
            )
    for name, (capturable_value, reason) in _CAPTURABLE.items():
        if (values[name] or capturable_value) != capturable_value:
            yield (
                name,
                f"{format_value(values[name])} is not supported with {CUDA_GRAPH}: local: {reason}",
            )


BOUNDED_OPTION = "tail=bounded"
"""Option of the backend fsccl (``comm``) that bounds the time of all_reduces of gradients."""
BOUNDED_VARIABLE = ("FSCCL_TAIL", "bounded")
"""Environment variable (``experiment.envs``) with the same effect."""


def check_bounded_all_reduce(values: Values) -> Iterator[Violation]:
    """Check that gradients are reduced by all_reduce if bounded all_reduces are requested."""
    if BOUNDED_OPTION in (values["comm"] or ()) and "fsccl" in values["distributed_backend"]:
        yield from exact_reductions(values, "comm: {tail: bounded}")


def exact_reductions(values: Values, name: str) -> Iterator[Violation]:
    """Yield arguments with which gradients are reduced exactly although bounded all_reduces are
    requested.

    Args:
        values: arguments by name.
        name: setting that requests bounded all_reduces, as the user wrote it.
    """
    if values["use_distributed_optimizer"]:
        yield (
            "use_distributed_optimizer",
            f"cannot be combined with {name}: it reduces gradients by reduce_scatter, which is not "
            "bounded; set it to false, or leave the other out",
        )


def check_optimizer(values: Values) -> Iterator[Violation]:
    if values["optimizer"] not in OPTIMIZERS:
        yield (
            "optimizer",
            f"{values['optimizer']!r} is not implemented; expected 'adam' (AdamW), 'muon', "
            "'lion' or 'sgd'",
        )
    if values["optimizer"] == "sgd" and values["use_distributed_optimizer"]:
        yield (
            "optimizer",
            "sgd is not supported with use_distributed_optimizer: megatron.core shards only Adam",
        )
    if values["optimizer_cpu_offload"]:
        yield from _check_offload(values)
    for activation in ("swiglu", "squared_relu"):
        if values["openai_gelu"] and values[activation]:
            yield "openai_gelu", f"cannot be combined with {activation}; leave one out"


def _check_offload(values: Values) -> Iterator[Violation]:
    if values["optimizer"] != "adam":
        yield "optimizer_cpu_offload", f"requires optimizer: adam, found {values['optimizer']}"
    if not values["use_distributed_optimizer"]:
        yield "optimizer_cpu_offload", "requires use_distributed_optimizer: true"
    if captures_steps(values):
        yield "optimizer_cpu_offload", f"is not supported with {CUDA_GRAPH}: local"


def check_overlap(values: Values) -> Iterator[Violation]:
    if values["overlap_param_gather"] and not values["use_distributed_optimizer"]:
        yield "overlap_param_gather", "requires use_distributed_optimizer: true"
    elif values["overlap_param_gather"] and not values["overlap_grad_reduce"]:
        yield "overlap_param_gather", "requires overlap_grad_reduce: true"


RAMPUP = "rampup_batch_size"
_LENGTHS_IN_STEPS = ("lr_decay_iters", "lr_warmup_iters", "lr_wsd_decay_iters")


@dataclass(frozen=True)
class BatchSizeRampup:
    """Ramp-up of the global batch size, in sequences.

    The batch size is ``start`` at first. The first ``samples`` sequences are divided into equal
    parts, and after each part the batch size increases by ``increment``, up to ``final``.
    """

    start: int
    increment: int
    samples: int
    final: int

    @property
    def batch_sizes(self) -> range:
        """All batch sizes, in increasing order."""
        return range(self.start, self.final + 1, self.increment)

    def batch_size_after(self, consumed: int) -> int:
        """Return the batch size of the step that follows ``consumed`` sequences."""
        if consumed > self.samples:
            return self.final
        # Rounded like Megatron-LM, where 9 / (9 / 7) is below 7.
        increments = int(consumed / (self.samples / (len(self.batch_sizes) - 1)))
        return self.start + increments * self.increment

    def micro_batches(self, batch: int, count: int) -> int:
        """Return the number of micro-batches per rank in a step of ``batch`` sequences, if a step
        of ``final`` sequences has ``count`` micro-batches."""
        return batch * count // self.final

    def steps(self, consumed: int, total: int) -> int:
        """Return the number of whole steps from ``consumed`` to ``total`` sequences."""
        steps = 0
        while consumed <= self.samples:
            batch_size = self.batch_size_after(consumed)
            if consumed + batch_size > total:
                return steps
            consumed, steps = consumed + batch_size, steps + 1
        return steps + max(total - consumed, 0) // self.final


def rampup_of(values: Values) -> BatchSizeRampup | None:
    """Return the batch-size ramp-up of valid arguments; None without one."""
    if values[RAMPUP] is None:
        return None
    start, increment, samples = values[RAMPUP]
    return BatchSizeRampup(start, increment, samples, values["global_batch_size"])


def save_interval_at(values: Values, consumed: int) -> int | None:
    """Return the number of steps between checkpoints after ``consumed`` sequences, from derived
    arguments; None if only the end of training is saved."""
    rampup: BatchSizeRampup | None = values["rampup"]
    is_ramping_up = rampup is not None and consumed <= rampup.samples
    rampup_interval: int | None = values["rampup_save_interval"] if is_ramping_up else None
    interval: int | None = values["save_interval"]
    return rampup_interval or interval


def check_batch_size_rampup(values: Values) -> Iterator[Violation]:
    """Check the batch-size ramp-up independently of the number of ranks."""
    rampup, final = values[RAMPUP], values["global_batch_size"]
    if rampup is None:
        return
    if len(rampup) != 3:
        yield (
            RAMPUP,
            "expected three numbers (initial batch size, increment, number of sequences), found "
            f"{len(rampup)}",
        )
        return
    if final is None:
        yield "global_batch_size", f"is required by {RAMPUP}: the final batch size"
        return
    start, increment, _ = rampup
    if start >= final or (final - start) % increment:
        yield (
            RAMPUP,
            f"initial batch size {start} does not reach global_batch_size {final} in increments "
            f"of {increment}",
        )
    if values["train_samples"] is None:
        yield RAMPUP, "requires train_samples instead of train_iters, because batch sizes differ"
    for name in _LENGTHS_IN_STEPS:
        if values[name]:
            yield (
                name,
                f"is not supported with {RAMPUP}, because batch sizes differ; set "
                f"{name.replace('_iters', '_samples')}",
            )
    if values.get("hetero_mode") == "dp" and values.get("enable_hetero"):
        yield RAMPUP, "is not supported with hetero_mode: dp"
    for name in STAGE_RECOMPUTE:
        if values[name]:
            yield (
                name,
                f"is not supported with {RAMPUP}, because the number of micro-batches per step "
                "changes",
            )


def check_rampup_sizes(
    values: Values, slice_size: int, slice_text: str, stages: int
) -> Iterator[Violation]:
    """Check that every batch size of a ramp-up can be divided into micro-batches.

    Args:
        values: arguments by name.
        slice_size: sequences in one micro-batch of all data-parallel ranks together.
        slice_text: how ``slice_size`` is computed, for messages.
        stages: pipeline stages if they have virtual stages, otherwise 1: the number of
            micro-batches must be a multiple of it.
    """
    rampup = rampup_of(values)
    if rampup is None:
        return
    for batch_size in rampup.batch_sizes:
        if batch_size % slice_size:
            yield RAMPUP, f"batch size {batch_size} is not divisible by {slice_text}"
            return
        if batch_size // slice_size % stages:
            yield (
                RAMPUP,
                f"batch size {batch_size} has {batch_size // slice_size} micro-batches, which is "
                f"not divisible by the {stages} pipeline stages, as virtual stages require",
            )
            return


_SCHEDULE = (
    *(field.name for field in fields(LearningRate)),
    "decoupled_lr",
    "decoupled_min_lr",
    RAMPUP,
)
"""Arguments of the schedules of learning rate, weight decay and batch size, without ``lr``."""


def drop_unused_schedule(values: Values) -> Values:
    """Return the arguments as a read-only mapping; with ``skip_train``, without the schedules.

    Evaluation uses no schedule, so it needs none, and no contradiction between its arguments
    matters. The training length is kept, because the size of the validation data depends on it.
    """
    if not values["skip_train"]:
        return MappingProxyType({**values})
    unused: dict[str, Any] = {name: arguments()[name].default for name in _SCHEDULE}
    unused["lr"] = 0.0
    if values["train_iters"] is not None:
        unused["train_samples"] = None
    elif values["train_samples"] is None:
        unused["train_iters"] = 0
    return MappingProxyType({**values, **unused})


_LENGTHS = ("lr_decay", "lr_warmup", "lr_wsd_decay")
_SKIPPED_STEPS = "iterations_to_skip"
PLANNED_STEPS = (_SKIPPED_STEPS, DATA_PHASES)
"""Arguments that take effect at certain steps or samples of training."""


def check_schedule(values: Values) -> Iterator[Violation]:
    """Check the schedules of learning rate and weight decay."""
    for name in ("min_lr", "lr_warmup_init"):
        if values[name] > values["lr"]:
            yield name, f"{values[name]} exceeds lr {values['lr']}"
    unit_violations = list(_check_units(values))
    yield from unit_violations
    fraction = values["lr_warmup_fraction"]
    if fraction is not None and (values["lr_warmup_iters"] or values["lr_warmup_samples"]):
        yield (
            "lr_warmup_fraction",
            "cannot be combined with lr_warmup_iters or lr_warmup_samples; leave one out",
        )
    elif not unit_violations:
        yield from _check_lengths(values)
    yield from _check_weight_decay(values)
    if values["override_opt_param_scheduler"] and values["use_checkpoint_opt_param_scheduler"]:
        yield (
            "override_opt_param_scheduler",
            "cannot be combined with use_checkpoint_opt_param_scheduler; leave one out",
        )


def _check_units(values: Values) -> Iterator[Violation]:
    """Check that no length is given both in steps and in samples."""
    for prefix in _LENGTHS:
        steps, samples = f"{prefix}_iters", f"{prefix}_samples"
        if values[steps] and values[samples]:
            yield steps, f"cannot be combined with {samples}; leave one out"


def _check_lengths(values: Values) -> Iterator[Violation]:
    """Check that the warm-up and the final phase of WSD fit in the decay, which includes them."""
    decay = _length_in_steps(values, "lr_decay") or _length_in_steps(values, "train")
    warmup = _length_in_steps(values, "lr_warmup")
    if warmup and decay is not None and warmup >= decay:
        name = "lr_warmup_samples" if values["lr_warmup_samples"] else "lr_warmup_iters"
        yield (
            name,
            f"warm-up of {warmup:g} steps must be shorter than the decay of {decay:g} steps, which "
            f"includes it; for a tenth of it, set lr_warmup_fraction: 0.1 and {name}: 0",
        )
    elif values["lr_decay_style"] == "WSD":
        yield from _check_wsd_decay(values, decay, warmup)


def _check_wsd_decay(
    values: Values, decay: float | None, warmup: float | None
) -> Iterator[Violation]:
    final_phase = _length_in_steps(values, "lr_wsd_decay")
    if (values["lr_wsd_decay_iters"], values["lr_wsd_decay_samples"]) == (None, None):
        yield (
            "lr_wsd_decay_iters",
            "is required by lr_decay_style: WSD, or lr_wsd_decay_samples",
        )
    if final_phase is None or decay is None:
        return
    if values["lr_warmup_fraction"] is not None:
        warmup = values["lr_warmup_fraction"] * decay
    available = decay - (warmup or 0)
    if final_phase > available + 1e-9 * decay:
        name = "lr_wsd_decay_samples" if values["lr_wsd_decay_samples"] else "lr_wsd_decay_iters"
        warmup_text = f" after a warm-up of {warmup:g} steps" if warmup else ""
        yield (
            name,
            f"final phase of {final_phase:g} steps does not fit in the decay of {decay:g} steps"
            f"{warmup_text}",
        )


def _length_in_steps(values: Values, prefix: str) -> float | None:
    """Return a length in steps, whether it is given in steps or in samples; None if it is not given
    or samples cannot be converted."""
    samples, batch = values[f"{prefix}_samples"], values["global_batch_size"]
    if samples:
        return samples / batch if batch else None
    steps: float | None = values[f"{prefix}_iters"]
    return steps


def _check_weight_decay(values: Values) -> Iterator[Violation]:
    start, end = weight_decays(values)
    style = values["weight_decay_incr_style"]
    bounds = (values["start_weight_decay"], values["end_weight_decay"])
    if start > end:
        yield "start_weight_decay", f"{start} exceeds end_weight_decay {end}"
    elif start != end and style == "constant":
        yield (
            "weight_decay_incr_style",
            f"constant contradicts start_weight_decay {start} and end_weight_decay {end}; use "
            "linear or cosine",
        )
    elif style != "constant" and bounds == (None, None):
        yield (
            "weight_decay_incr_style",
            f"{style} requires start_weight_decay or end_weight_decay",
        )


def weight_decays(values: Values) -> tuple[float, float]:
    """Return the weight decay at the start and at the end of training."""
    start, end = values["start_weight_decay"], values["end_weight_decay"]
    return (
        values["weight_decay"] if start is None else start,
        values["weight_decay"] if end is None else end,
    )


def note_unreached_steps(values: Values, batch: int) -> Iterator[tuple[str, str]]:
    """Yield the arguments of :data:`PLANNED_STEPS` that refer to steps after the end of training,
    with the reason. ``batch`` is the number of sequences per step."""
    samples = values["train_samples"]
    if samples is None:
        samples = (values["train_iters"] or 0) * batch
    rampup = rampup_of({**values, "global_batch_size": batch})
    steps = rampup.steps(0, samples) if rampup else samples // batch
    unreached_steps = [step for step in values[_SKIPPED_STEPS] or () if step > steps]
    if unreached_steps:
        yield _SKIPPED_STEPS, f"{format_value(unreached_steps)}: training ends after step {steps}"
    phases = () if any(check_data_phases(values)) else values[DATA_PHASES] or ()
    first_samples = [parse_phase(text).first_sample(values["seq_length"]) for text in phases]
    unreached_samples = [sample for sample in first_samples if sample >= samples]
    if unreached_samples:
        yield (
            DATA_PHASES,
            f"phase at sample {unreached_samples[0]}: training ends after {samples} samples",
        )


def schedule_lengths(values: Values) -> dict[str, Any]:
    """Return the lengths in samples of decay, warm-up, final phase of WSD and increase of weight
    decay, from derived arguments. The keys are parameters of megatron.core's scheduler."""

    def samples(prefix: str) -> int | None:
        in_samples, in_steps = values[f"{prefix}_samples"], values[f"{prefix}_iters"]
        if in_samples is not None:
            return int(in_samples)
        return None if in_steps is None else int(in_steps * values["global_batch_size"])

    total = max(values["train_samples"], 1)
    decay = samples("lr_decay") or total
    if values["lr_warmup_fraction"] is not None:
        warmup = values["lr_warmup_fraction"] * decay
    else:
        warmup = (
            values["lr_warmup_samples"] or values["lr_warmup_iters"] * values["global_batch_size"]
        )
    return {
        "lr_decay_steps": decay,
        "lr_warmup_steps": warmup,
        "wsd_decay_steps": samples("lr_wsd_decay"),
        "wd_incr_steps": total,
    }
