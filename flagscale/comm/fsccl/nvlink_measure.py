"""Measurements of the NVLink engine and NCCL: in graphs, in eager calls, and of group creation."""

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
SIZES = tuple(1 << power for power in range(10, 29, 2))
_ROUNDS, _TRIES = 5, 3
_GRAPH_MICROSECONDS = 2000.0  # approximate work in a long graph
_LONG_GRAPH, _SHORT_GRAPH = 100, 5  # maximum calls
_FLAGGED_MOST, _LINES_MOST = 256 << 10, 4 << 20


@dataclass
class Buffers:
    """Input and output in bf16 for a message of ``size`` bytes, as benchmarks count them."""

    source: torch.Tensor
    out: torch.Tensor


def take_buffers(collective: str, size: int, ranks: int, pool: torch.Tensor) -> Buffers:
    """Take input and output from ``pool``, which has room for twice the size.

    A size is rounded down to whole parts.
    """
    part_elements = max(8, size // 2 // ranks // 8 * 8)
    whole = pool[: part_elements * ranks]
    part = pool[part_elements * ranks :][:part_elements]
    if collective == "all_reduce":
        return Buffers(pool[: size // 2], pool[: size // 2])
    if collective == "all_gather":
        return Buffers(part, whole)
    if collective == "reduce_scatter":
        return Buffers(whole, part)
    return Buffers(pool[part_elements * ranks :][: part_elements * ranks], whole)


def candidate_shapes(collective: str, size: int, registered: bool) -> Iterator[KernelShape]:
    """Yield the kernel shapes to measure."""
    if registered:
        yield from (KernelShape("direct", blocks, 512) for blocks in (8, 16, 32, 64))
        return
    if size <= _FLAGGED_MOST:
        yield from (KernelShape("flagged", 0, threads) for threads in (128, 256, 512))
    if 8192 <= size <= _LINES_MOST:
        yield from (KernelShape("lines", 0, threads) for threads in (128, 256, 512))
        if collective == "all_reduce":
            yield from (KernelShape("two_shot", 0, threads) for threads in (128, 256, 512))
    if size >= 65536:
        yield from (KernelShape("staged", blocks, 512) for blocks in (16, 32, 48, 64))
        yield from (KernelShape("staged", blocks, 256) for blocks in (32, 64))


def _nccl_call(collective: str, memory: Buffers) -> Callable[[], None]:
    def call() -> None:
        if collective == "all_reduce":
            dist.all_reduce(memory.out)
        elif collective == "all_gather":
            dist.all_gather_into_tensor(memory.out, memory.source)
        elif collective == "reduce_scatter":
            dist.reduce_scatter_tensor(memory.out, memory.source)
        else:
            dist.all_to_all_single(memory.out, memory.source)

    return call


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def time_in_graph(world: NvlinkWorld, call: Callable[[], object], expected_us: float) -> float:
    """Return the microseconds per call, of the slowest rank, in a long or a short graph.

    The faster of the two counts. A long graph spends less between replays. A short one suits a
    library whose nodes, when there are many, the host launches more slowly than the GPU runs them.
    """
    call()  # creates the communicator, which cannot be done while a graph is captured
    long = max(2, min(_LONG_GRAPH, int(_GRAPH_MICROSECONDS / expected_us)))
    return min(_time_graph(world, call, calls) for calls in {long, min(long, _SHORT_GRAPH)})


def _time_graph(world: NvlinkWorld, call: Callable[[], object], calls: int) -> float:
    """Return the microseconds per call in a graph of this many calls.

    The result is the difference between many replays and few. Ranks do not begin at the same time,
    and the first launch of a graph is waited for; both add the same time to few and to many.
    """

    def body() -> None:
        for _ in range(calls):
            call()

    graph = capture_graph(world, body)
    stream = torch.cuda.current_stream(world.device)

    def time_replays(replays: int) -> float:
        begin, end = _timing_event(), _timing_event()
        begin.record(stream)
        for _ in range(replays):
            graph.replay()
        end.record(stream)
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1000

    few = 2 if calls > _SHORT_GRAPH else 8
    many = 4 * few
    time_replays(few)  # warm-up
    for _ in range(_TRIES):
        short = world.max_over_ranks(statistics.median(time_replays(few) for _ in range(_ROUNDS)))
        long = world.max_over_ranks(statistics.median(time_replays(many) for _ in range(_ROUNDS)))
        if long > short:  # else something has disturbed the short runs
            return (long - short) / ((many - few) * calls)
    return long / (many * calls)


def time_eager(world: NvlinkWorld, call: Callable[[], object], calls: int = 200) -> float:
    """Return the microseconds per call, of the slowest rank, of calls one after the other."""
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
    """Measurements of one world; every process calls the same methods in the same order."""

    def __init__(self, world: NvlinkWorld, largest: int) -> None:
        self.world = world
        self.group = NvlinkGroup(world, range(world.size))
        (self.rank,) = world.local
        elements = largest + 1024 * world.size  # twice the largest message, in bf16
        self.pools = {
            registered: torch.zeros(elements, dtype=torch.bfloat16, device=world.device)
            for registered in (False, True)
        }
        self.group.register_memory({self.rank: self.pools[True]})

    def make_call(
        self, collective: str, memory: Buffers, shape: KernelShape | None
    ) -> Callable[[], bool]:
        member = self.group.communicators[self.rank]
        return lambda: member.run(collective, memory.source, memory.out, shape=shape)

    def measure_shapes(self, collective: str, size: int) -> list[KernelTiming]:
        """Measure all shapes and NCCL at one size, in graphs."""
        timings = []
        expected_us = 10 + size / 2e5
        for registered, pool in self.pools.items():
            memory = take_buffers(collective, size, self.world.size, pool)
            name = "registered" if registered else "ordinary"
            nccl_us = time_in_graph(self.world, _nccl_call(collective, memory), expected_us)
            timings.append(KernelTiming(collective, name, size, "other", 0, 0, nccl_us))
            shapes = list(candidate_shapes(collective, size, registered))
            if registered:
                shapes += candidate_shapes(collective, size, registered=False)
            for shape in shapes:
                call = self.make_call(collective, memory, shape)
                with self.world.use_stream(self.rank):
                    possible = call()
                if not possible:
                    continue
                microseconds = time_in_graph(self.world, call, expected_us)
                timings.append(
                    KernelTiming(
                        collective,
                        name,
                        size,
                        shape.algorithm,
                        shape.blocks,
                        shape.threads,
                        microseconds,
                    )
                )
        return timings

    def measure_eager(self, collective: str, size: int) -> tuple[float, float]:
        """Return the microseconds per eager call of the engine, with its table, and of NCCL."""
        memory = take_buffers(collective, size, self.world.size, self.pools[False])
        engine_call = self.make_call(collective, memory, None)
        return time_eager(self.world, engine_call), time_eager(
            self.world, _nccl_call(collective, memory)
        )


def measure_group_creation(world: NvlinkWorld, count: int) -> dict[str, float]:
    """Measure seconds and MiB of ``count`` groups of all ranks, each with its first operation."""
    memory = {rank: torch.ones(256, device=world.device) for rank in world.local}
    world.synchronize()
    free_before = torch.cuda.mem_get_info(world.device)[0]
    start = time.perf_counter()
    groups = [NvlinkGroup(world, range(world.size)) for _ in range(count)]
    for group in groups:
        group.run("all_reduce", memory, memory, shape=KernelShape("flagged"))
    world.synchronize()
    seconds = time.perf_counter() - start
    used = free_before - torch.cuda.mem_get_info(world.device)[0]
    return {
        "groups": count,
        "seconds": world.max_over_ranks(seconds),
        "MiB a GPU": world.max_over_ranks(used / (1 << 20)),
    }
