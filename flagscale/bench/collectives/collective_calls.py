"""What is timed: one operation on prepared buffers, as a function without arguments; and all
buffers of one size: allocated, registered where asked, and the steps that use them."""

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

# torch 2.13 renamed them and warns of the old names.
_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "prod": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "avg": dist.ReduceOp.AVG,
}
# torch's backends have no names for these types; where nothing is added up, bytes are bytes.
_AS_BYTES = (torch.uint16, torch.int16, torch.uint32, torch.uint64)
# Sums and products of two's complement are the same bits, signed or not; see DataType.reduces.
_AS_SIGNED = {torch.uint32: torch.int32, torch.uint64: torch.int64}

Works = list[Any]
Issue = Callable[[bool], Works]


@dataclass(frozen=True)
class Shape:
    """The buffers of one operation for one size, in elements; equal on all ranks of a group but
    for what ``exchanges`` says."""

    elements: int
    """The whole logical buffer."""
    inputs: int
    outputs: int
    exchanges: tuple[Exchange, ...] = ()
    pairs: Pairs = ()

    def shard(self, ranks: int) -> int:
        """Elements of one rank's part."""
        return self.elements // ranks


@dataclass(frozen=True)
class Part:
    """One operation on one pair of buffers."""

    shape: Shape
    input: Tensor
    output: Tensor
    issue: Issue
    """Start it; ``True`` asks for handles to wait on."""

    def run(self) -> None:
        for work in self.issue(False):
            work.wait()


@dataclass(frozen=True)
class Body:
    """What one iteration runs: a part, or several issued together."""

    parts: tuple[Part, ...]
    step: Callable[[], None]


def shapes(
    case: Case, size: int, group: RankGroup, spec: BenchSpec
) -> tuple[tuple[Shape, ...], tuple[str, ...]]:
    """The shapes of the parts of about ``size`` bytes, by the coalescing ratio, and notes.

    Raises:
        ConfigError: all-to-all-v counts or pairs do not fit the group.
    """
    ratios = spec.buffers.ratio
    parts = [round(size * ratio / sum(ratios)) for ratio in ratios]
    found, said = zip(*(_shape(case, part, group, spec.groups) for part in parts), strict=True)
    return found, tuple(dict.fromkeys(note for notes in said for note in notes))


def _shape(
    case: Case, size: int, group: RankGroup, given: GroupsSpec
) -> tuple[Shape, tuple[str, ...]]:
    op, n, element = case.operation, group.size, case.type.bytes
    if op.name == "barrier":
        return Shape(0, 0, 0), ()
    if op.name == "all_to_all_v":
        exchanges, notes = exchanges_for(n, given.exchange, size, element)
        most = max(sum(e.send_counts) for e in exchanges)
        inputs, outputs = exchanges[max(group.index, 0)].extents
        return Shape(most, inputs, outputs, exchanges), notes
    elements = sizes.fit(size, element, n if op.parts else 1) // element
    inputs = elements // n if op.input == "part" else elements
    outputs = elements // n if op.output == "part" else elements
    pairs: Pairs = ()
    if op.name in ("sendrecv", "permute"):
        pairs = pairs_for(n, given.pairs if op.name == "permute" else None)
    return Shape(elements, inputs, outputs, pairs=pairs), ()


def build(
    case: Case, shape: Shape, group: RankGroup, device: Device, output: Tensor | None = None
) -> Part:
    """Buffers of zeros and the operation on them. ``output`` reuses an earlier output."""
    dtype = getattr(torch, case.type.torch)

    def zeros(elements: int) -> Tensor:
        return torch.zeros(elements, dtype=dtype, device=device.torch_device)

    name, shard = case.operation.name, shape.shard(group.size)
    if case.in_place and name == "reduce_scatter":
        source = zeros(shape.inputs)
        output = source.narrow(0, group.index * shard, shard)
    else:
        output = zeros(shape.outputs) if output is None else output
        source = output if case.in_place else zeros(shape.inputs)
        if case.in_place and name == "all_gather":
            source = output.narrow(0, group.index * shard, shard)
    ends = _Ends(case, shape, group, _wire(case, source), _wire(case, output))
    return Part(shape, source, output, _ISSUES[name](ends))


def _wire(case: Case, tensor: Tensor) -> Tensor:
    """The view of a buffer that torch.distributed can carry; the bytes are the same."""
    if not case.operation.reduces:
        # The buffer may be odd in bytes only for one-byte types, which need no view.
        return tensor.view(torch.uint8) if tensor.dtype in _AS_BYTES else tensor
    return tensor.view(_AS_SIGNED[tensor.dtype]) if tensor.dtype in _AS_SIGNED else tensor


def assemble(parts: tuple[Part, ...], device: Device, group: RankGroup, name: str) -> Body:
    """One iteration of ``parts``."""
    if len(parts) == 1:
        return Body(parts, parts[0].run)
    process_group = group.process_group
    # gloo moves GPU memory, too, and has no such launch.
    grouping = not device.is_host and group.backend_on(device).supports_coalescing

    def grouped() -> None:
        # One launch for all parts, as ncclGroupStart and ncclGroupEnd make it.
        with _coalescing_manager(process_group, device.torch_device):
            for part in parts:
                part.issue(False)

    def together() -> None:
        for work in [work for part in parts for work in part.issue(True)]:
            work.wait()

    coalesced = grouping and name in ("all_reduce", "all_gather", "reduce_scatter")
    return Body(parts, grouped if coalesced else together)


@dataclass(frozen=True)
class _Ends:
    """What an operation is issued on: this rank's buffers, as torch carries them."""

    case: Case
    shape: Shape
    group: RankGroup
    source: Tensor
    out: Tensor

    @property
    def op(self) -> Any:
        return REDUCE_OPS[self.case.reduction]

    @property
    def root(self) -> int:
        """The root's global rank."""
        return self.group.ranks[self.case.root]

    def pieces_of_root(self, buffer: Tensor) -> list[Tensor] | None:
        """A part for each rank, on the root alone."""
        at_root = self.group.index == self.case.root
        return list(buffer.chunk(self.group.size)) if at_root else None


def _issue(call: Callable[..., Any], *arguments: Any) -> Issue:
    """Of a torch collective that returns a handle when asked for one, and else has finished."""

    def issue(handle: bool) -> Works:
        work = call(*arguments, handle)
        return [] if work is None else [work]

    return issue


def _all_to_all_v(ends: _Ends) -> Issue:
    exchanges, source, out = ends.shape.exchanges, ends.source, ends.out
    mine = exchanges[ends.group.index]
    unit = ends.case.type.bytes // source.element_size()
    if all(e.packed for e in exchanges):
        received = [count * unit for count in mine.recv_counts]
        sent = [count * unit for count in mine.send_counts]
        group = ends.group.process_group
        return _issue(dist.all_to_all_single, out, source, received, sent, group)
    # torch's list form wants equal pieces on some backends, so gaps go message by message.
    send = _pieces(source, mine.send_displs, mine.send_counts, unit)
    return _messages(ends.group, send, _pieces(out, mine.recv_displs, mine.recv_counts, unit))


def _pieces(
    buffer: Tensor, displs: tuple[int, ...], counts: tuple[int, ...], unit: int
) -> list[Tensor | None]:
    """A view for each rank; None where there is nothing to move."""
    return [
        buffer.narrow(0, displ * unit, count * unit) if count else None
        for displ, count in zip(displs, counts, strict=True)
    ]


def _messages(
    group: RankGroup, send: Sequence[Tensor | None], receive: Sequence[Tensor | None]
) -> Issue:
    """Point to point: a tensor for each rank of the group, None for no message."""
    me, operations = group.index, []
    for place, rank in enumerate(group.ranks):
        # A message to oneself is a copy; not every backend takes it.
        for call, tensor in ((dist.isend, send[place]), (dist.irecv, receive[place])):
            if tensor is not None and place != me:
                operations.append(dist.P2POp(call, tensor, rank, group.process_group))
    mine, to_me = send[me], receive[me]

    def issue(_handle: bool) -> Works:
        if mine is not None and to_me is not None:
            to_me.copy_(mine)
        return list(dist.batch_isend_irecv(operations)) if operations else []

    return issue


def _along_pairs(ends: _Ends) -> Issue:
    me, places, pairs = ends.group.index, range(ends.group.size), ends.shape.pairs
    send = [ends.source if (me, place) in pairs else None for place in places]
    receive = [ends.out if (place, me) in pairs else None for place in places]
    return _messages(ends.group, send, receive)


def _barrier(ends: _Ends) -> Issue:
    index = ends.source.device.index  # None on the host
    devices = None if index is None else [index]
    group = ends.group.process_group
    return _issue(lambda handle: dist.barrier(group, handle, devices))


def _of_group(call: Callable[..., Any], arguments: Callable[[_Ends], tuple[Any, ...]]) -> Any:
    """Issues ``call`` with what it takes before its process group."""
    return lambda e: _issue(call, *arguments(e), e.group.process_group)


_ISSUES: dict[str, Callable[[_Ends], Issue]] = {
    "all_reduce": _of_group(dist.all_reduce, lambda e: (e.out, e.op)),
    "all_gather": _of_group(_GATHER, lambda e: (e.out, e.source)),
    "reduce_scatter": _of_group(_REDUCE_SCATTER, lambda e: (e.out, e.source, e.op)),
    "all_to_all": _of_group(dist.all_to_all_single, lambda e: (e.out, e.source, None, None)),
    "all_to_all_v": _all_to_all_v,
    "broadcast": _of_group(dist.broadcast, lambda e: (e.out, e.root)),
    "reduce": _of_group(dist.reduce, lambda e: (e.out, e.root, e.op)),
    "gather": _of_group(dist.gather, lambda e: (e.source, e.pieces_of_root(e.out), e.root)),
    "scatter": _of_group(dist.scatter, lambda e: (e.out, e.pieces_of_root(e.source), e.root)),
    "sendrecv": _along_pairs,
    "permute": _along_pairs,
    "barrier": _barrier,
}


def algorithm(group: RankGroup, device: Device) -> str:
    """Which algorithm the backend chose for its last operation; ``n/a`` where it does not tell.

    A backend tells by a method ``last_algorithm() -> str``.
    """
    with suppress(RuntimeError, AttributeError):
        return str(group.backend_on(device).last_algorithm())
    return "n/a"


@dataclass(frozen=True)
class PreparedBuffers:
    """One size on one backend, ready to run."""

    group: RankGroup
    bodies: tuple[Body, ...]
    """One, or one an iteration with unique buffers."""
    keep: Any = None
    """What must live as long as the buffers."""

    def steps(self, count: int, first: int = 0) -> list[Callable[[], None]]:
        """``count`` steps, of the buffers from number ``first`` on, over and over."""
        many = len(self.bodies)
        return [self.bodies[(first + i) % many].step for i in range(count)]


def prepare(
    case: Case, shapes: tuple[Shape, ...], group: RankGroup, device: Device, spec: BenchSpec
) -> PreparedBuffers:
    """Allocate all buffers of a size.

    Raises:
        RuntimeError: there is not enough memory, or the backend cannot register it.
    """
    if not group.member:
        return PreparedBuffers(group, ())
    iterations = spec.iterations
    count = iterations.measured + iterations.warmup if spec.buffers.unique else 1
    bodies: list[Body] = []
    with _pool(group, device, spec.buffers.registered) as keep:
        for _ in range(count):
            shared = bodies[0].parts if bodies and spec.buffers.shared_output else ()
            parts = []
            for index, shape in enumerate(shapes * iterations.aggregated):
                reuse = shared[index].output if shared and not case.in_place else None
                parts.append(build(case, shape, group, device, reuse))
            bodies.append(assemble(tuple(parts), device, group, case.operation.name))
    return PreparedBuffers(group, tuple(bodies), keep)


@contextmanager
def _pool(group: RankGroup, device: Device, registered: int) -> Iterator[Any]:
    """Allocations within are registered with the backend of ``group`` at the end."""
    if not registered or device.is_host:
        yield None
        return
    backend: Any = group.backend_on(device)
    if not hasattr(backend, "register_mem_pool"):
        raise RuntimeError(f"{group.backend} registers no memory: measure it without -R")
    # NCCL's alone, and so CUDA's.
    pool = _memory_pool(backend, registered)
    with torch.cuda.use_mem_pool(pool):
        yield pool
    backend.register_mem_pool(pool, **({"symm": True} if registered == 2 else {}))


def _memory_pool(backend: Any, registered: int) -> Any:
    """Of memory that NCCL made itself, or of CUDA's, which it registers too, but not as windows."""
    try:
        return torch.cuda.MemPool(backend.mem_allocator)
    except RuntimeError as error:
        if registered == 2:
            raise RuntimeError(
                "symmetric windows need memory of NCCL's own allocator, which torch lends only "
                f"where the GPUs support multicast and it is not switched off: use -R 1 ({error})"
            ) from error
        return torch.cuda.MemPool()


def release(prepared: PreparedBuffers, device: Device) -> None:
    """Undo the registration of a size's buffers before they go."""
    if prepared.keep is not None:
        device.synchronize()
        backend: Any = prepared.group.backend_on(device)
        backend.deregister_mem_pool(prepared.keep)
