"""The ranks of a check or a measurement: one process a GPU, or all in one process on one GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from flagscale.comm.fsccl import nvlink
from flagscale.comm.fsccl.build import load_extension
from flagscale.comm.fsccl.nvlink import Member, Shape


class World:
    """The ranks that this process plays, and how it exchanges bytes with the others.

    Ranks of one process have a stream each: with kernels that wait for each other on one GPU, the
    protocol can be checked where there is one GPU only. What that measures says nothing.
    """

    def __init__(self, size: int, local: Sequence[int], device: int) -> None:
        self.size, self.local = size, tuple(local)
        self.device = torch.device("cuda", device)
        torch.cuda.set_device(self.device)
        self.streams: dict[int, torch.cuda.Stream] = {
            rank: torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            for rank in local
        }
        nvlink.install(device)

    @property
    def alone(self) -> bool:
        return len(self.local) == self.size

    @property
    def most_blocks(self) -> int:
        """Of a kernel, 0 for as many as it likes. Kernels that wait for each other must be on a
        GPU at once, and a multiprocessor is sure to hold one block of 512 threads."""
        if not self.alone:
            return 0
        there = torch.cuda.get_device_properties(self.device).multi_processor_count // self.size
        return there if there < load_extension().nvlink.max_blocks else 0

    def gather(self, own: Mapping[int, bytes]) -> dict[int, bytes]:
        """What every rank gave, by rank."""
        if self.alone:
            return dict(own)
        every: list[dict[int, bytes]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(every, dict(own))
        return {rank: text for one in every for rank, text in one.items()}

    def slowest(self, value: float) -> float:
        return max(float(v) for v in self.gather({self.local[0]: repr(value).encode()}).values())

    def all_true(self, holds: bool) -> bool:
        return all(v == b"1" for v in self.gather({self.local[0]: b"01"[holds:][:1]}).values())

    def on(self, rank: int) -> torch.cuda.StreamContext:
        return torch.cuda.stream(self.streams[rank])

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    @contextmanager
    def fork(self) -> Iterator[None]:
        """Ranks' streams as branches of the current one, which a graph's capture needs."""
        main = torch.cuda.current_stream(self.device)
        for stream in self.streams.values():
            stream.wait_stream(main)
        yield
        for stream in self.streams.values():
            main.wait_stream(stream)


class Group:
    """Some ranks of the world, in this order. Every process makes every group."""

    def __init__(self, world: World, ranks: Iterable[int], timeout: float = 30.0) -> None:
        self.world, self.ranks = world, tuple(ranks)
        self.members = {
            rank: Member(world.device.index, self.ranks.index(rank), len(self.ranks), timeout)
            for rank in world.local
            if rank in self.ranks
        }
        cards = world.gather({rank: m.card() for rank, m in self.members.items()})
        for member in self.members.values():
            member.connect_to([cards[rank] for rank in self.ranks])

    @property
    def size(self) -> int:
        return len(self.ranks)

    def register(self, tensors: Mapping[int, torch.Tensor]) -> None:
        cards = self.world.gather({r: m.memory_card(tensors[r]) for r, m in self.members.items()})
        for rank, member in self.members.items():
            member.register_with(tensors[rank], [cards[r] for r in self.ranks])

    def run(
        self,
        collective: str,
        given: Mapping[int, torch.Tensor],
        out: Mapping[int, torch.Tensor],
        *,
        op: str = "sum",
        root: int = 0,
        shape: Shape | None = None,
    ) -> bool:
        """On the stream of each rank played here; False if the shape cannot do it."""
        done = []
        for rank, member in self.members.items():
            with self.world.on(rank):
                done.append(
                    member.run(collective, given[rank], out[rank], op=op, root=root, shape=shape)
                )
        return all(done)

    def failures(self) -> list[str]:
        return [why for m in self.members.values() if (why := m.failure()) is not None]


def graph_of(world: World, body: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of what ``body`` puts on the ranks' streams."""
    world.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"), world.fork():
        body()
    return graph
