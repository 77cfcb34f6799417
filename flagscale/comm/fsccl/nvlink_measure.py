"""Times of the NVLink engine beside NCCL: in graphs, called one by one, and of making groups."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from flagscale.comm.fsccl.nvlink import Shape
from flagscale.comm.fsccl.nvlink_world import Group, World, graph_of
from flagscale.comm.fsccl.tune import Timing

MEASURED = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
SIZES = tuple(1 << power for power in range(10, 29, 2))
_ROUNDS, _TRIES = 5, 3
_GRAPH_MICROSECONDS = 2000.0  # of work in a long graph, about
_LONG_GRAPH, _SHORT_GRAPH = 100, 5  # the most calls
_FLAGGED_MOST, _LINES_MOST = 256 << 10, 4 << 20


@dataclass
class Buffers:
    """bf16 memory of a message of ``size`` bytes, as benchmarks count it."""

    given: torch.Tensor
    out: torch.Tensor


def buffers(collective: str, size: int, ranks: int, pool: torch.Tensor) -> Buffers:
    """Tensors in ``pool``, memory for twice the size; a size is rounded down to whole parts."""
    each = max(8, size // 2 // ranks // 8 * 8)
    whole = pool[: each * ranks]
    part = pool[each * ranks :][:each]
    if collective == "all_reduce":
        return Buffers(pool[: size // 2], pool[: size // 2])
    if collective == "all_gather":
        return Buffers(part, whole)
    if collective == "reduce_scatter":
        return Buffers(whole, part)
    return Buffers(pool[each * ranks :][: each * ranks], whole)


def shapes(collective: str, size: int, registered: bool) -> Iterator[Shape]:
    """What is tried."""
    if registered:
        yield from (Shape("direct", blocks, 512) for blocks in (8, 16, 32, 64))
        return
    if size <= _FLAGGED_MOST:
        yield from (Shape("flagged", 0, threads) for threads in (128, 256, 512))
    if 8192 <= size <= _LINES_MOST:
        yield from (Shape("lines", 0, threads) for threads in (128, 256, 512))
        if collective == "all_reduce":
            yield from (Shape("two_shot", 0, threads) for threads in (128, 256, 512))
    if size >= 65536:
        yield from (Shape("staged", blocks, 512) for blocks in (16, 32, 48, 64))
        yield from (Shape("staged", blocks, 256) for blocks in (32, 64))


def _nccl(collective: str, memory: Buffers) -> Callable[[], None]:
    def call() -> None:
        if collective == "all_reduce":
            dist.all_reduce(memory.out)
        elif collective == "all_gather":
            dist.all_gather_into_tensor(memory.out, memory.given)
        elif collective == "reduce_scatter":
            dist.reduce_scatter_tensor(memory.out, memory.given)
        else:
            dist.all_to_all_single(memory.out, memory.given)

    return call


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def in_graph(world: World, call: Callable[[], object], guess: float) -> float:
    """Microseconds a call, of the slowest rank, in the graph that suits it better: a long one,
    which spends less between replays, or a short one, for a library whose nodes the host launches
    more slowly than the GPU does them when there are many."""
    call()  # a communicator cannot be made while a graph is captured
    long = max(2, min(_LONG_GRAPH, int(_GRAPH_MICROSECONDS / guess)))
    return min(_in_graph_of(world, call, calls) for calls in {long, min(long, _SHORT_GRAPH)})


def _in_graph_of(world: World, call: Callable[[], object], calls: int) -> float:
    """What more replays of a graph of so many calls take than few do: ranks do not begin at once,
    and the first launch of a graph is waited for; both cost a short turn as much as a long one."""

    def body() -> None:
        for _ in range(calls):
            call()

    graph = graph_of(world, body)
    stream = torch.cuda.current_stream(world.device)

    def turn(replays: int) -> float:
        begin, end = _event(), _event()
        begin.record(stream)
        for _ in range(replays):
            graph.replay()
        end.record(stream)
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1000

    few = 2 if calls > _SHORT_GRAPH else 8
    many = 4 * few
    turn(few)  # warms up
    for _ in range(_TRIES):
        short = world.slowest(statistics.median(turn(few) for _ in range(_ROUNDS)))
        long = world.slowest(statistics.median(turn(many) for _ in range(_ROUNDS)))
        if long > short:  # something else has disturbed the short ones where it is not
            return (long - short) / ((many - few) * calls)
    return long / (many * calls)


def eager(world: World, call: Callable[[], object], calls: int = 200) -> float:
    """Microseconds a call, of the slowest rank, when a program calls one after the other."""
    times = []
    for _ in range(3):
        world.synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            call()
        world.synchronize()
        times.append((time.perf_counter() - began) * 1e6 / calls)
    return world.slowest(statistics.median(times))


class Measurement:
    """Takes the times of one world; every process calls the same methods in the same order."""

    def __init__(self, world: World, largest: int) -> None:
        self.world = world
        self.group = Group(world, range(world.size))
        (self.rank,) = world.local
        elements = largest + 1024 * world.size  # twice the largest message, in bf16
        self.pools = {
            registered: torch.zeros(elements, dtype=torch.bfloat16, device=world.device)
            for registered in (False, True)
        }
        self.group.register({self.rank: self.pools[True]})

    def call(self, collective: str, memory: Buffers, shape: Shape | None) -> Callable[[], bool]:
        member = self.group.members[self.rank]
        return lambda: member.run(collective, memory.given, memory.out, shape=shape)

    def timings(self, collective: str, size: int) -> list[Timing]:
        """All shapes and NCCL at one size, in graphs."""
        found = []
        guess = 10 + size / 2e5
        for registered, pool in self.pools.items():
            memory = buffers(collective, size, self.world.size, pool)
            name = "registered" if registered else "ordinary"
            other = in_graph(self.world, _nccl(collective, memory), guess)
            found.append(Timing(collective, name, size, "other", 0, 0, other))
            tried = list(shapes(collective, size, registered))
            if registered:
                tried += shapes(collective, size, registered=False)
            for shape in tried:
                call = self.call(collective, memory, shape)
                with self.world.on(self.rank):
                    possible = call()
                if not possible:
                    continue
                taken = in_graph(self.world, call, guess)
                found.append(
                    Timing(
                        collective, name, size, shape.algorithm, shape.blocks, shape.threads, taken
                    )
                )
        return found

    def one_by_one(self, collective: str, size: int) -> tuple[float, float]:
        """Microseconds a call without a graph: the engine's by its table, and NCCL's."""
        memory = buffers(collective, size, self.world.size, self.pools[False])
        own = self.call(collective, memory, None)
        return eager(self.world, own), eager(self.world, _nccl(collective, memory))


def making_groups(world: World, count: int) -> dict[str, float]:
    """Seconds and MiB for ``count`` groups of all ranks, each with its first operation."""
    memory = {rank: torch.ones(256, device=world.device) for rank in world.local}
    world.synchronize()
    before = torch.cuda.mem_get_info(world.device)[0]
    began = time.perf_counter()
    groups = [Group(world, range(world.size)) for _ in range(count)]
    for group in groups:
        group.run("all_reduce", memory, memory, shape=Shape("flagged"))
    world.synchronize()
    seconds = time.perf_counter() - began
    taken = before - torch.cuda.mem_get_info(world.device)[0]
    return {
        "groups": count,
        "seconds": world.slowest(seconds),
        "MiB a GPU": world.slowest(taken / (1 << 20)),
    }
