"""How an estimate looks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table

from flagscale.estimate.forecast import Stage
from flagscale.estimate.plan import GIB, Device, Estimate, too_much

_PARTS = {
    "weights": "weights",
    "gradients": "grads",
    "optimizer": "optimizer",
    "activations": "activations",
    "moment": "moment",
}


def report(made: Estimate) -> RenderableType:
    """Memory and work of each stage, and what a step takes."""
    return Group(_table(made), *_below(made))


def _table(made: Estimate) -> Table:
    table = Table(title="a rank of each stage, in GiB", title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("stage", "layers", "ranks", *_PARTS.values(), "in all", "device", "work"):
        table.add_column(heading, justify="left" if heading == "stage" else "right")
    rows = zip(made.forecast.stages, made.devices, made.forecast.shares, made.over, strict=True)
    for stage, device, share, over in rows:
        parts = asdict(stage.memory)
        table.add_row(
            stage.name.removeprefix("stage "),
            _layers(stage),
            str(stage.ranks),
            *(f"{parts[part] / GIB:.1f}" for part in _PARTS),
            f"{stage.memory.all / GIB:.1f}",
            _has(device),
            f"{share:.2f}",
            style="red" if over else None,
        )
    return table


def _layers(stage: Stage) -> str:
    again = stage.recomputed * len(stage.work)
    return f"{stage.layers}, {again} recomputed" if again else str(stage.layers)


def _has(device: Device | None) -> str:
    if device is None:
        return "not known"
    return device.kind if device.memory is None else f"{device.kind} {device.memory:.0f}"


def _below(made: Estimate) -> Iterator[str]:
    args, step = made.args, made.forecast
    tokens = args.global_batch_size * args.seq_length
    yield (
        "grads, optimizer: in fp32; activations: of micro-batches under way; moment: within one "
        "pass, the logits among it; work: arithmetic, relative to the busiest stage's"
    )
    yield (
        f"a step: {args.global_batch_size} x {args.seq_length} tokens in {step.micro_batches} "
        f"micro-batches, {step.work / 1e15:,.3g} PFLOP"
    )
    if made.seconds is not None:
        seconds, by = made.seconds
        ranks = sum(stage.ranks for stage in step.stages)
        yield (
            f"it takes about {seconds:.3g} s, {tokens / seconds:,.0f} tokens/s, "
            f"{tokens / seconds / ranks:,.0f} a rank: {by}"
        )
    else:
        yield (
            "its time is not known: the hostfile's type= names no device whose peak is known, and "
            "peak_tflops is not set"
        )
    if not made.vocabulary:
        yield "without embedding and head: vocab_size is not given, and no tokenizer.json is here"
    yield from too_much(made)


def as_json(made: Estimate) -> dict[str, Any]:
    """The same for programs; memory in bytes."""
    stages = [
        {
            "name": stage.name,
            "layers": stage.layers,
            "ranks": stage.ranks,
            "memory": {**asdict(stage.memory), "all": stage.memory.all},
            "device": None if device is None else asdict(device),
            "over": over,
            "arithmetic": share,
        }
        for stage, device, share, over in zip(
            made.forecast.stages, made.devices, made.forecast.shares, made.over, strict=True
        )
    ]
    found = made.seconds
    return {
        "stages": stages,
        "vocabulary": made.vocabulary,
        "micro_batches": made.forecast.micro_batches,
        "flops_per_step": made.forecast.work,
        "seconds_per_step": None if found is None else found[0],
        "known_by": None if found is None else found[1],
        "does_not_fit": list(too_much(made)),
    }
