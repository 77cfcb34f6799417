"""Baseline of ``flagscale bench agreement``: NCCL's calls without torch, in the loop of nccl-tests.

The loop is that of nccl-tests' ``BenchTime``: warm up, barrier, issue all iterations,
synchronize the device, divide. With graphs the iterations are captured once and the graph is
launched many times. On a CPU the calls use gloo's own object, below ``torch.distributed``. Used by
:mod:`.worker`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from ctypes import c_void_p
from typing import Any

import torch
import torch.distributed as dist

from flagscale.accelerators.device import Device
from flagscale.bench.agreement import definitions
from flagscale.bench.agreement.nccl import DATA_TYPES, SUM, NcclLibrary
from flagscale.bench.collectives.operations import DataType

Issue = Callable[[], None]
ROOT_RANK = 0
_SINGLE_CALLS: dict[str, tuple[str, tuple[int, ...]]] = {
    "all_reduce": ("ncclAllReduce", (SUM,)),
    "all_gather": ("ncclAllGather", ()),
    "reduce_scatter": ("ncclReduceScatter", (SUM,)),
    "broadcast": ("ncclBroadcast", (ROOT_RANK,)),
    "reduce": ("ncclReduce", (SUM, ROOT_RANK)),
}
"""Operations with a single NCCL function: its name, and its arguments between the data type and the
communicator.
"""


class NcclBaseline:
    """NCCL by ctypes, on a communicator of its own."""

    operations = definitions.OPERATIONS

    def __init__(self, nccl: NcclLibrary, unique_id: bytes, ranks: int, rank: int) -> None:
        self._nccl, self._ranks, self._rank = nccl, ranks, rank
        self._handle: c_void_p = nccl.init_communicator(unique_id, ranks, rank)

    def close(self) -> None:
        self._nccl.checked_function("ncclCommDestroy")(self._handle)

    def create_calls(self, operation: str, size: int, type_: DataType) -> Callable[[], Issue]:
        """Allocate buffers of ``size`` bytes, and return a function that creates the call for
        the current stream.
        """
        counts = definitions.count_elements(operation, self._ranks, size, type_.bytes)
        dtype = getattr(torch, type_.torch)
        source = torch.zeros(counts.send, dtype=dtype, device="cuda")
        # torch supports these operations only in one buffer, so the baseline uses one too.
        in_place = operation in ("all_reduce", "broadcast", "reduce")
        target = source if in_place else torch.zeros(counts.receive, dtype=dtype, device="cuda")
        code, handle = DATA_TYPES[type_.name], self._handle
        send, receive = source.data_ptr(), target.data_ptr()
        part_bytes = counts.count * type_.bytes

        def make() -> Issue:
            # The closure holds references to the buffers.
            _buffers = (source, target)
            stream = torch.cuda.current_stream().cuda_stream
            if operation in _SINGLE_CALLS:
                name, arguments = _SINGLE_CALLS[operation]
                call = self._nccl.checked_function(name)
                return lambda: call(send, receive, counts.count, code, *arguments, handle, stream)
            function = self._nccl.checked_function
            start, end = function("ncclGroupStart"), function("ncclGroupEnd")
            send_call, receive_call = function("ncclSend"), function("ncclRecv")
            sends, receives = self._messages(operation, send, receive, part_bytes)

            def issue() -> None:
                start()
                for address, peer in sends:
                    send_call(address, counts.count, code, peer, handle, stream)
                for address, peer in receives:
                    receive_call(address, counts.count, code, peer, handle, stream)
                end()

            return issue

        return make

    def _messages(
        self, operation: str, send: int, receive: int, part_bytes: int
    ) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Return addresses and peers of this rank's messages."""
        own_rank, ranks = self._rank, self._ranks
        send_parts, receive_parts = (
            [(address + r * part_bytes, r) for r in range(ranks)] for address in (send, receive)
        )
        if operation == "all_to_all":
            return send_parts, receive_parts
        if operation == "gather":
            return [(send, ROOT_RANK)], receive_parts if own_rank == ROOT_RANK else []
        if operation == "scatter":
            return send_parts if own_rank == ROOT_RANK else [], [(receive, ROOT_RANK)]
        return [(send, (own_rank + 1) % ranks)], [(receive, (own_rank - 1) % ranks)]


class GlooBaseline:
    """gloo's process group, for operations without lists of tensors."""

    operations = ("all_reduce", "all_gather", "broadcast")

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._backend: Any = group._get_backend(torch.device("cpu"))
        self._ranks = group.size()

    def create_calls(self, operation: str, size: int, type_: DataType) -> Callable[[], Issue]:
        """Like :meth:`NcclBaseline.create_calls`."""
        counts = definitions.count_elements(operation, self._ranks, size, type_.bytes)
        dtype, backend = getattr(torch, type_.torch), self._backend
        source = torch.zeros(counts.send, dtype=dtype)
        target = torch.zeros(counts.receive, dtype=dtype)
        if operation == "all_reduce":
            issue = lambda: backend.allreduce([source]).wait()  # noqa: E731
        elif operation == "broadcast":
            options = dist.BroadcastOptions()
            options.rootRank = ROOT_RANK
            issue = lambda: backend.broadcast([source], options).wait()  # noqa: E731
        else:
            issue = lambda: backend._allgather_base(target, source).wait()  # noqa: E731
        return lambda: issue


def time_calls(
    create_issue: Callable[[], Issue],
    device: Device,
    *,
    iterations: int,
    warmup: int,
    launches: int | None,
    barrier: Callable[[], None],
) -> float:
    """Return the seconds of one call by nccl-tests' loop.

    Args:
        create_issue: function that creates the call for the current stream.
        device: this rank's device.
        iterations: measured calls, or calls in a graph.
        warmup: calls before the measurement.
        launches: number of launches of a graph of the iterations; None: without a graph.
        barrier: called before the measurement.
    """
    issue = create_issue()
    for _ in range(warmup):
        issue()
    device.synchronize()
    step, count = issue, iterations
    if launches is not None:

        def captured() -> None:
            issue_captured = create_issue()
            for _ in range(iterations):
                issue_captured()

        step, count = device.capture_graph(captured), launches
        step()
        device.synchronize()
    barrier()
    begin = time.perf_counter()
    for _ in range(count):
        step()
    device.synchronize()
    elapsed = time.perf_counter() - begin
    return elapsed / (count * iterations if launches is not None else count)
