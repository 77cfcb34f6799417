"""How many micro-batches each of unlike replicas takes of a step, so that none waits long.

Whole numbers throughout: every rank works it out for itself, and all have to find the same.
"""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Sequence

from flagscale.config.arguments.pipeline import ONE_STAGE, Pipeline


def slowest(times: Sequence[int], counts: Sequence[int], pipeline: Pipeline = ONE_STAGE) -> int:
    """How long a step is, in the unit of ``times``: what a pass takes on each replica."""
    steps = zip(times, counts, strict=True)
    return max(time * pipeline.passes(count) for time, count in steps)


def pass_times(
    laps: Sequence[Sequence[int]], counts: Sequence[int], pipeline: Pipeline = ONE_STAGE
) -> tuple[int, ...]:
    """What a pass takes on each replica, at least 1: of steps' ``laps``, a time for each replica
    with so many micro-batches, the median, for a step may be held up by what is no work."""
    medians = [statistics.median_low(own) for own in zip(*laps, strict=True)]
    steps = zip(medians, counts, strict=True)
    return tuple(max(lap // pipeline.passes(count), 1) for lap, count in steps)


def share_out(
    times: Sequence[int], sizes: Sequence[int], batch: int, pipeline: Pipeline = ONE_STAGE
) -> tuple[int, ...]:
    """How many micro-batches each replica takes so that the slowest is done soonest.

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
    plan = _Plan(times, sizes, batch, pipeline)
    low, high = 0, slowest(times, [plan.limit * pipeline.round] * len(sizes), pipeline)
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
        members = [replica for replica, own in enumerate(sizes) if own == size]
        own_times = [times[replica] for replica in members]
        for replica, count in zip(members, _spread(own_times, rounds, pipeline), strict=True):
            counts[replica] = count
    return tuple(counts)


def _spread(times: Sequence[int], rounds: int, pipeline: Pipeline) -> list[int]:
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


class _Plan:
    """Which rounds of micro-batches of which size make up a batch within a time."""

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
        for own, size in zip(self._times, self._sizes, strict=True):
            most = self._pipeline.most(time // own) // self._pipeline.round
            if not most:
                return None
            spare[size] = spare.get(size, 0) + min(most, self.limit) - 1
            least[size] = least.get(size, 0) + 1
        taken = sum(size * count for size, count in least.items()) * self._pipeline.round
        rest, over = divmod(self._batch - taken, self._pipeline.round)
        if rest < 0 or over:
            return None
        more = _made_up(rest, spare)
        return None if more is None else {size: least[size] + more[size] for size in least}


def _made_up(total: int, spare: dict[int, int]) -> dict[int, int] | None:
    """How many of each size, at most ``spare`` of it, sum to ``total``, with as few as possible of
    the smallest size, then of the next; None where nothing does."""
    ordered = sorted(spare, reverse=True)
    # Bit n of a number: n can be made of the sizes so far.
    reachable = [1]
    mask = (1 << (total + 1)) - 1
    for size in ordered:
        found, left, part = reachable[-1], min(spare[size], total // size), 1
        while left > 0:
            part = min(part, left)
            found |= (found << (size * part)) & mask
            left, part = left - part, 2 * part
        reachable.append(found)
    if not reachable[-1] >> total & 1:
        return None
    counts: dict[int, int] = {}
    for size, before in zip(reversed(ordered), reversed(reachable[:-1]), strict=True):
        counts[size] = next(n for n in range(total // size + 1) if before >> (total - size * n) & 1)
        total -= size * counts[size]
    return counts
