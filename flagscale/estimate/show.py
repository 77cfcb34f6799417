"""Presentation of an estimate as tables or JSON."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Literal

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table

from flagscale.config.arguments.layout import describe_batch, tokens_per_sample
from flagscale.config.arguments.rules.activation_offload import offloads_activations
from flagscale.estimate import replicas
from flagscale.estimate.forecast import StageForecast
from flagscale.estimate.notes import describe_excess, explain_unknown_time
from flagscale.estimate.plan import GIB, DeviceSpec, Estimate
from flagscale.estimate.step_time import StepTime
from flagscale.tables import FittingTable

_MEMORY_HEADINGS = {
    "weights": "weights",
    "gradients": "grads",
    "optimizer": "optimizer",
    "activations": "activations",
    "transient": "transient",
}


def render_estimate(estimate: Estimate) -> RenderableType:
    """Return a table with memory and load of each stage, and lines about the step."""
    return Group(FittingTable(_build_table(estimate)), *_iter_lines(estimate))


def _build_table(estimate: Estimate) -> Table:
    table = Table(title="a rank of each stage, in GiB", title_justify="left", box=box.SIMPLE_HEAD)
    headings = ("stage", "layers", "ranks", *_MEMORY_HEADINGS.values(), "in all", "device", "work")
    for heading in (*headings, *(("busy, s", "idle") if estimate.step_time else ())):
        justify: Literal["left", "right"] = "left" if heading == "stage" else "right"
        table.add_column(heading, justify=justify, no_wrap=True)
    rows = zip(
        estimate.forecast.stages,
        estimate.devices,
        estimate.forecast.relative_flops,
        estimate.excess_bytes,
        strict=True,
    )
    for (stage, device, relative_flops, excess_bytes), times in zip(
        rows, _stage_times(estimate), strict=True
    ):
        parts = asdict(stage.memory)
        table.add_row(
            stage.name.removeprefix("stage "),
            _format_layers(stage),
            str(stage.ranks),
            *(f"{parts[part] / GIB:.1f}" for part in _MEMORY_HEADINGS),
            f"{stage.memory.total / GIB:.1f}",
            _format_device(device),
            f"{relative_flops:.2f}",
            *times,
            style="red" if excess_bytes else None,
        )
    return table


def _stage_times(estimate: Estimate) -> list[tuple[str, ...]]:
    """Return for each stage the seconds of computation in a step and the idle fraction."""
    if estimate.step_time is None:
        return [()] * len(estimate.devices)
    pairs = zip(estimate.step_time.busy_seconds, estimate.step_time.idle_fractions, strict=True)
    return [(f"{busy:.3g}", f"{idle:.0%}") for busy, idle in pairs]


def _format_layers(stage: StageForecast) -> str:
    recomputed = stage.recomputed_layers * len(stage.flops)
    has_modules = bool(stage.recomputed_modules)
    text = f"{stage.layers}, {recomputed} recomputed" if recomputed else str(stage.layers)
    return f"{text}, modules too" if has_modules else text


def _format_device(device: DeviceSpec | None) -> str:
    if device is None:
        return "not known"
    return device.kind if device.memory is None else f"{device.kind} {device.memory:.0f}"


def _iter_lines(estimate: Estimate) -> Iterator[str]:
    args, forecast = estimate.args, estimate.forecast
    tokens = args.global_batch_size * tokens_per_sample(vars(args))
    yield (
        "grads, optimizer: in fp32; activations: of micro-batches under way; transient: within one "
        "pass, the logits among it; work: arithmetic, relative to the busiest stage's"
    )
    yield _format_model_size(estimate)
    yield (
        f"a step: {describe_batch(vars(args))} in {forecast.micro_batches} "
        f"micro-batches, {forecast.flops_per_step / 1e15:,.3g} PFLOP"
    )
    if host_bytes := max(stage.memory.host for stage in forecast.stages):
        yield (
            f"in addition {host_bytes / GIB:.1f} GiB of the host's memory a rank, for "
            f"{_describe_host_memory(args)}"
        )
    if estimate.step_time is not None:
        yield _format_speed(
            estimate.step_time, tokens, sum(stage.ranks for stage in forecast.stages)
        )
    elif estimate.replicas:
        yield "the table is of the replicas with the largest micro-batches"
        yield from replicas.describe_replicas(estimate)
    else:
        yield f"its time is not known: {explain_unknown_time(estimate)}"
    if not estimate.vocabulary_size:
        yield "without embedding and head: vocab_size is not given, and no tokenizer.json is here"
    yield from describe_excess(estimate)


def _describe_host_memory(args: Namespace) -> str:
    parts = ["the optimizer's state"] if args.optimizer_cpu_offload else []
    parts += ["activations"] if offloads_activations(vars(args)) else []
    return " and ".join(parts)


def _format_model_size(estimate: Estimate) -> str:
    size = estimate.model_size
    remarks = []
    if size.active < size.total:
        remarks.append(f"{_format_count(size.active)} active for a token")
    if size.trained < size.total:
        remarks.append(f"{_format_count(size.trained)} trained")
    text = f" ({', '.join(remarks)})" if remarks else ""
    counts = [stage.weights for stage in estimate.forecast.stages]
    a_rank = _format_count(max(counts))
    if min(counts) < max(counts):
        a_rank = f"{_format_count(min(counts))} to {a_rank}"
    return f"parameters: {_format_count(size.total)}{text}; {a_rank} a rank"


def _format_count(count: int) -> str:
    """Format a number of weights, such as ``8.03 B`` or ``7.1 M``."""
    return f"{count / 1e9:,.2f} B" if count >= 1e9 else f"{count / 1e6:,.1f} M"


def _format_speed(step_time: StepTime, tokens: int, ranks: int) -> str:
    seconds = step_time.seconds
    text = (
        f"it takes about {seconds:.3g} s, {tokens / seconds:,.0f} tokens/s, "
        f"{tokens / seconds / ranks:,.0f} a rank: {step_time.basis}"
    )
    if len(step_time.busy_seconds) > 1:
        text += (
            f"; the busiest stage computes {step_time.imbalance:.0%} longer than stages on average"
        )
    return text


def to_json(estimate: Estimate) -> dict[str, Any]:
    """Return the estimate as plain data, with memory in bytes."""
    stages = [
        {
            "name": stage.name,
            "layers": stage.layers,
            "ranks": stage.ranks,
            "parameters": stage.weights,
            "memory": {
                **asdict(stage.memory),
                "moment": stage.memory.transient,  # former name of "transient"
                "all": stage.memory.total,
            },
            "device": None if device is None else asdict(device),
            "over": excess_bytes,
            "arithmetic": relative_flops,
        }
        for stage, device, relative_flops, excess_bytes in zip(
            estimate.forecast.stages,
            estimate.devices,
            estimate.forecast.relative_flops,
            estimate.excess_bytes,
            strict=True,
        )
    ]
    step_time = estimate.step_time
    for stage, busy, idle in (
        zip(stages, step_time.busy_seconds, step_time.idle_fractions, strict=True)
        if step_time
        else ()
    ):
        stage.update(seconds_busy=busy, idle=idle)
    return {
        "stages": stages,
        "replicas": list(replicas.replica_records(estimate)),
        "parameters": asdict(estimate.model_size),
        "vocabulary": estimate.vocabulary_size,
        "micro_batches": estimate.forecast.micro_batches,
        "flops_per_step": estimate.forecast.flops_per_step,
        "seconds_per_step": step_time and step_time.seconds,
        "imbalance": step_time and step_time.imbalance,
        "known_by": step_time and step_time.basis,
        "does_not_fit": list(describe_excess(estimate)),
    }
