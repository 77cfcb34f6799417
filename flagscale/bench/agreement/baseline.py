"""The baseline: calls as nccl-tests makes them, and its loop around them.

The loop is that of nccl-tests' ``BenchTime``: warm up, meet at a barrier, issue all iterations,
wait for the device, divide; with graphs, capture the iterations once and launch the graph many
times. On a CPU the calls go to gloo's own object, below ``torch.distributed``.
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
from flagscale.bench.agreement.nccl import DATA_TYPES, SUM, Nccl
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
"""What NCCL has a function for, and what that takes between the type and the communicator."""


class NcclBaseline:
    """NCCL through ctypes, on a communicator of its own."""

    operations = definitions.OPERATIONS

    def __init__(self, nccl: Nccl, identity: bytes, ranks: int, rank: int) -> None:
        self._nccl, self._ranks, self._rank = nccl, ranks, rank
        self._handle: c_void_p = nccl.connect(identity, ranks, rank)

    def close(self) -> None:
        self._nccl.function("ncclCommDestroy")(self._handle)

    def calls(self, operation: str, size: int, type_: DataType) -> Callable[[], Issue]:
        """Allocates buffers of ``size`` bytes. The result makes the call for the stream that is
        current when it is asked."""
        n = definitions.counts(operation, self._ranks, size, type_.bytes)
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
                call = self._nccl.function(name)
                return lambda: call(send, receive, n.count, code, *more, handle, stream)
            start, end = self._nccl.function("ncclGroupStart"), self._nccl.function("ncclGroupEnd")
            out, into = self._nccl.function("ncclSend"), self._nccl.function("ncclRecv")
            sends, receives = self._messages(operation, send, receive, step)

            def issue() -> None:
                start()
                for address, peer in sends:
                    out(address, n.count, code, peer, handle, stream)
                for address, peer in receives:
                    into(address, n.count, code, peer, handle, stream)
                end()

            return issue

        return make

    def _messages(
        self, operation: str, send: int, receive: int, step: int
    ) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Addresses and peers of what this rank sends and receives."""
        me, ranks = self._rank, self._ranks
        parts, into = ([(at + r * step, r) for r in range(ranks)] for at in (send, receive))
        if operation == "all_to_all":
            return parts, into
        if operation == "gather":
            return [(send, ROOT)], into if me == ROOT else []
        if operation == "scatter":
            return parts if me == ROOT else [], [(receive, ROOT)]
        return [(send, (me + 1) % ranks)], [(receive, (me - 1) % ranks)]


class GlooBaseline:
    """gloo's process group itself, for what needs no lists of tensors."""

    operations = ("all_reduce", "all_gather", "broadcast")

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._backend: Any = group._get_backend(torch.device("cpu"))
        self._ranks = group.size()

    def calls(self, operation: str, size: int, type_: DataType) -> Callable[[], Issue]:
        """As :meth:`NcclBaseline.calls`."""
        n = definitions.counts(operation, self._ranks, size, type_.bytes)
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


def time_of(
    make: Callable[[], Issue],
    device: Device,
    *,
    iterations: int,
    warmup: int,
    launches: int | None,
    together: Callable[[], None],
) -> float:
    """Seconds of one call, by nccl-tests' loop; with ``launches`` of a graph of the iterations."""
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

        work, count = device.capture(captured), launches
        work()
        device.synchronize()
    together()
    begin = time.perf_counter()
    for _ in range(count):
        work()
    device.synchronize()
    elapsed = time.perf_counter() - begin
    return elapsed / (count * iterations if launches is not None else count)
