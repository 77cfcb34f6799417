"""Data parallelism over heterogeneous devices: replicas that take different shares of a step's
samples.

Every replica holds the whole model; the faster ones take larger micro-batches, or more of them. A
step's samples are one range of the data's order, cut at the replicas' shares, and the gradient is
divided by the tokens of all, so that the step equals that of homogeneous replicas. Pure, no torch.
"""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from flagscale.config.arguments.rules.parallel_layout import ONE_STAGE, Pipeline, pipeline_of
from flagscale.config.arguments.spec.argument import Values, Violation
from flagscale.config.arguments.spec.system_arguments import (
    SPLIT_COUNTS,
    SPLIT_SIZES,
    STAGE_RECOMPUTE,
)


def slowest_time(
    times: Sequence[int], counts: Sequence[int], pipeline: Pipeline = ONE_STAGE
) -> int:
    """Return the duration of a step, in the unit of ``times``, from the duration of a pass on each
    replica."""
    steps = zip(times, counts, strict=True)
    return max(time * pipeline.passes(count) for time, count in steps)


def pass_times(
    laps: Sequence[Sequence[int]], counts: Sequence[int], pipeline: Pipeline = ONE_STAGE
) -> tuple[int, ...]:
    """Return the duration of a pass on each replica, at least 1. It is the median over the steps in
    ``laps``, because a single step may include delays that are not computation."""
    medians = [statistics.median_low(durations) for durations in zip(*laps, strict=True)]
    steps = zip(medians, counts, strict=True)
    return tuple(max(lap // pipeline.passes(count), 1) for lap, count in steps)


def split_microbatches(
    times: Sequence[int], sizes: Sequence[int], batch: int, pipeline: Pipeline = ONE_STAGE
) -> tuple[int, ...]:
    """Return the number of micro-batches of each replica that minimizes the time of the slowest
    one.

    Args:
        times: what a micro-batch takes on each replica, a positive whole number in any unit; in a
            pipeline what one chunk of a stage takes for it.
        sizes: sequences of a micro-batch of each replica.
        batch: sequences of a step, of which every replica takes at least a micro-batch.

    Returns:
        A count for each replica; with their sizes they make up the batch. Of several shares that
        are as good it is that with the fewest small micro-batches.

    Raises:
        ValueError: no counts make up the batch.
    """
    plan = _RoundSearch(times, sizes, batch, pipeline)
    low, high = 0, slowest_time(times, [plan.limit * pipeline.round] * len(sizes), pipeline)
    if plan.rounds_of_sizes(high) is None:
        each = ", ".join(map(str, sorted(set(sizes), reverse=True)))
        of = f"rounds of {pipeline.round} micro-batches" if pipeline.round > 1 else "micro-batches"
        raise ValueError(
            f"{batch} sequences cannot be made up of {of} of {each} sequences, at least one for "
            f"each of the {len(sizes)} replicas"
        )
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if plan.rounds_of_sizes(middle) is not None else (middle, high)
    counts = [0] * len(sizes)
    for size, rounds in (plan.rounds_of_sizes(high) or {}).items():
        members = [replica for replica, replica_size in enumerate(sizes) if replica_size == size]
        own_times = [times[replica] for replica in members]
        for replica, count in zip(
            members, _fastest_counts(own_times, rounds, pipeline), strict=True
        ):
            counts[replica] = count
    return tuple(counts)


def _fastest_counts(times: Sequence[int], rounds: int, pipeline: Pipeline) -> list[int]:
    """Rounds of micro-batches over replicas that take the same sizes, one to each, every other to
    the one that is done with it first."""
    counts = [pipeline.round] * len(times)
    queue = [(t * pipeline.passes(2 * pipeline.round), i) for i, t in enumerate(times)]
    heapq.heapify(queue)
    for _ in range(rounds - len(times)):
        _, i = queue[0]
        counts[i] += pipeline.round
        heapq.heapreplace(queue, (times[i] * pipeline.passes(counts[i] + pipeline.round), i))
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
        self.limit = max(batch // (min(sizes) * pipeline.round), 1)
        """More rounds than this no replica can take."""

    def rounds_of_sizes(self, time: int) -> dict[int, int] | None:
        """Rounds of each size that make up the batch, with no replica busy for longer than
        ``time``; None where there are none."""
        spare: dict[int, int] = {}
        least: dict[int, int] = {}
        for times, size in zip(self._times, self._sizes, strict=True):
            most = self._pipeline.most(time // times) // self._pipeline.round
            if not most:
                return None
            spare[size] = spare.get(size, 0) + min(most, self.limit) - 1
            least[size] = least.get(size, 0) + 1
        used = sum(size * count for size, count in least.items()) * self._pipeline.round
        remaining, over = divmod(self._batch - used, self._pipeline.round)
        if remaining < 0 or over:
            return None
        more = _counts_for_total(remaining, spare)
        return None if more is None else {size: least[size] + more[size] for size in least}


def _counts_for_total(total: int, spare: dict[int, int]) -> dict[int, int] | None:
    """Return how many of each size, at most ``spare`` of it, sum to ``total``, using as few as
    possible of the smallest size, then of the next; None if there is no solution."""
    ordered = sorted(spare, reverse=True)
    # Bit n of a number: n can be made of the sizes so far.
    reachable = [1]
    mask = (1 << (total + 1)) - 1
    for size in ordered:
        sums, available, part = reachable[-1], min(spare[size], total // size), 1
        while available > 0:
            part = min(part, available)
            sums |= (sums << (size * part)) & mask
            available, part = available - part, 2 * part
        reachable.append(sums)
    if not reachable[-1] >> total & 1:
        return None
    counts: dict[int, int] = {}
    for size, before in zip(reversed(ordered), reversed(reachable[:-1]), strict=True):
        counts[size] = next(n for n in range(total // size + 1) if before >> (total - size * n) & 1)
        total -= size * counts[size]
    return counts


AUTO = "auto"
MEASURED_STEPS = 4
"""Steps that show how fast replicas are; the first, which builds and warms up, does not count."""


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
        """The places of each micro-batch's sequences in the step."""
        starts = range(self.first, self.stop, self.size)
        return tuple(range(start, start + self.size) for start in starts)


def uses_microbatch_split(values: Values) -> bool:
    """Return whether training is data parallel over heterogeneous replicas."""
    return bool(values["enable_hetero"]) and values["hetero_mode"] == "dp"


def is_split_measured(values: Values) -> bool:
    """Return whether the numbers of micro-batches are determined by timing the first steps."""
    return uses_microbatch_split(values) and list(values[SPLIT_COUNTS] or ()) == [AUTO]


def replica_ranks(values: Values) -> int:
    """Ranks of a replica. They are numbered one after another, unlike those of like replicas: a
    replica's ranks lie on hosts of one type."""
    tp, cp = values["tensor_model_parallel_size"], values["context_parallel_size"]
    return int(tp * cp * values["pipeline_model_parallel_size"])


def replica_device_types(values: Values, replicas: int) -> list[str | None]:
    """The type of the devices that each replica lies on, None where nothing is said."""
    types = values["hetero_device_types"]
    if types is None:
        return [None] * replicas
    numbers = _split_numbers(values, SPLIT_SIZES)[::2]
    return [kind for number, kind in zip(numbers, types, strict=True) for _ in range(number)]


def describe_replicas(values: Values, ranks: range, kinds: Sequence[str | None]) -> str:
    """Describe the replicas of a range of ranks: ``replicas 0-3 of 16 (A800)``. ``kinds`` are the
    device types of all replicas."""
    each = replica_ranks(values)
    replicas_of_host = range(ranks.start // each, (ranks.stop - 1) // each + 1)
    return " and ".join(
        f"{number_range('replica', same)} of {len(kinds)}" + (f" ({kind})" if kind else "")
        for kind, same in groupby(replicas_of_host, key=lambda replica: kinds[replica])
    )


def number_range(what: str, indices: Iterable[int]) -> str:
    """Such as ``stage 3``, ``stages 0-2``."""
    first, *following = indices
    return f"{what}s {first}-{following[-1]}" if following else f"{what} {first}"


def shares_of(values: Values, replicas: int) -> tuple[MicrobatchShare, ...]:
    """Return the share of each replica in a step; before a measurement, the initial shares.

    Raises:
        ValueError: :func:`world` says why there are none.
    """
    sizes = _expand_pairs(_split_numbers(values, SPLIT_SIZES))
    return shares_from(sizes, _split_counts(values, sizes, replicas))


def shares_from(sizes: Sequence[int], counts: Sequence[int]) -> tuple[MicrobatchShare, ...]:
    """The shares of replicas that take so many micro-batches of such sizes."""
    shares: list[MicrobatchShare] = []
    for size, count in zip(sizes, counts, strict=True):
        shares.append(MicrobatchShare(shares[-1].stop if shares else 0, size, count))
    return tuple(shares)


def check_split_syntax(values: Values) -> Iterator[Violation]:
    """Rules that do not depend on the number of ranks."""
    for name in (SPLIT_SIZES, SPLIT_COUNTS):
        if not _is_pairs(values, name):
            message = "expected pairs of replicas and what each of them takes, all at least 1"
            yield name, message + (f", or {AUTO}" if name == SPLIT_COUNTS else "")
    if values[SPLIT_SIZES] is None:
        yield SPLIT_SIZES, "is needed by hetero_mode: dp: which replicas take how much?"
    if is_split_measured(values) and values["global_batch_size"] is None:
        yield "global_batch_size", f"is needed by {SPLIT_COUNTS}: {AUTO}: what is to be shared out?"
    types, kinds = values["hetero_device_types"], len(values[SPLIT_SIZES] or ()) // 2
    if types is not None and len(types) != kinds:
        yield "hetero_device_types", f"{len(types)} for the {kinds} pairs of {SPLIT_SIZES}"
    if values["hetero_process_meshes"] is not None:
        yield "hetero_process_meshes", "is for hetero_mode: pp; replicas are laid out alike"
    yield from _check_split_experts(values)


def _check_split_experts(values: Values) -> Iterator[Violation]:
    if values["expert_model_parallel_size"] > 1:
        yield (
            "expert_model_parallel_size",
            "ranks that share experts must take their tokens together, which unlike replicas do "
            "not",
        )
    if "global_aux_loss" in (values["moe_router_load_balancing_type"] or ()):
        yield (
            "moe_router_load_balancing_type",
            "global_aux_loss counts tokens over the micro-batches that replicas take together, "
            "which unlike replicas do not; take aux_loss or seq_aux_loss",
        )
    for name in STAGE_RECOMPUTE:
        if values[name] is not None:
            yield name, "has rows for micro-batches, of which unlike replicas have unlike numbers"
    tp, experts_tp = values["tensor_model_parallel_size"], values["expert_tensor_parallel_size"]
    if not values["num_moe_experts"] or values["pipeline_model_parallel_size"] == 1:
        return
    if values["context_parallel_size"] > 1:
        yield "context_parallel_size", "replicas with experts have either this or a pipeline"
    elif experts_tp not in (None, tp):
        message = f"{experts_tp}: in replicas with a pipeline it is tensor_model_parallel_size {tp}"
        yield "expert_tensor_parallel_size", message


def check_split(values: Values, replicas: int) -> Iterator[Violation]:
    """Rules of the number of replicas and of the batch."""
    for name in (SPLIT_SIZES, SPLIT_COUNTS):
        total_count = sum(_split_numbers(values, name)[::2])
        if total_count and total_count != replicas:
            yield name, f"speaks of {total_count} replicas, and there are {replicas}"
            return
    sizes, batch = _expand_pairs(_split_numbers(values, SPLIT_SIZES)), values["global_batch_size"]
    try:
        counts = _split_counts(values, sizes, replicas)
    except ValueError as error:
        yield "global_batch_size", str(error)
        return
    total = sum(size * count for size, count in zip(sizes, counts, strict=True))
    if batch is not None and total != batch:
        how = f"do not divide into the replicas' {sum(sizes)}"
        if values[SPLIT_COUNTS] is not None:
            how = f"are not the replicas' {total}"
        yield "global_batch_size", f"its {batch} sequences {how}"
    each = pipeline_of(values).round
    if wrong := next((count for count in counts if count % each), None):
        yield (
            SPLIT_COUNTS if values[SPLIT_COUNTS] is not None else "global_batch_size",
            f"gives a replica {wrong} micro-batches, which pipeline_model_parallel_size {each} "
            "with virtual stages must divide",
        )


def split_batch_size(values: Values, replicas: int) -> int:
    """Sequences of a step."""
    return shares_of(values, replicas)[-1].stop


def _is_pairs(values: Values, name: str) -> bool:
    """Return whether an argument is missing, measured, or pairs of numbers."""
    if values[name] is None or (name == SPLIT_COUNTS and is_split_measured(values)):
        return True
    try:
        pairs = _split_numbers(values, name)
    except ValueError:
        return False
    return len(pairs) % 2 == 0 and min(pairs, default=0) >= 1


def _split_numbers(values: Values, name: str) -> list[int]:
    """The pairs of an argument, one after another; none where it is not given, or to be measured.

    Raises:
        ValueError: a word is no number.
    """
    if name == SPLIT_COUNTS and is_split_measured(values):
        return []
    return [int(number) for number in values[name] or ()]


def _split_counts(values: Values, sizes: list[int], replicas: int) -> Sequence[int]:
    """Micro-batches of each replica. Those to be measured are as even as the batch allows: shared
    out as if all replicas took equally long for one."""
    batch = values["global_batch_size"] or sum(sizes)
    if is_split_measured(values):
        return split_microbatches([1] * len(sizes), sizes, batch, pipeline_of(values))
    counts = _expand_pairs(_split_numbers(values, SPLIT_COUNTS))
    return counts or [batch // sum(sizes)] * replicas


def _expand_pairs(pairs: list[int]) -> list[int]:
    return [what for n, what in zip(pairs[::2], pairs[1::2], strict=True) for _ in range(n)]
