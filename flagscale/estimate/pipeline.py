"""How long a pipeline's step takes: Megatron's 1F1B schedules, played with the stages' times.

A stage does its forward and backward passes in the order of the schedule, each as soon as the
stage is free and what it needs has come. Narayanan et al., "Efficient Large-Scale Language Model
Training on GPU Clusters Using Megatron-LM" (2021), describe both schedules; Zhuang et al., "On
Optimizing the Communication of Model Parallelism" (2023), the eager kind of the first: stages do
more forward passes ahead, so that what they send each other has the time of one to arrive.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Passes:
    """Seconds of a stage for one micro-batch, of each of its model chunks."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]

    @property
    def both(self) -> float:
        return sum(self.forward) + sum(self.backward)


class Work(NamedTuple):
    """A pass of one micro-batch through one chunk of a stage."""

    backward: bool
    chunk: int
    micro_batch: int


@dataclass(frozen=True)
class Played:
    """A step's pipeline: its seconds, and those in which each stage computes."""

    seconds: float
    busy: tuple[float, ...]


def play(
    stages: Sequence[Passes],
    micro_batches: int,
    transfers: Sequence[float] | None = None,
    *,
    eager: bool = False,
) -> Played:
    """Play a step.

    Args:
        stages: their passes, all with as many chunks.
        micro_batches: of a step; with several chunks a multiple of the number of stages.
        transfers: seconds that an activation, or its gradient, is on its way from a stage to the
            next and back, one for each stage (the last one's is to the first); none without it.
        eager: the schedule is of the eager kind.
    """
    count, chunks = len(stages), len(stages[0].forward)
    played = min(micro_batches, 4 * count)
    orders = [list(order(count, index, played, chunks, eager=eager)) for index in range(count)]
    made = _play(stages, orders, transfers or [0.0] * count, chunks)
    # Once the pipeline is full its slowest stage sets the pace.
    left = micro_batches - played
    pace = max(stage.both for stage in stages)
    busy = tuple(stage.both * micro_batches for stage in stages)
    return Played(made + left * pace, busy)


def _play(
    stages: Sequence[Passes],
    orders: Sequence[Sequence[Work]],
    transfers: Sequence[float],
    chunks: int,
) -> float:
    count = len(stages)
    ended: dict[tuple[int, Work], float] = {}
    clock, place = [0.0] * count, [0] * count
    waiting = True
    while waiting:
        waiting, moved = False, False
        for index, works in enumerate(orders):
            while place[index] < len(works):
                work = works[place[index]]
                ready = _ready(ended, index, work, count, chunks, transfers)
                if ready is None:
                    waiting = True
                    break
                passes = stages[index].backward if work.backward else stages[index].forward
                clock[index] = max(clock[index], ready) + passes[work.chunk]
                ended[index, work] = clock[index]
                place[index] += 1
                moved = True
        assert moved or not waiting, "stages wait for each other"
    return max(clock)


def _ready(
    ended: dict[tuple[int, Work], float],
    index: int,
    work: Work,
    count: int,
    chunks: int,
    transfers: Sequence[float],
) -> float | None:
    """When what a pass needs has come; None while it has not been sent."""
    last = work.chunk == chunks - 1 and index == count - 1
    if work.backward and last:
        return ended.get((index, work._replace(backward=False)))
    if not work.backward and work.chunk == 0 and index == 0:
        return 0.0
    step = 1 if work.backward else -1
    other = (index + step) % count
    wraps = index + step not in range(count)
    needed = work._replace(chunk=work.chunk + step if wraps else work.chunk)
    sent = ended.get((other, needed))
    # The way is named by the stage it starts from going forward.
    return None if sent is None else sent + transfers[index if work.backward else other]


def order(
    stages: int, index: int, micro_batches: int, chunks: int = 1, *, eager: bool = False
) -> Iterator[Work]:
    """What a stage does in a step, one after another."""
    total = micro_batches * chunks
    ahead = min(warm_up(stages, index, chunks, eager=eager), total)
    forwards = [_work(stages, number, chunks, backward=False) for number in range(total)]
    backwards = [_work(stages, number, chunks, backward=True) for number in range(total)]
    yield from forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        yield forward
        yield backward
    yield from backwards[total - ahead :]


def warm_up(stages: int, index: int, chunks: int = 1, *, eager: bool = False) -> int:
    """Forward passes of a stage before its first backward pass can follow one."""
    if chunks == 1:
        return (stages - index - 1) * (2 if eager else 1)
    return 2 * (stages - index - 1) + (chunks - 1) * stages


def _work(stages: int, number: int, chunks: int, *, backward: bool) -> Work:
    """The ``number``-th forward or backward pass: as many micro-batches as there are stages go
    through a chunk before the next chunk's turn."""
    if chunks == 1:
        return Work(backward, 0, number)
    group, inside = divmod(number, stages * chunks)
    chunk, micro_batch = divmod(inside, stages)
    return Work(backward, chunks - 1 - chunk if backward else chunk, group * stages + micro_batch)
