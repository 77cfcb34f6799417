"""How an estimate looks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table

from flagscale.estimate import replicas
from flagscale.estimate.forecast import Stage
from flagscale.estimate.notes import does_not_fit, unknown
from flagscale.estimate.plan import GIB, Device, Estimate
from flagscale.estimate.step_time import Timed

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
    headings = ("stage", "layers", "ranks", *_PARTS.values(), "in all", "device", "work")
    for heading in (*headings, *(("busy, s", "idle") if made.timed else ())):
        table.add_column(heading, justify="left" if heading == "stage" else "right")
    rows = zip(made.forecast.stages, made.devices, made.forecast.shares, made.over, strict=True)
    for (stage, device, share, over), times in zip(rows, _times(made), strict=True):
        parts = asdict(stage.memory)
        table.add_row(
            stage.name.removeprefix("stage "),
            _layers(stage),
            str(stage.ranks),
            *(f"{parts[part] / GIB:.1f}" for part in _PARTS),
            f"{stage.memory.all / GIB:.1f}",
            _has(device),
            f"{share:.2f}",
            *times,
            style="red" if over else None,
        )
    return table


def _times(made: Estimate) -> list[tuple[str, ...]]:
    """Of each stage how long it computes in a step, and its share of waiting."""
    if made.timed is None:
        return [()] * len(made.devices)
    pairs = zip(made.timed.busy, made.timed.idle, strict=True)
    return [(f"{busy:.3g}", f"{idle:.0%}") for busy, idle in pairs]


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
    if made.timed is not None:
        yield _speed(made.timed, tokens, sum(stage.ranks for stage in step.stages))
    elif made.replicas:
        yield "the table is of the replicas with the largest micro-batches"
        yield from replicas.sentences(made)
    else:
        yield f"its time is not known: {unknown(made)}"
    if not made.vocabulary:
        yield "without embedding and head: vocab_size is not given, and no tokenizer.json is here"
    yield from does_not_fit(made)


def _speed(timed: Timed, tokens: int, ranks: int) -> str:
    seconds = timed.seconds
    text = (
        f"it takes about {seconds:.3g} s, {tokens / seconds:,.0f} tokens/s, "
        f"{tokens / seconds / ranks:,.0f} a rank: {timed.by}"
    )
    if len(timed.busy) > 1:
        text += f"; the busiest stage computes {timed.imbalance:.0%} longer than stages on average"
    return text


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
    timed = made.timed
    for stage, busy, idle in zip(stages, timed.busy, timed.idle, strict=True) if timed else ():
        stage.update(seconds_busy=busy, idle=idle)
    return {
        "stages": stages,
        "replicas": list(replicas.records(made)),
        "vocabulary": made.vocabulary,
        "micro_batches": made.forecast.micro_batches,
        "flops_per_step": made.forecast.work,
        "seconds_per_step": timed and timed.seconds,
        "imbalance": timed and timed.imbalance,
        "known_by": timed and timed.by,
        "does_not_fit": list(does_not_fit(made)),
    }
