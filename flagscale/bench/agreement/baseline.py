"""Baseline: calls as nccl-tests issues them, in its loop.

The loop is that of nccl-tests' ``BenchTime``: warm up, barrier, issue all iterations,
synchronize the device, divide. With graphs the iterations are captured once and the graph is
launched many times. On a CPU the calls use gloo's own object, below ``torch.distributed``.
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
ROOT = 0
_ONE_CALL: dict[str, tuple[str, tuple[int, ...]]] = {
    "all_reduce": ("ncclAllReduce", (SUM,)),
    "all_gather": ("ncclAllGather", ()),
    "reduce_scatter": ("ncclReduceScatter", (SUM,)),
    "broadcast": ("ncclBroadcast", (ROOT,)),
    "reduce": ("ncclReduce", (SUM, ROOT)),
}
"""Operations with a single NCCL function, and its arguments between the type and the
communicator.
"""


class NcclBaseline:
    """NCCL by ctypes, on a communicator of its own."""

    operations = definitions.OPERATIONS

    def __init__(self, nccl: NcclLibrary, identity: bytes, ranks: int, rank: int) -> None:
        self._nccl, self._ranks, self._rank = nccl, ranks, rank
        self._handle: c_void_p = nccl.init_communicator(identity, ranks, rank)

    def close(self) -> None:
        self._nccl.checked_function("ncclCommDestroy")(self._handle)

    def create_calls(self, operation: str, size: int, type_: DataType) -> Callable[[], Issue]:
        """Allocate buffers of ``size`` bytes, and return a function that creates the call for
        the current stream.
        """
        n = definitions.count_elements(operation, self._ranks, size, type_.bytes)
        dtype = getattr(torch, type_.torch)
        source = torch.zeros(n.send, dtype=dtype, device="cuda")
        # torch offers these in one buffer alone, so that is what is compared.
        in_place = operation in ("all_reduce", "broadcast", "reduce")
        target = source if in_place else torch.zeros(n.receive, dtype=dtype, device="cuda")
        code, handle = DATA_TYPES[type_.name], self._handle
        send, receive = source.data_ptr(), target.data_ptr()
        step = n.count * type_.bytes

        def make() -> Issue:
            # The closure keeps the buffers.
            _keep = (source, target)
            stream = torch.cuda.current_stream().cuda_stream
            if operation in _ONE_CALL:
                name, more = _ONE_CALL[operation]
                call = self._nccl.checked_function(name)
                return lambda: call(send, receive, n.count, code, *more, handle, stream)
            function = self._nccl.checked_function
            start, end = function("ncclGroupStart"), function("ncclGroupEnd")
            send_part, receive_part = function("ncclSend"), function("ncclRecv")
            sends, receives = self._messages(operation, send, receive, step)

            def issue() -> None:
                start()
                for address, peer in sends:
                    send_part(address, n.count, code, peer, handle, stream)
                for address, peer in receives:
                    receive_part(address, n.count, code, peer, handle, stream)
                end()

            return issue

        return make

    def _messages(
        self, operation: str, send: int, receive: int, step: int
    ) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Return addresses and peers of this rank's messages."""
        own_rank, ranks = self._rank, self._ranks
        parts, into = ([(at + r * step, r) for r in range(ranks)] for at in (send, receive))
        if operation == "all_to_all":
            return parts, into
        if operation == "gather":
            return [(send, ROOT)], into if own_rank == ROOT else []
        if operation == "scatter":
            return parts if own_rank == ROOT else [], [(receive, ROOT)]
        return [(send, (own_rank + 1) % ranks)], [(receive, (own_rank - 1) % ranks)]


class GlooBaseline:
    """gloo's process group, for operations without lists of tensors."""

    operations = ("all_reduce", "all_gather", "broadcast")

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._backend: Any = group._get_backend(torch.device("cpu"))
        self._ranks = group.size()

    def create_calls(self, operation: str, size: int, type_: DataType) -> Callable[[], Issue]:
        """Like :meth:`NcclBaseline.calls`."""
        n = definitions.count_elements(operation, self._ranks, size, type_.bytes)
        dtype, backend = getattr(torch, type_.torch), self._backend
        source = torch.zeros(n.send, dtype=dtype)
        target = torch.zeros(n.receive, dtype=dtype)
        if operation == "all_reduce":
            issue = lambda: backend.allreduce([source]).wait()  # noqa: E731
        elif operation == "broadcast":
            options = dist.BroadcastOptions()
            options.rootRank = ROOT
            issue = lambda: backend.broadcast([source], options).wait()  # noqa: E731
        else:
            issue = lambda: backend._allgather_base(target, source).wait()  # noqa: E731
        return lambda: issue


def time_calls(
    make: Callable[[], Issue],
    device: Device,
    *,
    iterations: int,
    warmup: int,
    launches: int | None,
    barrier: Callable[[], None],
) -> float:
    """Return the seconds of one call by nccl-tests' loop. ``launches``: number of launches of a
    graph of the iterations.
    """
    issue = make()
    for _ in range(warmup):
        issue()
    device.synchronize()
    work, count = issue, iterations
    if launches is not None:

        def captured() -> None:
            inner = make()
            for _ in range(iterations):
                inner()

        work, count = device.capture_graph(captured), launches
        work()
        device.synchronize()
    barrier()
    begin = time.perf_counter()
    for _ in range(count):
        work()
    device.synchronize()
    elapsed = time.perf_counter() - begin
    return elapsed / (count * iterations if launches is not None else count)
