"""Measurements of the NVLink engine and of NCCL for nvlink_check.py.

Collectives are timed in CUDA graphs and in eager calls. The time and memory that the creation of
groups takes are measured, too.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from flagscale.comm.fsccl.nvlink import KernelShape
from flagscale.comm.fsccl.nvlink_world import NvlinkGroup, NvlinkWorld, capture_graph
from flagscale.comm.fsccl.tune import KernelTiming

MEASURED_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
MESSAGE_SIZES = tuple(1 << power for power in range(10, 29, 2))
_REPETITIONS, _MAX_TRIES = 5, 3
_LONG_GRAPH_MICROSECONDS = 2000.0  # approximate work in a long graph
_LONG_GRAPH_CALLS, _SHORT_GRAPH_CALLS = 100, 5  # maximum calls
_MAX_FLAGGED_BYTES, _MAX_LINES_BYTES = 256 << 10, 4 << 20


@dataclass
class MessageBuffers:
    """Input and output of a collective, in bfloat16."""

    source: torch.Tensor
    out: torch.Tensor


def take_buffers(
    collective: str, message_bytes: int, ranks: int, pool: torch.Tensor
) -> MessageBuffers:
    """Return an input and an output in ``pool``, a bfloat16 tensor with room for both.

    Args:
        collective: name of the collective.
        message_bytes: size of the whole message, which is rounded down to equal parts of whole
            16-byte vectors, except for all_reduce.
        ranks: number of ranks.
        pool: memory for the buffers.
    """
    part_elements = max(8, message_bytes // 2 // ranks // 8 * 8)
    all_parts = pool[: part_elements * ranks]
    one_part = pool[part_elements * ranks :][:part_elements]
    if collective == "all_reduce":
        return MessageBuffers(pool[: message_bytes // 2], pool[: message_bytes // 2])
    if collective == "all_gather":
        return MessageBuffers(one_part, all_parts)
    if collective == "reduce_scatter":
        return MessageBuffers(all_parts, one_part)
    return MessageBuffers(pool[part_elements * ranks :][: part_elements * ranks], all_parts)


def candidate_shapes(
    collective: str, message_bytes: int, registered: bool
) -> Iterator[KernelShape]:
    """Yield the kernel shapes to measure, for ordinary or registered memory."""
    if registered:
        yield from (KernelShape("direct", blocks, 512) for blocks in (8, 16, 32, 64))
        return
    if message_bytes <= _MAX_FLAGGED_BYTES:
        yield from (KernelShape("flagged", 0, threads) for threads in (128, 256, 512))
    if 8192 <= message_bytes <= _MAX_LINES_BYTES:
        yield from (KernelShape("lines", 0, threads) for threads in (128, 256, 512))
        if collective == "all_reduce":
            yield from (KernelShape("two_shot", 0, threads) for threads in (128, 256, 512))
    if message_bytes >= 65536:
        yield from (KernelShape("staged", blocks, 512) for blocks in (16, 32, 48, 64))
        yield from (KernelShape("staged", blocks, 256) for blocks in (32, 64))


def _nccl_call(collective: str, buffers: MessageBuffers) -> Callable[[], None]:
    def run_collective() -> None:
        if collective == "all_reduce":
            dist.all_reduce(buffers.out)
        elif collective == "all_gather":
            dist.all_gather_into_tensor(buffers.out, buffers.source)
        elif collective == "reduce_scatter":
            dist.reduce_scatter_tensor(buffers.out, buffers.source)
        else:
            dist.all_to_all_single(buffers.out, buffers.source)

    return run_collective


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def time_in_graph(world: NvlinkWorld, call: Callable[[], object], expected_us: float) -> float:
    """Return the microseconds per call of the slowest rank, in a CUDA graph of many or few calls.

    Both are measured and the shorter time is returned. With many calls per graph, less time passes
    between replays. With few, the host does not become the bottleneck for a library whose graph
    nodes take it longer to launch than the GPU takes to run them.
    """
    call()  # creates the communicator, which cannot be done while a graph is captured
    long_calls = max(2, min(_LONG_GRAPH_CALLS, int(_LONG_GRAPH_MICROSECONDS / expected_us)))
    return min(
        _time_graph(world, call, calls)
        for calls in {long_calls, min(long_calls, _SHORT_GRAPH_CALLS)}
    )


def _time_graph(world: NvlinkWorld, call: Callable[[], object], calls: int) -> float:
    """Return the microseconds per call in a CUDA graph of ``calls`` calls.

    The time of a few replays is subtracted from that of many. So the time in which ranks wait for
    each other at the beginning, and the latency of the first launch, cancel out.
    """

    def body() -> None:
        for _ in range(calls):
            call()

    graph = capture_graph(world, body)
    stream = torch.cuda.current_stream(world.device)

    def time_replays(replays: int) -> float:
        begin_event, end_event = _timing_event(), _timing_event()
        begin_event.record(stream)
        for _ in range(replays):
            graph.replay()
        end_event.record(stream)
        end_event.synchronize()
        return float(begin_event.elapsed_time(end_event)) * 1000

    few_replays = 2 if calls > _SHORT_GRAPH_CALLS else 8
    many_replays = 4 * few_replays
    time_replays(few_replays)  # warm-up
    for _ in range(_MAX_TRIES):
        few_replays_us = world.max_over_ranks(
            statistics.median(time_replays(few_replays) for _ in range(_REPETITIONS))
        )
        many_replays_us = world.max_over_ranks(
            statistics.median(time_replays(many_replays) for _ in range(_REPETITIONS))
        )
        if many_replays_us > few_replays_us:  # otherwise the few replays were disturbed: try again
            return (many_replays_us - few_replays_us) / ((many_replays - few_replays) * calls)
    return many_replays_us / (many_replays * calls)


def time_eager(world: NvlinkWorld, call: Callable[[], object], calls: int = 200) -> float:
    """Return the microseconds per eager call (outside a CUDA graph) of the slowest rank."""
    times = []
    for _ in range(3):
        world.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        world.synchronize()
        times.append((time.perf_counter() - start) * 1e6 / calls)
    return world.max_over_ranks(statistics.median(times))


class NvlinkMeasurement:
    """Measurements in a world with one rank per process.

    All processes must call the same methods in the same order. ``max_message_bytes`` is the size of
    the largest message.
    """

    def __init__(self, world: NvlinkWorld, max_message_bytes: int) -> None:
        self.world = world
        self.group = NvlinkGroup(world, range(world.size))
        (self.rank,) = world.local_ranks
        elements = max_message_bytes + 1024 * world.size  # twice the largest message, in bf16
        self.pools = {
            registered: torch.zeros(elements, dtype=torch.bfloat16, device=world.device)
            for registered in (False, True)
        }
        self.group.register_memory({self.rank: self.pools[True]})

    def make_call(
        self, collective: str, buffers: MessageBuffers, shape: KernelShape | None
    ) -> Callable[[], bool]:
        communicator = self.group.communicators[self.rank]
        return lambda: communicator.run(collective, buffers.source, buffers.out, shape=shape)

    def measure_shapes(self, collective: str, message_bytes: int) -> list[KernelTiming]:
        """Measure all kernel shapes and NCCL at one message size in CUDA graphs."""
        timings = []
        expected_us = 10 + message_bytes / 2e5
        for registered, pool in self.pools.items():
            buffers = take_buffers(collective, message_bytes, self.world.size, pool)
            memory_kind = "registered" if registered else "ordinary"
            nccl_us = time_in_graph(self.world, _nccl_call(collective, buffers), expected_us)
            timings.append(
                KernelTiming(collective, memory_kind, message_bytes, "other", 0, 0, nccl_us)
            )
            shapes = list(candidate_shapes(collective, message_bytes, registered))
            if registered:
                shapes += candidate_shapes(collective, message_bytes, registered=False)
            for shape in shapes:
                call = self.make_call(collective, buffers, shape)
                with self.world.use_stream(self.rank):
                    is_supported = call()
                if not is_supported:
                    continue
                microseconds = time_in_graph(self.world, call, expected_us)
                timings.append(
                    KernelTiming(
                        collective,
                        memory_kind,
                        message_bytes,
                        shape.algorithm,
                        shape.blocks,
                        shape.threads,
                        microseconds,
                    )
                )
        return timings

    def measure_eager(self, collective: str, message_bytes: int) -> tuple[float, float]:
        """Return the microseconds per eager call of the engine, by its tuning table, and of
        NCCL.
        """
        buffers = take_buffers(collective, message_bytes, self.world.size, self.pools[False])
        engine_call = self.make_call(collective, buffers, None)
        return time_eager(self.world, engine_call), time_eager(
            self.world, _nccl_call(collective, buffers)
        )


def measure_group_creation(world: NvlinkWorld, count: int) -> dict[str, float]:
    """Measure the time and GPU memory of creating ``count`` groups of all ranks and running the
    first operation of each.
    """
    tensors = {rank: torch.ones(256, device=world.device) for rank in world.local_ranks}
    world.synchronize()
    free_bytes_before = torch.cuda.mem_get_info(world.device)[0]
    start = time.perf_counter()
    groups = [NvlinkGroup(world, range(world.size)) for _ in range(count)]
    for group in groups:
        group.run("all_reduce", tensors, tensors, shape=KernelShape("flagged"))
    world.synchronize()
    seconds = time.perf_counter() - start
    used_bytes = free_bytes_before - torch.cuda.mem_get_info(world.device)[0]
    return {
        "groups": count,
        "seconds": world.max_over_ranks(seconds),
        "MiB a GPU": world.max_over_ranks(used_bytes / (1 << 20)),
    }
