"""Estimates for heterogeneous replicas (``hetero_mode: dp``).

Each group of identical replicas has an estimate of its own. The slowest group determines the
duration of a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from flagscale.estimate.plan import (
    DeviceSpec,
    Estimate,
    describe_device_memory,
    format_memory,
)
from flagscale.estimate.step_time import explain_unknown_time, format_seconds, select_peaks


@dataclass(frozen=True)
class ReplicaGroup:
    """Consecutive replicas with the same number and size of micro-batches on devices of one type.

    ``replica_indices`` are their indices among all replicas.
    """

    replica_indices: range
    micro_batch_size: int
    device: DeviceSpec | None
    estimate: Estimate

    @property
    def name(self) -> str:
        first, last = self.replica_indices[0], self.replica_indices[-1]
        range_text = f"replica {first}" if first == last else f"replicas {first}-{last}"
        return f"{range_text} ({self.device.kind})" if self.device is not None else range_text


def group_replicas(estimate: Estimate) -> list[ReplicaGroup]:
    """Return the groups of identical replicas of an estimate; none for homogeneous jobs."""
    assignments = [
        (share.size, share.count, device)
        for share, device in zip(estimate.args.shares or (), estimate.replicas, strict=True)
    ]
    groups: list[ReplicaGroup] = []
    for (micro_batch_size, micro_batches, device), members in groupby(assignments):
        first = groups[-1].replica_indices.stop if groups else 0
        numbers = range(first, first + len(list(members)))
        groups.append(
            ReplicaGroup(
                numbers,
                micro_batch_size,
                device,
                _estimate_homogeneous(estimate, micro_batch_size, micro_batches, device),
            )
        )
    return groups


def _estimate_homogeneous(
    estimate: Estimate, micro_batch_size: int, micro_batches: int, device: DeviceSpec | None
) -> Estimate:
    """Return the estimate for a job in which all replicas are identical to these."""
    args = copy(estimate.args)
    args.shares, args.micro_batch_size, args.num_microbatches = (
        None,
        micro_batch_size,
        micro_batches,
    )
    known_peak = None if device is None else device.peak
    is_homogeneous = len(set(estimate.replicas)) == 1
    args.peak_tflops = select_peaks([known_peak], args.peak_tflops, is_homogeneous=is_homogeneous)[
        0
    ]
    return Estimate(args, estimate.vocabulary_size, (device,) * len(estimate.devices))


def describe_replicas(estimate: Estimate) -> Iterator[str]:
    """Describe the memory, duration and idle time of each group of replicas."""
    groups = group_replicas(estimate)
    times = [
        None if group.estimate.step_time is None else group.estimate.step_time.seconds
        for group in groups
    ]
    known_times = [time for time in times if time is not None]
    longest = max(known_times) if len(known_times) == len(times) else None
    for group, time in zip(groups, times, strict=True):
        idle_note = ""
        if longest is not None and time is not None:
            idle_note = (
                f"; its share of a step takes {format_seconds(time)}, idle {1 - time / longest:.0%}"
            )
        for index, stage in enumerate(group.estimate.forecast.stages):
            stage_note = f", stage {index}" * (len(estimate.devices) > 1)
            yield f"{group.name}{stage_note}: a rank takes {format_memory(stage.memory)}{idle_note}"
    if longest is None:
        kinds = [None if group.device is None else group.device.kind for group in groups]
        peaks = [group.estimate.peaks[0] for group in groups]
        reason = explain_unknown_time(kinds, peaks, sixteen_bit=bool(estimate.args.bf16))
        yield f"how long replicas compute and wait is not known: {reason}"
    else:
        basis = next(
            group.estimate.step_time.basis
            for group in groups
            if group.estimate.step_time is not None
        )
        mean = sum(t * len(g.replica_indices) for t, g in zip(known_times, groups, strict=True))
        mean /= groups[-1].replica_indices.stop
        yield (
            f"a step takes {longest:.3g} s, {basis}; the slowest replica {longest / mean - 1:.0%} "
            "longer than replicas on average"
        )


def replica_records(estimate: Estimate) -> Iterator[dict[str, Any]]:
    """Return the same as plain data, with memory in bytes and the duration of a replica's share of
    a step in seconds.
    """
    for group in group_replicas(estimate):
        step_time = group.estimate.step_time
        yield {
            "replicas": list(group.replica_indices),
            "device": None if group.device is None else group.device.kind,
            "micro_batches": group.estimate.args.num_microbatches,
            "micro_batch_size": group.micro_batch_size,
            "memory": [stage.memory.total for stage in group.estimate.forecast.stages],
            "seconds": step_time and step_time.seconds,
        }


def describe_excess(estimate: Estimate) -> Iterator[str]:
    """Describe each group of replicas that does not fit its devices, and a remedy."""
    for group in group_replicas(estimate):
        if group.device is None or not any(group.estimate.excess_bytes):
            continue
        fullest = max(group.estimate.forecast.stages, key=lambda stage: stage.memory.total)
        yield (
            f"{group.name} does not fit: {format_memory(fullest.memory)} a rank, "
            f"{describe_device_memory(group.device)}; {_suggest_smaller(group)}"
        )


def _suggest_smaller(group: ReplicaGroup) -> str:
    count = group.estimate.args.num_microbatches
    for size in range(group.micro_batch_size - 1, 0, -1):
        if not any(_estimate_homogeneous(group.estimate, size, count, group.device).excess_bytes):
            return f"micro-batches of {size} would"
    prefix = "micro-batches of 1 neither: " * (group.micro_batch_size > 1)
    return f"{prefix}it takes tensor parallelism, or recomputation"
