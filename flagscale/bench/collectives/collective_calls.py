"""Calls that are timed: one operation on prepared buffers, as a function without arguments.

:mod:`.session` prepares the buffers of one size, which are registered with the backend if
requested, and :mod:`.timing` runs the calls. A *part* is one operation on its buffers. The *body*
of an iteration consists of one part, or of several that are issued together
(``--coalesced-cc-size-ratio`` or ``-m``). Its *step* is the function that runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _coalescing_manager

from flagscale.accelerators.device import Device
from flagscale.bench.collectives import sizes
from flagscale.bench.collectives.devices import RankGroup
from flagscale.bench.collectives.patterns import Exchange, Pairs, exchanges_for, pairs_for
from flagscale.bench.collectives.spec import BenchSpec, Case, GroupsSpec

# torch 2.13 has renamed these functions, and warns about the old names.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "prod": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "avg": dist.ReduceOp.AVG,
}
# torch's backends do not support these types. Without a reduction their bytes are sent.
_SENT_AS_BYTES = (torch.uint16, torch.int16, torch.uint32, torch.uint64)
# Sums and products of two's complement are the same bits, signed or not; see DataType.reduces.
_REDUCED_AS_SIGNED = {torch.uint32: torch.int32, torch.uint64: torch.int64}

Works = list[Any]
"""Handles (torch's ``Work``) of started operations."""
Issue = Callable[[bool], Works]
"""Function that starts an operation; ``True`` requests handles to wait on."""


@dataclass(frozen=True)
class BufferSizes:
    """Buffer sizes of one part, in elements.

    They are equal on all ranks of a group, except those of an all-to-all-v.
    """

    elements: int
    """Elements of the whole logical buffer; see :mod:`.operations`."""
    input_elements: int
    """Elements of a rank's input."""
    output_elements: int
    """Elements of a rank's output."""
    exchanges: tuple[Exchange, ...] = ()
    """Counts and displacements of an all-to-all-v, by rank in the group."""
    pairs: Pairs = ()
    """Source and target ranks in the group, of a send-receive or permutation."""

    def shard(self, ranks: int) -> int:
        """Return the number of elements in one rank's shard of the logical buffer."""
        return self.elements // ranks


@dataclass(frozen=True)
class OperationPart:
    """One operation on a pair of buffers."""

    buffer_sizes: BufferSizes
    input: Tensor
    output: Tensor
    issue: Issue
    """Start the operation; ``True`` requests handles to wait on."""

    def run(self) -> None:
        for work in self.issue(False):
            work.wait()


@dataclass(frozen=True)
class IterationBody:
    """One iteration: a part, or several that are issued together."""

    parts: tuple[OperationPart, ...]
    step: Callable[[], None]
    """Run the iteration. On a GPU it may return before the operations have finished."""


def compute_buffer_sizes(
    case: Case, size: int, group: RankGroup, spec: BenchSpec
) -> tuple[tuple[BufferSizes, ...], tuple[str, ...]]:
    """Return the buffer sizes of each part of an operation on about ``size`` bytes, and notes for
    the user. The size is divided among the parts by ``--coalesced-cc-size-ratio``.

    Raises:
        ConfigError: all-to-all-v counts or pairs do not fit the group.
    """
    ratios = spec.buffers.ratio
    bytes_by_part = [round(size * ratio / sum(ratios)) for ratio in ratios]
    part_sizes, notes_by_part = zip(
        *(
            _compute_part_sizes(case, part_bytes, group, spec.groups)
            for part_bytes in bytes_by_part
        ),
        strict=True,
    )
    return part_sizes, tuple(dict.fromkeys(note for notes in notes_by_part for note in notes))


def _compute_part_sizes(
    case: Case, size: int, group: RankGroup, groups: GroupsSpec
) -> tuple[BufferSizes, tuple[str, ...]]:
    op, ranks, element_bytes = case.operation, group.size, case.type.bytes
    if op.name == "barrier":
        return BufferSizes(0, 0, 0), ()
    if op.name == "all_to_all_v":
        exchanges, notes = exchanges_for(ranks, groups.exchange, size, element_bytes)
        max_elements = max(sum(e.send_counts) for e in exchanges)
        inputs, outputs = exchanges[max(group.index, 0)].extents
        return BufferSizes(max_elements, inputs, outputs, exchanges), notes
    elements = (
        sizes.round_to_parts(size, element_bytes, ranks if op.has_shards else 1) // element_bytes
    )
    inputs = elements // ranks if op.input == "part" else elements
    outputs = elements // ranks if op.output == "part" else elements
    pairs: Pairs = ()
    if op.name in ("sendrecv", "permute"):
        pairs = pairs_for(ranks, groups.pairs if op.name == "permute" else None)
    return BufferSizes(elements, inputs, outputs, pairs=pairs), ()


def build_part(
    case: Case,
    buffer_sizes: BufferSizes,
    group: RankGroup,
    device: Device,
    output: Tensor | None = None,
) -> OperationPart:
    """Return buffers of zeros with the operation on them. ``output`` reuses an existing output."""
    dtype = getattr(torch, case.type.torch)

    def zeros(elements: int) -> Tensor:
        return torch.zeros(elements, dtype=dtype, device=device.torch_device)

    name, shard = case.operation.name, buffer_sizes.shard(group.size)
    if case.in_place and name == "reduce_scatter":
        source = zeros(buffer_sizes.input_elements)
        output = source.narrow(0, group.index * shard, shard)
    else:
        output = zeros(buffer_sizes.output_elements) if output is None else output
        source = output if case.in_place else zeros(buffer_sizes.input_elements)
        if case.in_place and name == "all_gather":
            source = output.narrow(0, group.index * shard, shard)
    buffers = _OperationBuffers(
        case, buffer_sizes, group, _transport_view(case, source), _transport_view(case, output)
    )
    return OperationPart(buffer_sizes, source, output, _ISSUE_FACTORIES[name](buffers))


def _transport_view(case: Case, tensor: Tensor) -> Tensor:
    """Return a view of a buffer in a type that torch.distributed supports, with the same bytes."""
    if not case.operation.reduces:
        # These types have two bytes or more.
        return tensor.view(torch.uint8) if tensor.dtype in _SENT_AS_BYTES else tensor
    return (
        tensor.view(_REDUCED_AS_SIGNED[tensor.dtype])
        if tensor.dtype in _REDUCED_AS_SIGNED
        else tensor
    )


def build_body(
    parts: tuple[OperationPart, ...], device: Device, group: RankGroup, name: str
) -> IterationBody:
    """Return one iteration of ``parts``."""
    if len(parts) == 1:
        return IterationBody(parts, parts[0].run)
    process_group = group.process_group
    # gloo supports GPU memory too, but has no grouped launch.
    supports_coalescing = not device.is_host and group.backend_for(device).supports_coalescing

    def issue_grouped() -> None:
        # One launch for all parts, between ncclGroupStart and ncclGroupEnd.
        with _coalescing_manager(process_group, device.torch_device):
            for part in parts:
                part.issue(False)

    def issue_together() -> None:
        for work in [work for part in parts for work in part.issue(True)]:
            work.wait()

    coalesced = supports_coalescing and name in ("all_reduce", "all_gather", "reduce_scatter")
    return IterationBody(parts, issue_grouped if coalesced else issue_together)


@dataclass(frozen=True)
class _OperationBuffers:
    """Buffers of this rank for an operation, in types that torch supports."""

    case: Case
    sizes: BufferSizes
    group: RankGroup
    source: Tensor
    output_view: Tensor

    @property
    def op(self) -> Any:
        return REDUCE_OPS[self.case.reduction]

    @property
    def root(self) -> int:
        """Global rank of the root."""
        return self.group.ranks[self.case.root]

    def split_on_root(self, buffer: Tensor) -> list[Tensor] | None:
        """Return a part for each rank, on the root alone."""
        at_root = self.group.index == self.case.root
        return list(buffer.chunk(self.group.size)) if at_root else None


def _make_issue(call: Callable[..., Any], *arguments: Any) -> Issue:
    """Wrap a torch collective that returns a handle if requested, and has finished otherwise."""

    def issue(handle: bool) -> Works:
        work = call(*arguments, handle)
        return [] if work is None else [work]

    return issue


def _make_all_to_all_v_issue(buffers: _OperationBuffers) -> Issue:
    exchanges, source, output = buffers.sizes.exchanges, buffers.source, buffers.output_view
    own_exchange = exchanges[buffers.group.index]
    torch_elements = buffers.case.type.bytes // source.element_size()
    if all(e.is_packed for e in exchanges):
        received = [count * torch_elements for count in own_exchange.recv_counts]
        sent = [count * torch_elements for count in own_exchange.send_counts]
        group = buffers.group.process_group
        return _make_issue(dist.all_to_all_single, output, source, received, sent, group)
    # Some backends require equal sizes for torch's all_to_all of lists. Therefore buffers with gaps
    # are sent by point-to-point messages.
    send = _views_by_rank(
        source, own_exchange.send_displs, own_exchange.send_counts, torch_elements
    )
    return _make_message_issue(
        buffers.group,
        send,
        _views_by_rank(output, own_exchange.recv_displs, own_exchange.recv_counts, torch_elements),
    )


def _views_by_rank(
    buffer: Tensor, displs: tuple[int, ...], counts: tuple[int, ...], torch_elements: int
) -> list[Tensor | None]:
    """Return a view for each rank; None if there is nothing to move."""
    return [
        buffer.narrow(0, displ * torch_elements, count * torch_elements) if count else None
        for displ, count in zip(displs, counts, strict=True)
    ]


def _make_message_issue(
    group: RankGroup, send: Sequence[Tensor | None], receive: Sequence[Tensor | None]
) -> Issue:
    """Return point-to-point messages for the tensor of each rank; None for no message."""
    own_index, operations = group.index, []
    for index, rank in enumerate(group.ranks):
        # A message to the own rank is a copy, because not every backend supports it.
        for call, tensor in ((dist.isend, send[index]), (dist.irecv, receive[index])):
            if tensor is not None and index != own_index:
                operations.append(dist.P2POp(call, tensor, rank, group.process_group))
    sent_to_self, received_from_self = send[own_index], receive[own_index]

    def issue(_handle: bool) -> Works:
        if sent_to_self is not None and received_from_self is not None:
            received_from_self.copy_(sent_to_self)
        return list(dist.batch_isend_irecv(operations)) if operations else []

    return issue


def _make_pair_issue(buffers: _OperationBuffers) -> Issue:
    own_index, indices, pairs = buffers.group.index, range(buffers.group.size), buffers.sizes.pairs
    send = [buffers.source if (own_index, index) in pairs else None for index in indices]
    receive = [buffers.output_view if (index, own_index) in pairs else None for index in indices]
    return _make_message_issue(buffers.group, send, receive)


def _make_barrier_issue(buffers: _OperationBuffers) -> Issue:
    device_index = buffers.source.device.index  # None on the host
    devices = None if device_index is None else [device_index]
    group = buffers.group.process_group
    return _make_issue(lambda handle: dist.barrier(group, handle, devices))


def _make_group_issue(
    call: Callable[..., Any], arguments: Callable[[_OperationBuffers], tuple[Any, ...]]
) -> Any:
    """Return a function that issues ``call`` with its arguments before the process group."""
    return lambda e: _make_issue(call, *arguments(e), e.group.process_group)


_ISSUE_FACTORIES: dict[str, Callable[[_OperationBuffers], Issue]] = {
    "all_reduce": _make_group_issue(dist.all_reduce, lambda e: (e.output_view, e.op)),
    "all_gather": _make_group_issue(_all_gather_single, lambda e: (e.output_view, e.source)),
    "reduce_scatter": _make_group_issue(
        _reduce_scatter_single, lambda e: (e.output_view, e.source, e.op)
    ),
    "all_to_all": _make_group_issue(
        dist.all_to_all_single, lambda e: (e.output_view, e.source, None, None)
    ),
    "all_to_all_v": _make_all_to_all_v_issue,
    "broadcast": _make_group_issue(dist.broadcast, lambda e: (e.output_view, e.root)),
    "reduce": _make_group_issue(dist.reduce, lambda e: (e.output_view, e.root, e.op)),
    "gather": _make_group_issue(
        dist.gather, lambda e: (e.source, e.split_on_root(e.output_view), e.root)
    ),
    "scatter": _make_group_issue(
        dist.scatter, lambda e: (e.output_view, e.split_on_root(e.source), e.root)
    ),
    "sendrecv": _make_pair_issue,
    "permute": _make_pair_issue,
    "barrier": _make_barrier_issue,
}


def last_algorithm(group: RankGroup, device: Device) -> str:
    """Return the algorithm of the backend's last operation; ``n/a`` if it has no method
    ``last_algorithm() -> str``.
    """
    with suppress(RuntimeError, AttributeError):
        return str(group.backend_for(device).last_algorithm())
    return "n/a"


@dataclass(frozen=True)
class PreparedBuffers:
    """Buffers of one size on one backend, ready to run."""

    group: RankGroup
    bodies: tuple[IterationBody, ...]
    """One body, or one per iteration with unique buffers."""
    registered_pool: Any = None
    """Object that must live as long as the buffers."""

    def steps(self, count: int, first_body: int = 0) -> list[Callable[[], None]]:
        """Return ``count`` steps that cycle through the bodies, beginning with number
        ``first_body``.
        """
        body_count = len(self.bodies)
        return [self.bodies[(first_body + i) % body_count].step for i in range(count)]


def prepare_buffers(
    case: Case,
    part_sizes: tuple[BufferSizes, ...],
    group: RankGroup,
    device: Device,
    spec: BenchSpec,
) -> PreparedBuffers:
    """Allocate all buffers of a size.

    Raises:
        RuntimeError: there is not enough memory, or the backend cannot register it.
    """
    if not group.is_member:
        return PreparedBuffers(group, ())
    iterations = spec.iterations
    body_count = iterations.measured + iterations.warmup if spec.buffers.unique else 1
    bodies: list[IterationBody] = []
    with _registered_pool(group, device, spec.buffers.registered) as registered_pool:
        for _ in range(body_count):
            shared_parts = bodies[0].parts if bodies and spec.buffers.shared_output else ()
            parts = []
            for index, buffer_sizes in enumerate(part_sizes * iterations.aggregated):
                shared_output = (
                    shared_parts[index].output if shared_parts and not case.in_place else None
                )
                parts.append(build_part(case, buffer_sizes, group, device, shared_output))
            bodies.append(build_body(tuple(parts), device, group, case.operation.name))
    return PreparedBuffers(group, tuple(bodies), registered_pool)


@contextmanager
def _registered_pool(group: RankGroup, device: Device, registered: int) -> Iterator[Any]:
    """Yield a memory pool for the allocations in this context. At its end they are registered with
    the backend of ``group``. Yields None if nothing is to be registered.
    """
    if not registered or device.is_host:
        yield None
        return
    backend: Any = group.backend_for(device)
    if not hasattr(backend, "register_mem_pool"):
        raise RuntimeError(f"{group.backend} does not support registered buffers: omit -R")
    # Only NCCL has register_mem_pool, so the device is a CUDA device.
    pool = _memory_pool(backend, registered)
    with torch.cuda.use_mem_pool(pool):
        yield pool
    backend.register_mem_pool(pool, **({"symm": True} if registered == 2 else {}))


def _memory_pool(backend: Any, registered: int) -> Any:
    """Return a pool of memory from NCCL's allocator. If that is not supported, return a pool of
    CUDA's, whose memory NCCL can register, but not as symmetric windows (``registered`` 2).

    Raises:
        RuntimeError: symmetric windows are requested and not supported.
    """
    try:
        return torch.cuda.MemPool(backend.mem_allocator)
    except RuntimeError as error:
        if registered == 2:
            raise RuntimeError(
                "symmetric windows need memory of NCCL's own allocator, which torch provides only "
                f"if the GPUs support multicast and it is not disabled: use -R 1 ({error})"
            ) from error
        return torch.cuda.MemPool()


def release_buffers(prepared: PreparedBuffers, device: Device) -> None:
    """Deregister a size's buffers before they are freed."""
    if prepared.registered_pool is not None:
        device.synchronize()
        backend: Any = prepared.group.backend_for(device)
        backend.deregister_mem_pool(prepared.registered_pool)
