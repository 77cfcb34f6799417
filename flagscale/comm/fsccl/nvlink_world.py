"""Ranks of a check or measurement of the NVLink engine: a process per GPU, or one for all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from flagscale.comm.fsccl import nvlink
from flagscale.comm.fsccl.build import load_extension
from flagscale.comm.fsccl.nvlink import KernelShape, NvlinkCommunicator


class NvlinkWorld:
    """Ranks that this process runs, and the exchange of bytes with those of other processes.

    Ranks of one process have a stream each. Their kernels wait for each other on one GPU, so the
    protocol can be checked on a machine with a single GPU; timings of that mean nothing.
    """

    def __init__(self, size: int, local: Sequence[int], device: int) -> None:
        self.size, self.local = size, tuple(local)
        self.device = torch.device("cuda", device)
        torch.cuda.set_device(self.device)
        self.streams: dict[int, torch.cuda.Stream] = {
            rank: torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            for rank in local
        }
        nvlink.install_engine(device)

    @property
    def is_single_process(self) -> bool:
        return len(self.local) == self.size

    @property
    def max_blocks(self) -> int:
        """Largest number of blocks of a kernel; 0 for no limit.

        Kernels that wait for each other must be on a GPU at the same time, and a multiprocessor
        always has room for one block of 512 threads.
        """
        if not self.is_single_process:
            return 0
        blocks = torch.cuda.get_device_properties(self.device).multi_processor_count // self.size
        return blocks if blocks < load_extension().nvlink.max_blocks else 0

    def gather(self, values: Mapping[int, bytes]) -> dict[int, bytes]:
        """Return the bytes of all ranks, by rank."""
        if self.is_single_process:
            return dict(values)
        by_process: list[dict[int, bytes]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(by_process, dict(values))
        return {
            rank: text
            for values_of_process in by_process
            for rank, text in values_of_process.items()
        }

    def max_over_ranks(self, value: float) -> float:
        return max(float(v) for v in self.gather({self.local[0]: repr(value).encode()}).values())

    def all_true(self, value: bool) -> bool:
        return all(v == b"1" for v in self.gather({self.local[0]: b"01"[value:][:1]}).values())

    def use_stream(self, rank: int) -> torch.cuda.StreamContext:
        return torch.cuda.stream(self.streams[rank])

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    @contextmanager
    def fork(self) -> Iterator[None]:
        """Make the ranks' streams branches of the current one, as the capture of a graph needs."""
        main = torch.cuda.current_stream(self.device)
        for stream in self.streams.values():
            stream.wait_stream(main)
        yield
        for stream in self.streams.values():
            main.wait_stream(stream)


class NvlinkGroup:
    """Group of some ranks, in this order. Every process makes every group."""

    def __init__(self, world: NvlinkWorld, ranks: Iterable[int], timeout: float = 30.0) -> None:
        self.world, self.ranks = world, tuple(ranks)
        self.communicators = {
            rank: NvlinkCommunicator(
                world.device.index, self.ranks.index(rank), len(self.ranks), timeout
            )
            for rank in world.local
            if rank in self.ranks
        }
        cards = world.gather({rank: m.peer_info() for rank, m in self.communicators.items()})
        for member in self.communicators.values():
            member.connect_peers([cards[rank] for rank in self.ranks])

    @property
    def size(self) -> int:
        return len(self.ranks)

    def register_memory(self, tensors: Mapping[int, torch.Tensor]) -> None:
        handles = self.world.gather(
            {r: m.memory_handle(tensors[r]) for r, m in self.communicators.items()}
        )
        for rank, member in self.communicators.items():
            member.connect_memory(tensors[rank], [handles[r] for r in self.ranks])

    def run(
        self,
        collective: str,
        sources: Mapping[int, torch.Tensor],
        out: Mapping[int, torch.Tensor],
        *,
        op: str = "sum",
        root: int = 0,
        shape: KernelShape | None = None,
    ) -> bool:
        """Run a collective on this process's ranks' streams; False if the shape cannot do it."""
        results = []
        for rank, member in self.communicators.items():
            with self.world.use_stream(rank):
                results.append(
                    member.run(collective, sources[rank], out[rank], op=op, root=root, shape=shape)
                )
        return all(results)

    def collect_failures(self) -> list[str]:
        failures = (c.failure() for c in self.communicators.values())
        return [failure for failure in failures if failure is not None]


def capture_graph(world: NvlinkWorld, body: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Capture a graph of the operations that ``body`` puts on the ranks' streams."""
    world.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"), world.fork():
        body()
    return graph
