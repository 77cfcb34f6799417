"""What a step takes of unlike replicas (``hetero_mode: dp``): those that are alike are an estimate
of their own, and the slowest of them sets the step's length."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from flagscale.estimate.plan import Device, Estimate, memory_text
from flagscale.estimate.step_time import peaks_of, shown, unknown


@dataclass(frozen=True)
class Alike:
    """Replicas one after another that take as many micro-batches of a size, on like devices."""

    numbers: range
    size: int
    device: Device | None
    each: Estimate

    @property
    def name(self) -> str:
        first, last = self.numbers[0], self.numbers[-1]
        which = f"replica {first}" if first == last else f"replicas {first}-{last}"
        return f"{which} ({self.device.kind})" if self.device is not None else which


def groups(made: Estimate) -> list[Alike]:
    """The replicas of an estimate, those that are alike together; none where all are."""
    taken = [
        (share.size, share.count, device)
        for share, device in zip(made.args.shares or (), made.replicas, strict=True)
    ]
    found: list[Alike] = []
    for (size, count, device), members in groupby(taken):
        first = found[-1].numbers.stop if found else 0
        numbers = range(first, first + len(list(members)))
        found.append(Alike(numbers, size, device, _alone(made, size, count, device)))
    return found


def _alone(made: Estimate, size: int, count: int, device: Device | None) -> Estimate:
    """The estimate as if all replicas were as these."""
    args = copy(made.args)
    args.shares, args.micro_batch_size, args.num_microbatches = None, size, count
    known = None if device is None else device.peak
    alike = len(set(made.replicas)) == 1
    args.peak_tflops = peaks_of([known], args.peak_tflops, alike=alike)[0]
    return Estimate(args, made.vocabulary, (device,) * len(made.devices))


def sentences(made: Estimate) -> Iterator[str]:
    """Of replicas that are alike what a rank takes of memory, and how long they take, and wait
    for the slowest."""
    found = groups(made)
    times = [None if group.each.timed is None else group.each.timed.seconds for group in found]
    known = [time for time in times if time is not None]
    longest = max(known) if len(known) == len(times) else None
    for group, time in zip(found, times, strict=True):
        waits = ""
        if longest is not None and time is not None:
            waits = f"; its share of a step takes {shown(time)}, idle {1 - time / longest:.0%}"
        for index, stage in enumerate(group.each.forecast.stages):
            where = f", stage {index}" * (len(made.devices) > 1)
            yield f"{group.name}{where}: a rank takes {memory_text(stage.memory)}{waits}"
    if longest is None:
        kinds = [None if group.device is None else group.device.kind for group in found]
        peaks = [group.each.peaks[0] for group in found]
        why = unknown(kinds, peaks, sixteen_bit=bool(made.args.bf16))
        yield f"how long replicas compute and wait is not known: {why}"
    else:
        by = next(group.each.timed.by for group in found if group.each.timed is not None)
        mean = sum(t * len(g.numbers) for t, g in zip(known, found, strict=True))
        mean /= found[-1].numbers.stop
        yield (
            f"a step takes {longest:.3g} s, {by}; the slowest replica {longest / mean - 1:.0%} "
            "longer than replicas on average"
        )


def records(made: Estimate) -> Iterator[dict[str, Any]]:
    """The same for programs: bytes, and seconds of a replica's share of a step."""
    for group in groups(made):
        timed = group.each.timed
        yield {
            "replicas": list(group.numbers),
            "device": None if group.device is None else group.device.kind,
            "micro_batches": group.each.args.num_microbatches,
            "micro_batch_size": group.size,
            "memory": [stage.memory.all for stage in group.each.forecast.stages],
            "seconds": timed and timed.seconds,
        }


def too_much(made: Estimate) -> Iterator[str]:
    """A sentence of replicas that do not fit their devices, and what would."""
    for group in groups(made):
        if group.device is None or not any(group.each.over):
            continue
        fullest = max(group.each.forecast.stages, key=lambda stage: stage.memory.all)
        yield (
            f"{group.name} does not fit: {memory_text(fullest.memory)} a rank, a "
            f"{group.device.kind} has {group.device.memory:.0f} GiB; {_smaller(group)}"
        )


def _smaller(group: Alike) -> str:
    count = group.each.args.num_microbatches
    for size in range(group.size - 1, 0, -1):
        if not any(_alone(group.each, size, count, group.device).over):
            return f"micro-batches of {size} would"
    none = "micro-batches of 1 neither: " * (group.size > 1)
    return f"{none}it takes tensor parallelism, or recomputation"
