"""Data parallelism over heterogeneous devices: replicas that take different shares of a step.

Every replica holds the whole model; faster replicas take larger micro-batches, or more of them. The
samples of a step are one range of the data order, cut at the shares of the replicas, and the
gradient is divided by the number of tokens of all replicas. The step therefore equals that of
homogeneous replicas.

A *pass* is one forward and backward pass of a micro-batch through one model chunk. A *round* is the
smallest number of micro-batches that a pipeline with virtual stages supports
(:attr:`.Pipeline.round_size`); without virtual stages it is one micro-batch.

``flagscale.train.microbatch_balancer`` measures the speed of the replicas in the first steps.
No torch.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from flagscale.config.arguments.rules.parallel_layout import ONE_STAGE, Pipeline, pipeline_of
from flagscale.config.arguments.spec.argument import Values, Violation
from flagscale.config.arguments.spec.system_arguments import (
    SPLIT_COUNTS,
    SPLIT_SIZES,
    STAGE_RECOMPUTE,
)
from flagscale.config.arguments.spec.values import format_value


def slowest_time(
    times: Sequence[int], counts: Sequence[int], pipeline: Pipeline = ONE_STAGE
) -> int:
    """Return the duration of a step, in the unit of ``times``.

    Args:
        times: duration of a pass on each replica.
        counts: micro-batches per step of each replica.
        pipeline: pipeline of every replica.
    """
    replicas = zip(times, counts, strict=True)
    return max(time * pipeline.step_passes(count) for time, count in replicas)


def pass_times(
    laps: Sequence[Sequence[int]], counts: Sequence[int], pipeline: Pipeline = ONE_STAGE
) -> tuple[int, ...]:
    """Return the duration of a pass on each replica, at least 1, in the unit of ``laps``.

    Args:
        laps: duration of the computation of each step (outer) on each replica (inner). The median
            over the steps is used, because single steps include other delays.
        counts: micro-batches per step of each replica.
        pipeline: pipeline of every replica.
    """
    medians = [sorted(durations)[(len(laps) - 1) // 2] for durations in zip(*laps, strict=True)]
    replicas = zip(medians, counts, strict=True)
    return tuple(max(lap // pipeline.step_passes(count), 1) for lap, count in replicas)


def split_microbatches(
    times: Sequence[int], sizes: Sequence[int], batch: int, pipeline: Pipeline = ONE_STAGE
) -> tuple[int, ...]:
    """Return the number of micro-batches of each replica that minimizes the time of the slowest
    one.

    Args:
        times: duration of a pass on each replica, a positive integer in any unit.
        sizes: sequences per micro-batch of each replica.
        batch: sequences per step. Every replica processes at least one round.
        pipeline: pipeline of every replica.

    Returns:
        A count for each replica, such that the sum of count times size is ``batch``. Of several
        optimal splits it is the one with the fewest small micro-batches.

    Raises:
        ValueError: no counts have this sum.
    """
    search = _RoundSearch(times, sizes, batch, pipeline)
    max_counts = [search.max_rounds * pipeline.round_size] * len(sizes)
    low, high = 0, slowest_time(times, max_counts, pipeline)
    if search.rounds_of_sizes(high) is None:
        listed_sizes = ", ".join(map(str, sorted(set(sizes), reverse=True)))
        unit = (
            f"rounds of {pipeline.round_size} micro-batches"
            if pipeline.round_size > 1
            else "micro-batches"
        )
        raise ValueError(
            f"{batch} sequences cannot be divided into {unit} of {listed_sizes} sequences, at "
            f"least one for each of the {len(sizes)} replicas"
        )
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if search.rounds_of_sizes(middle) is not None else (middle, high)
    counts = [0] * len(sizes)
    for size, rounds in (search.rounds_of_sizes(high) or {}).items():
        group = [replica for replica, replica_size in enumerate(sizes) if replica_size == size]
        group_times = [times[replica] for replica in group]
        group_counts = _fastest_counts(group_times, rounds, pipeline)
        for replica, count in zip(group, group_counts, strict=True):
            counts[replica] = count
    return tuple(counts)


def _fastest_counts(times: Sequence[int], rounds: int, pipeline: Pipeline) -> list[int]:
    """Return the micro-batches of each of several replicas with equal micro-batch sizes.

    Every replica gets one round; each further round goes to the replica that finishes it first.
    """
    counts = [pipeline.round_size] * len(times)
    # Entries: time at which a replica finishes one more round, index of the replica.
    queue = [(t * pipeline.step_passes(2 * pipeline.round_size), i) for i, t in enumerate(times)]
    heapq.heapify(queue)
    for _ in range(rounds - len(times)):
        _, i = queue[0]
        counts[i] += pipeline.round_size
        heapq.heapreplace(
            queue, (times[i] * pipeline.step_passes(counts[i] + pipeline.round_size), i)
        )
    return counts


class _RoundSearch:
    """Search for numbers of rounds per micro-batch size that make up a batch within a time."""

    def __init__(
        self, times: Sequence[int], sizes: Sequence[int], batch: int, pipeline: Pipeline
    ) -> None:
        self._times = times
        self._sizes = sizes
        self._batch = batch
        self._pipeline = pipeline
        self.max_rounds = max(batch // (min(sizes) * pipeline.round_size), 1)
        """Upper bound of the rounds of one replica."""

    def rounds_of_sizes(self, time: int) -> dict[int, int] | None:
        """Return the number of rounds of each micro-batch size that make up the batch, if no
        replica may take longer than ``time``; None if there is no solution."""
        extra: dict[int, int] = {}  # rounds in addition to the minimum that are possible in time
        minimum: dict[int, int] = {}  # one round per replica
        for pass_time, size in zip(self._times, self._sizes, strict=True):
            max_microbatches = self._pipeline.max_microbatches(time // pass_time)
            rounds = max_microbatches // self._pipeline.round_size
            if not rounds:
                return None
            extra[size] = extra.get(size, 0) + min(rounds, self.max_rounds) - 1
            minimum[size] = minimum.get(size, 0) + 1
        used = sum(size * count for size, count in minimum.items()) * self._pipeline.round_size
        remaining, indivisible = divmod(self._batch - used, self._pipeline.round_size)
        if remaining < 0 or indivisible:
            return None
        added = _counts_for_total(remaining, extra)
        return None if added is None else {size: minimum[size] + added[size] for size in minimum}


def _counts_for_total(total: int, limits: dict[int, int]) -> dict[int, int] | None:
    """Return a count for each size in ``limits``, at most its limit, such that the sum of count
    times size is ``total``. As few as possible of the smallest size are used, then of the next;
    None if there is no solution."""
    sizes = sorted(limits, reverse=True)
    # reachable[k] has bit n set if the k largest sizes can have the sum n.
    reachable = [1]
    mask = (1 << (total + 1)) - 1
    for size in sizes:
        sums, available, part = reachable[-1], min(limits[size], total // size), 1
        while available > 0:
            # Parts of 1, 2, 4, … and the remainder can express every count up to the limit.
            part = min(part, available)
            sums |= (sums << (size * part)) & mask
            available, part = available - part, 2 * part
        reachable.append(sums)
    if not reachable[-1] >> total & 1:
        return None
    counts: dict[int, int] = {}
    for size, before in zip(reversed(sizes), reversed(reachable[:-1]), strict=True):
        counts[size] = next(n for n in range(total // size + 1) if before >> (total - size * n) & 1)
        total -= size * counts[size]
    return counts


AUTO = "auto"
MEASURED_STEPS = 4
"""Steps by which replicas are measured; the first one, which includes warm-up, is ignored."""


@dataclass(frozen=True)
class MicrobatchShare:
    """Share of one replica in a step: ``count`` micro-batches of ``size`` sequences, starting at
    sequence ``first`` of the step."""

    first: int
    size: int
    count: int

    @property
    def stop(self) -> int:
        return self.first + self.size * self.count

    @property
    def micro_batches(self) -> tuple[range, ...]:
        """The positions of each micro-batch's sequences in the step."""
        starts = range(self.first, self.stop, self.size)
        return tuple(range(start, start + self.size) for start in starts)


def uses_microbatch_split(values: Values) -> bool:
    """Return whether training is data parallel over heterogeneous replicas."""
    return bool(values["enable_hetero"]) and values["hetero_mode"] == "dp"


def is_split_measured(values: Values) -> bool:
    """Return whether the numbers of micro-batches are determined by timing the first steps."""
    return uses_microbatch_split(values) and list(values[SPLIT_COUNTS] or ()) == [AUTO]


def replica_ranks(values: Values) -> int:
    """Return the number of ranks of a replica.

    The ranks of a heterogeneous replica are consecutive, in contrast to those of homogeneous
    replicas, because they are on hosts of one device type.
    """
    tp, cp = values["tensor_model_parallel_size"], values["context_parallel_size"]
    return int(tp * cp * values["pipeline_model_parallel_size"])


def replica_device_types(values: Values, replicas: int) -> list[str | None]:
    """Return the device type of each of ``replicas`` replicas; None where it is not given."""
    types = values["hetero_device_types"]
    if types is None:
        return [None] * replicas
    replica_counts = _split_numbers(values, SPLIT_SIZES)[::2]
    pairs = zip(replica_counts, types, strict=True)
    return [device_type for count, device_type in pairs for _ in range(count)]


def describe_replicas(values: Values, ranks: range, device_types: Sequence[str | None]) -> str:
    """Describe the replicas on a range of ranks: ``replicas 0-3 of 16 (A800)``. ``device_types``
    are those of all replicas."""
    size, count = replica_ranks(values), len(device_types)
    replicas = range(ranks.start // size, (ranks.stop - 1) // size + 1)
    return " and ".join(
        f"{format_index_range('replica', indices)} of {count}"
        + (f" ({device_type})" if device_type else "")
        for device_type, indices in groupby(replicas, key=lambda replica: device_types[replica])
    )


def format_index_range(noun: str, indices: Iterable[int]) -> str:
    """Format consecutive indices: ``stage 3``, ``stages 0-2``."""
    first, *following = indices
    return f"{noun}s {first}-{following[-1]}" if following else f"{noun} {first}"


def shares_of(values: Values, replicas: int) -> tuple[MicrobatchShare, ...]:
    """Return the share of each replica in a step; before a measurement, the initial shares.

    Raises:
        ValueError: the batch cannot be divided so; :func:`check_split` reports the reason.
    """
    sizes = _expand_pairs(_split_numbers(values, SPLIT_SIZES))
    return shares_from(sizes, _split_counts(values, sizes, replicas))


def shares_from(sizes: Sequence[int], counts: Sequence[int]) -> tuple[MicrobatchShare, ...]:
    """Return the share of each replica in a step.

    Args:
        sizes: sequences per micro-batch of each replica.
        counts: micro-batches per step of each replica.
    """
    shares: list[MicrobatchShare] = []
    for size, count in zip(sizes, counts, strict=True):
        shares.append(MicrobatchShare(shares[-1].stop if shares else 0, size, count))
    return tuple(shares)


def check_split_syntax(values: Values) -> Iterator[Violation]:
    """Check the arguments of heterogeneous replicas independently of the number of ranks."""
    for name in (SPLIT_SIZES, SPLIT_COUNTS):
        if not _is_pairs(values, name):
            value_text = "micro-batch size" if name == SPLIT_SIZES else "number of micro-batches"
            alternative = f", or {AUTO}" if name == SPLIT_COUNTS else ""
            yield (
                name,
                f"expected pairs [number of replicas, {value_text}, …] of numbers of at least 1"
                f"{alternative}, found {format_value(values[name])}",
            )
    if values[SPLIT_SIZES] is None:
        yield (
            SPLIT_SIZES,
            "is required by hetero_mode: dp: pairs [number of replicas, micro-batch size, …]",
        )
    if is_split_measured(values) and values["global_batch_size"] is None:
        yield "global_batch_size", f"is required by {SPLIT_COUNTS}: {AUTO}"
    types, pairs = values["hetero_device_types"], len(values[SPLIT_SIZES] or ()) // 2
    if types is not None and len(types) != pairs:
        yield (
            "hetero_device_types",
            f"expected one device type per pair of {SPLIT_SIZES} ({pairs}), found {len(types)}",
        )
    if values["hetero_process_meshes"] is not None:
        yield "hetero_process_meshes", "is not supported with hetero_mode: dp; leave it out"
    yield from _check_split_experts(values)


def _check_split_experts(values: Values) -> Iterator[Violation]:
    """Check experts, and recomputation per micro-batch, in heterogeneous replicas."""
    if values["expert_model_parallel_size"] > 1:
        yield (
            "expert_model_parallel_size",
            "must be 1 with hetero_mode: dp: expert-parallel ranks exchange tokens in every "
            "micro-batch, but replicas have different numbers of micro-batches",
        )
    if "global_aux_loss" in (values["moe_router_load_balancing_type"] or ()):
        yield (
            "moe_router_load_balancing_type",
            "global_aux_loss is not supported with hetero_mode: dp: it needs the same number of "
            "micro-batches on all replicas; use aux_loss or seq_aux_loss",
        )
    for name in STAGE_RECOMPUTE:
        if values[name] is not None:
            yield (
                name,
                "is not supported with hetero_mode: dp: replicas have different numbers of "
                "micro-batches",
            )
    tp, experts_tp = values["tensor_model_parallel_size"], values["expert_tensor_parallel_size"]
    if not values["num_moe_experts"] or values["pipeline_model_parallel_size"] == 1:
        return
    if values["context_parallel_size"] > 1:
        yield (
            "context_parallel_size",
            "with hetero_mode: dp and num_moe_experts, cannot be combined with "
            "pipeline_model_parallel_size above 1",
        )
    elif experts_tp not in (None, tp):
        yield (
            "expert_tensor_parallel_size",
            f"with hetero_mode: dp and a pipeline, must equal tensor_model_parallel_size {tp}, "
            f"found {experts_tp}",
        )


def check_split(values: Values, replicas: int) -> Iterator[Violation]:
    """Check heterogeneous replicas against the number of replicas and the batch size."""
    for name in (SPLIT_SIZES, SPLIT_COUNTS):
        total_count = sum(_split_numbers(values, name)[::2])
        if total_count and total_count != replicas:
            yield name, f"expected {replicas} replicas, found {total_count}"
            return
    sizes, batch = _expand_pairs(_split_numbers(values, SPLIT_SIZES)), values["global_batch_size"]
    try:
        counts = _split_counts(values, sizes, replicas)
    except ValueError as error:
        yield "global_batch_size", str(error)
        return
    total = sum(size * count for size, count in zip(sizes, counts, strict=True))
    if batch is not None and total != batch:
        if values[SPLIT_COUNTS] is None:
            message = f"{batch} is not divisible by the micro-batches of all replicas, {sum(sizes)}"
        else:
            message = f"expected the sum of the replicas' sequences, {total}, found {batch}"
        yield "global_batch_size", message
    round_size = pipeline_of(values).round_size
    if uneven_count := next((count for count in counts if count % round_size), None):
        yield (
            SPLIT_COUNTS if values[SPLIT_COUNTS] is not None else "global_batch_size",
            f"a replica has {uneven_count} micro-batches, which is not divisible by "
            f"pipeline_model_parallel_size {round_size}, as virtual stages require",
        )


def split_batch_size(values: Values, replicas: int) -> int:
    """Return the number of sequences per step of all replicas."""
    return shares_of(values, replicas)[-1].stop


def _is_pairs(values: Values, name: str) -> bool:
    """Return whether an argument is not given, ``auto``, or pairs of positive integers."""
    if values[name] is None or (name == SPLIT_COUNTS and is_split_measured(values)):
        return True
    try:
        pairs = _split_numbers(values, name)
    except ValueError:
        return False
    return len(pairs) % 2 == 0 and min(pairs, default=0) >= 1


def _split_numbers(values: Values, name: str) -> list[int]:
    """Return the flattened pairs of an argument; empty if it is not given, or ``auto``.

    Raises:
        ValueError: an item is not an integer.
    """
    if name == SPLIT_COUNTS and is_split_measured(values):
        return []
    return [int(number) for number in values[name] or ()]


def _split_counts(values: Values, sizes: list[int], replicas: int) -> Sequence[int]:
    """Return the number of micro-batches per step of each replica. Before a measurement, all
    replicas are assumed to be equally fast."""
    batch = values["global_batch_size"] or sum(sizes)
    if is_split_measured(values):
        return split_microbatches([1] * len(sizes), sizes, batch, pipeline_of(values))
    counts = _expand_pairs(_split_numbers(values, SPLIT_COUNTS))
    return counts or [batch // sum(sizes)] * replicas


def _expand_pairs(pairs: list[int]) -> list[int]:
    return [value for n, value in zip(pairs[::2], pairs[1::2], strict=True) for _ in range(n)]


_MAX_FORMATTED_GROUPS = 8


@dataclass(frozen=True)
class MeasuredSplit:
    """Micro-batches per replica that were chosen by measured speed. Checkpoints store it."""

    counts: tuple[int, ...]
    """Micro-batches per step of each replica."""
    times: tuple[int, ...]
    """Duration of a pass on each replica, in nanoseconds."""
    conditions: Mapping[str, Any]
    """Conditions of the measurement (:func:`measured_conditions`)."""

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> MeasuredSplit:
        return cls(tuple(state["counts"]), tuple(state["times"]), dict(state["conditions"]))

    def state_dict(self) -> dict[str, Any]:
        return {key: list(v) if isinstance(v, tuple) else v for key, v in asdict(self).items()}

    def differing_conditions(self, conditions: Mapping[str, Any]) -> str:
        """Return the names of conditions that differ from those of the measurement; empty if all
        are equal."""
        return ", ".join(key for key in conditions if conditions[key] != self.conditions.get(key))

    def format(self) -> str:
        """Format the split for the log.

        For example ``2 replicas (A800): 6 micro-batches of 12.1-12.3 ms each, 1 replica (BI): 2
        micro-batches of 36.0 ms each; equivalent to hetero_num_microbatches: [2, 6, 1, 2]``.
        """
        groups = list(self._format_groups())
        if len(groups) > _MAX_FORMATTED_GROUPS:
            groups = [*groups[: _MAX_FORMATTED_GROUPS - 1], "…", groups[-1]]
        pairs = [n for count, equal in groupby(self.counts) for n in (len(list(equal)), count)]
        return f"{', '.join(groups)}; equivalent to {SPLIT_COUNTS}: {pairs}"

    def _format_groups(self) -> Iterator[str]:
        """Yield the description of each group of consecutive replicas with equal counts and
        devices."""
        replicas = zip(self.counts, self.times, self.conditions["devices"], strict=True)
        for (count, device), group in groupby(replicas, key=lambda replica: replica[::2]):
            times_ms = sorted(time / 1e6 for _, time, _ in group)
            low, high = f"{times_ms[0]:,.1f}", f"{times_ms[-1]:,.1f}"
            time_range = low if low == high else f"{low}-{high}"
            replica_text = f"{len(times_ms)} replica{'s' * (len(times_ms) > 1)}"
            count_text = f"{count} micro-batch{'es' * (count > 1)}"
            yield (
                f"{replica_text} ({device}): {count_text} of {time_range} ms{' each' * (count > 1)}"
            )


def measured_conditions(values: Values, products: Sequence[str]) -> dict[str, Any]:
    """Return the conditions under which a measured split is valid; the keys are used in messages.

    Args:
        values: derived arguments by name.
        products: product name of the device of each replica, which is more precise than the device
            types in the YAML.
    """
    types = replica_device_types(values, len(products))
    pipeline = pipeline_of(values)
    return {
        "devices": [kind or product for kind, product in zip(types, products, strict=True)],
        "products": list(products),
        "micro-batch sizes": [share.size for share in values["shares"]],
        "global batch size": values["global_batch_size"],
        "sequence length": values["seq_length"],
        "parallel sizes": [
            values["tensor_model_parallel_size"],
            values["context_parallel_size"],
            pipeline.stages,
            pipeline.chunks,
        ],
    }
