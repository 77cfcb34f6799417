"""Simulation of Megatron's 1F1B pipeline schedules with the pass times of each stage.

A pass is the forward or backward computation of one micro-batch in one model chunk of a stage. A
stage runs its passes in the order of the schedule, each as soon as the stage is idle and the input
has arrived. Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM" (2021), describe the plain and the interleaved schedule. Zhuang et al., "On Optimizing
the Communication of Model Parallelism" (2023), describe the eager variant of the plain one: stages
run more forward passes ahead, so that transfers overlap with a pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class StagePassTimes:
    """Seconds of a stage's passes for one micro-batch, by model chunk."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]

    @property
    def total_seconds(self) -> float:
        return sum(self.forward) + sum(self.backward)


class PipelinePass(NamedTuple):
    """A pass of one micro-batch through one chunk of a stage."""

    is_backward: bool
    chunk: int
    micro_batch: int


@dataclass(frozen=True)
class SimulatedStep:
    """Simulated pipeline: seconds of the step, and seconds in which each stage computes."""

    seconds: float
    busy_seconds: tuple[float, ...]


def simulate_step(
    stages: Sequence[StagePassTimes],
    micro_batches: int,
    transfer_seconds: Sequence[float] | None = None,
    *,
    eager: bool = False,
) -> SimulatedStep:
    """Simulate a step.

    At most four micro-batches per stage are simulated; the slowest stage determines the time of
    the remaining ones.

    Args:
        stages: pass times of each stage, all with the same number of chunks.
        micro_batches: number per step; with several chunks a multiple of the number of stages.
        transfer_seconds: time to send an activation from a stage to the next one, or a gradient
            back; one per stage, where the last one's is to the first stage. Zero if None.
        eager: use the eager variant of the schedule.
    """
    count, chunks = len(stages), len(stages[0].forward)
    simulated_count = min(micro_batches, 4 * count)
    schedules = [
        list(iter_schedule(count, index, simulated_count, chunks, eager=eager))
        for index in range(count)
    ]
    simulated_seconds = _run_schedules(stages, schedules, transfer_seconds or [0.0] * count, chunks)
    # Once the pipeline is full, its slowest stage limits the throughput.
    remaining_count = micro_batches - simulated_count
    slowest_stage_seconds = max(stage.total_seconds for stage in stages)
    busy_seconds = tuple(stage.total_seconds * micro_batches for stage in stages)
    return SimulatedStep(simulated_seconds + remaining_count * slowest_stage_seconds, busy_seconds)


def _run_schedules(
    stages: Sequence[StagePassTimes],
    schedules: Sequence[Sequence[PipelinePass]],
    transfer_seconds: Sequence[float],
    chunks: int,
) -> float:
    count = len(stages)
    end_times: dict[tuple[int, PipelinePass], float] = {}
    stage_times, positions = [0.0] * count, [0] * count
    is_blocked = True
    while is_blocked:
        is_blocked, has_progress = False, False
        for index, passes_in_order in enumerate(schedules):
            while positions[index] < len(passes_in_order):
                next_pass = passes_in_order[positions[index]]
                input_time = _input_arrival(
                    end_times, index, next_pass, count, chunks, transfer_seconds
                )
                if input_time is None:
                    is_blocked = True
                    break
                durations = (
                    stages[index].backward if next_pass.is_backward else stages[index].forward
                )
                stage_times[index] = (
                    max(stage_times[index], input_time) + durations[next_pass.chunk]
                )
                end_times[index, next_pass] = stage_times[index]
                positions[index] += 1
                has_progress = True
        assert has_progress or not is_blocked, "stages wait for each other"
    return max(stage_times)


def _input_arrival(
    end_times: dict[tuple[int, PipelinePass], float],
    index: int,
    next_pass: PipelinePass,
    count: int,
    chunks: int,
    transfer_seconds: Sequence[float],
) -> float | None:
    """Return the time at which the input of a pass arrives; None if it has not been sent yet."""
    is_last = next_pass.chunk == chunks - 1 and index == count - 1
    if next_pass.is_backward and is_last:
        return end_times.get((index, next_pass._replace(is_backward=False)))
    if not next_pass.is_backward and next_pass.chunk == 0 and index == 0:
        return 0.0
    step = 1 if next_pass.is_backward else -1
    sender = (index + step) % count
    is_other_chunk = index + step not in range(count)
    source_pass = next_pass._replace(
        chunk=next_pass.chunk + step if is_other_chunk else next_pass.chunk
    )
    sent_at = end_times.get((sender, source_pass))
    # Transfers are indexed by the stage that sends in the forward direction.
    return (
        None
        if sent_at is None
        else sent_at + transfer_seconds[index if next_pass.is_backward else sender]
    )


def iter_schedule(
    stages: int, index: int, micro_batches: int, chunks: int = 1, *, eager: bool = False
) -> Iterator[PipelinePass]:
    """Yield the passes of a stage in a step in their order. ``stages`` is the number of stages,
    ``index`` the stage's own, and ``chunks`` the number of model chunks per stage.
    """
    total = micro_batches * chunks
    warmup = min(count_warmup_passes(stages, index, chunks, eager=eager), total)
    forwards = [_nth_pass(stages, number, chunks, is_backward=False) for number in range(total)]
    backwards = [_nth_pass(stages, number, chunks, is_backward=True) for number in range(total)]
    yield from forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        yield forward
        yield backward
    yield from backwards[total - warmup :]


def count_warmup_passes(stages: int, index: int, chunks: int = 1, *, eager: bool = False) -> int:
    """Return the number of forward passes that a stage runs before its first pair of a forward and
    a backward pass.
    """
    if chunks == 1:
        return (stages - index - 1) * (2 if eager else 1)
    return 2 * (stages - index - 1) + (chunks - 1) * stages


def _nth_pass(stages: int, number: int, chunks: int, *, is_backward: bool) -> PipelinePass:
    """Return the ``number``-th forward or backward pass of a stage.

    Groups of as many micro-batches as there are stages pass a chunk before the next chunk.
    """
    if chunks == 1:
        return PipelinePass(is_backward, 0, number)
    group, offset = divmod(number, stages * chunks)
    chunk, micro_batch = divmod(offset, stages)
    return PipelinePass(
        is_backward, chunks - 1 - chunk if is_backward else chunk, group * stages + micro_batch
    )
