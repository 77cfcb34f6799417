"""Ranks and groups for checks and measurements of the NVLink engine (nvlink_check.py).

Either each rank is a process with a GPU, or one process runs all ranks on one GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from flagscale.comm.fsccl import nvlink
from flagscale.comm.fsccl.build import load_extension
from flagscale.comm.fsccl.nvlink import KernelShape, NvlinkCommunicator


class NvlinkWorld:
    """Ranks that this process runs, and exchange of bytes with the ranks of other processes.

    Each rank has a stream of its own. If one process runs all ranks, their kernels wait for each
    other on one GPU, so that the protocol can be checked on a machine with a single GPU. Timings of
    that are meaningless.

    Args:
        size: number of ranks.
        local_ranks: the ranks of this process.
        device: the number of the GPU of this process.
    """

    def __init__(self, size: int, local_ranks: Sequence[int], device: int) -> None:
        self.size, self.local_ranks = size, tuple(local_ranks)
        self.device = torch.device("cuda", device)
        torch.cuda.set_device(self.device)
        self.streams: dict[int, torch.cuda.Stream] = {
            rank: torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            for rank in local_ranks
        }
        nvlink.install_engine(device)

    @property
    def is_single_process(self) -> bool:
        return len(self.local_ranks) == self.size

    @property
    def max_blocks(self) -> int:
        """Maximum number of blocks of a kernel; 0: no limit.

        Kernels that wait for each other must run on the GPU at the same time. A multiprocessor
        always has room for one block of 512 threads, so ranks that share a GPU divide its
        multiprocessors.
        """
        if not self.is_single_process:
            return 0
        blocks = torch.cuda.get_device_properties(self.device).multi_processor_count // self.size
        return blocks if blocks < load_extension().nvlink.max_blocks else 0

    def all_gather_bytes(self, values: Mapping[int, bytes]) -> dict[int, bytes]:
        """Return the bytes of all ranks by rank, given those of this process's ranks."""
        if self.is_single_process:
            return dict(values)
        by_process: list[dict[int, bytes]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(by_process, dict(values))
        return {
            rank: value
            for values_of_process in by_process
            for rank, value in values_of_process.items()
        }

    def max_over_ranks(self, value: float) -> float:
        return max(
            float(v)
            for v in self.all_gather_bytes({self.local_ranks[0]: repr(value).encode()}).values()
        )

    def all_true(self, value: bool) -> bool:
        return all(
            v == b"1"
            for v in self.all_gather_bytes({self.local_ranks[0]: b"01"[value:][:1]}).values()
        )

    def use_stream(self, rank: int) -> torch.cuda.StreamContext:
        return torch.cuda.stream(self.streams[rank])

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    @contextmanager
    def fork_streams(self) -> Iterator[None]:
        """Context manager that makes the ranks' streams begin after, and end before, work on the
        current stream, as the capture of a CUDA graph requires.
        """
        main_stream = torch.cuda.current_stream(self.device)
        for stream in self.streams.values():
            stream.wait_stream(main_stream)
        yield
        for stream in self.streams.values():
            main_stream.wait_stream(stream)


class NvlinkGroup:
    """Group of ranks of a world.

    All processes must create the same groups in the same order.

    Args:
        world: the world.
        ranks: members of the group, in the order of their group ranks.
        timeout: seconds for which a kernel waits for a peer.
    """

    def __init__(self, world: NvlinkWorld, ranks: Iterable[int], timeout: float = 30.0) -> None:
        self.world, self.ranks = world, tuple(ranks)
        self.communicators = {
            rank: NvlinkCommunicator(
                world.device.index, self.ranks.index(rank), len(self.ranks), timeout
            )
            for rank in world.local_ranks
            if rank in self.ranks
        }
        peer_infos = world.all_gather_bytes(
            {rank: communicator.peer_info() for rank, communicator in self.communicators.items()}
        )
        for communicator in self.communicators.values():
            communicator.connect_peers([peer_infos[rank] for rank in self.ranks])

    @property
    def size(self) -> int:
        return len(self.ranks)

    def register_memory(self, tensors: Mapping[int, torch.Tensor]) -> None:
        handles = self.world.all_gather_bytes(
            {
                r: communicator.memory_handle(tensors[r])
                for r, communicator in self.communicators.items()
            }
        )
        for rank, communicator in self.communicators.items():
            communicator.connect_memory(tensors[rank], [handles[r] for r in self.ranks])

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
        """Run a collective on the streams of this process's ranks.

        Returns:
            False if ``shape`` does not support the operation, or, without a shape, if another
            library is faster by the tuning table.
        """
        results = []
        for rank, communicator in self.communicators.items():
            with self.world.use_stream(rank):
                results.append(
                    communicator.run(
                        collective, sources[rank], out[rank], op=op, root=root, shape=shape
                    )
                )
        return all(results)

    def collect_failures(self) -> list[str]:
        failures = (c.failure() for c in self.communicators.values())
        return [failure for failure in failures if failure is not None]


def capture_graph(world: NvlinkWorld, body: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Capture a CUDA graph of the operations that ``body`` enqueues on the ranks' streams."""
    world.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"), world.fork_streams():
        body()
    return graph
