"""What is timed: one operation on prepared buffers, as a function without arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from flagscale.bench.collectives import sizes
from flagscale.bench.collectives.devices import BenchDevice
from flagscale.bench.collectives.patterns import Exchange, Pairs, exchanges_for, pairs_for
from flagscale.bench.collectives.spec import BenchSpec, Case, Groups
from flagscale.bench.collectives.teams import Team

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
    """The buffers of one operation for one size, in elements; equal on all ranks of a team but
    for what ``exchanges`` says."""

    elements: int
    """The whole logical buffer."""
    inputs: int
    outputs: int
    exchanges: tuple[Exchange, ...] = ()
    pairs: Pairs = ()

    def share(self, team_size: int) -> int:
        return self.elements // team_size


@dataclass(frozen=True)
class Part:
    """One operation on one pair of buffers."""

    shape: Shape
    input: torch.Tensor
    output: torch.Tensor
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
    case: Case, size: int, team: Team, spec: BenchSpec
) -> tuple[tuple[Shape, ...], tuple[str, ...]]:
    """The shapes of the parts of about ``size`` bytes, by the coalescing ratio, and notes.

    Raises:
        ConfigError: all-to-all-v counts or pairs do not fit the team.
    """
    total = sum(spec.buffers.ratio)
    found, notes = [], []
    for share in spec.buffers.ratio:
        shape, said = _shape(case, round(size * share / total), team, spec.groups)
        found.append(shape)
        notes += [note for note in said if note not in notes]
    return tuple(found), tuple(notes)


def _shape(case: Case, size: int, team: Team, groups: Groups) -> tuple[Shape, tuple[str, ...]]:
    op, n, element = case.operation, team.size, case.type.bytes
    if op.name == "barrier":
        return Shape(0, 0, 0), ()
    if op.name == "all_to_all_v":
        exchanges, notes = exchanges_for(n, groups.exchange, size, element)
        mine = exchanges[max(team.index, 0)]
        most = max(sum(e.send_counts) for e in exchanges)
        return Shape(most, mine.send_extent, mine.recv_extent, exchanges), notes
    elements = sizes.fit(size, element, n if op.parts else 1) // element
    inputs = elements // n if op.input == "part" else elements
    outputs = elements // n if op.output == "part" else elements
    pairs: Pairs = ()
    if op.name in ("sendrecv", "permute"):
        pairs = pairs_for(n, groups.pairs if op.name == "permute" else None)
    return Shape(elements, inputs, outputs, pairs=pairs), ()


def build(
    case: Case, shape: Shape, team: Team, device: BenchDevice, output: torch.Tensor | None = None
) -> Part:
    """Buffers of zeros and the operation on them. ``output`` reuses an earlier output."""
    dtype = getattr(torch, case.type.torch)

    def zeros(elements: int) -> torch.Tensor:
        return torch.zeros(elements, dtype=dtype, device=device.torch_device)

    name, share = case.operation.name, shape.share(team.size)
    if case.in_place and name == "all_gather":
        output = zeros(shape.outputs) if output is None else output
        source = output.narrow(0, team.index * share, share)
    elif case.in_place and name == "reduce_scatter":
        source = zeros(shape.inputs)
        output = source.narrow(0, team.index * share, share)
    elif case.in_place:
        source = output = zeros(shape.inputs) if output is None else output
    else:
        source = zeros(shape.inputs)
        output = zeros(shape.outputs) if output is None else output
    issue = _ISSUES[name](case, shape, team, _wire(case, source), _wire(case, output))
    return Part(shape, source, output, issue)


def _wire(case: Case, tensor: torch.Tensor) -> torch.Tensor:
    """The view of a buffer that torch.distributed can carry; the bytes are the same."""
    if not case.operation.reduces:
        # The buffer may be odd in bytes only for one-byte types, which need no view.
        return tensor.view(torch.uint8) if tensor.dtype in _AS_BYTES else tensor
    return tensor.view(_AS_SIGNED[tensor.dtype]) if tensor.dtype in _AS_SIGNED else tensor


def assemble(parts: tuple[Part, ...], device: BenchDevice, team: Team, name: str) -> Body:
    """One iteration of ``parts``."""
    if len(parts) == 1:
        issue = parts[0].issue

        def single() -> None:
            for work in issue(False):
                work.wait()

        return Body(parts, single)
    # gloo moves GPU memory, too, and has no such launch.
    grouping = device.is_cuda and team.group._get_backend(device.torch_device).supports_coalescing
    if grouping and name in ("all_reduce", "all_gather", "reduce_scatter"):

        def grouped() -> None:
            # One launch for all parts, as ncclGroupStart and ncclGroupEnd make it.
            with _coalescing_manager(team.group, device.torch_device):
                for part in parts:
                    part.issue(False)

        return Body(parts, grouped)

    def together() -> None:
        works = [work for part in parts for work in part.issue(True)]
        for work in works:
            work.wait()

    return Body(parts, together)


def _one(call: Callable[[bool], Any]) -> Issue:
    """Of a torch collective that returns a handle when asked for one, and else has finished."""

    def issue(handle: bool) -> Works:
        work = call(handle)
        return [] if work is None else [work]

    return issue


def _reduce_op(case: Case) -> Any:
    return REDUCE_OPS[case.reduction]


def _all_reduce(case: Case, _s: Shape, team: Team, _i: torch.Tensor, out: torch.Tensor) -> Issue:
    op, group = _reduce_op(case), team.group
    return _one(lambda handle: dist.all_reduce(out, op, group, handle))


def _all_gather(_c: Case, _s: Shape, team: Team, source: torch.Tensor, out: torch.Tensor) -> Issue:
    group = team.group
    return _one(lambda handle: _GATHER(out, source, group, handle))


def _reduce_scatter(
    case: Case, _s: Shape, team: Team, source: torch.Tensor, out: torch.Tensor
) -> Issue:
    op, group = _reduce_op(case), team.group
    return _one(lambda handle: _REDUCE_SCATTER(out, source, op, group, handle))


def _all_to_all(_c: Case, _s: Shape, team: Team, source: torch.Tensor, out: torch.Tensor) -> Issue:
    group = team.group
    return _one(lambda handle: dist.all_to_all_single(out, source, None, None, group, handle))


def _all_to_all_v(
    case: Case, shape: Shape, team: Team, source: torch.Tensor, out: torch.Tensor
) -> Issue:
    group, mine = team.group, shape.exchanges[team.index]
    unit = case.type.bytes // source.element_size()
    if mine.packed and all(e.packed for e in shape.exchanges):
        received = [count * unit for count in mine.recv_counts]
        sent = [count * unit for count in mine.send_counts]
        return _one(
            lambda handle: dist.all_to_all_single(out, source, received, sent, group, handle)
        )
    # torch's list form wants equal pieces on some backends, so gaps go message by message.
    return _messages(
        team,
        _pieces(source, mine.send_displs, mine.send_counts, unit),
        _pieces(out, mine.recv_displs, mine.recv_counts, unit),
    )


def _pieces(
    buffer: torch.Tensor, displs: tuple[int, ...], counts: tuple[int, ...], unit: int
) -> list[torch.Tensor | None]:
    """A view for each rank; None where there is nothing to move."""
    return [
        buffer.narrow(0, displ * unit, count * unit) if count else None
        for displ, count in zip(displs, counts, strict=True)
    ]


def _messages(
    team: Team, send: Sequence[torch.Tensor | None], receive: Sequence[torch.Tensor | None]
) -> Issue:
    """Point to point: a tensor for each rank of the team, None for no message."""
    me, group = team.index, team.group
    operations = []
    for place, rank in enumerate(team.ranks):
        # A message to oneself is a copy; not every backend takes it.
        outgoing, incoming = send[place], receive[place]
        if outgoing is not None and place != me:
            operations.append(dist.P2POp(dist.isend, outgoing, rank, group))
        if incoming is not None and place != me:
            operations.append(dist.P2POp(dist.irecv, incoming, rank, group))
    mine, to_me = send[me], receive[me]

    def issue(_handle: bool) -> Works:
        if mine is not None and to_me is not None:
            to_me.copy_(mine)
        return list(dist.batch_isend_irecv(operations)) if operations else []

    return issue


def _broadcast(case: Case, _s: Shape, team: Team, _i: torch.Tensor, out: torch.Tensor) -> Issue:
    group, source = team.group, team.ranks[case.root]
    return _one(lambda handle: dist.broadcast(out, source, group, handle))


def _reduce(case: Case, _s: Shape, team: Team, _i: torch.Tensor, out: torch.Tensor) -> Issue:
    op, group, target = _reduce_op(case), team.group, team.ranks[case.root]
    return _one(lambda handle: dist.reduce(out, target, op, group, handle))


def _gather(case: Case, _s: Shape, team: Team, source: torch.Tensor, out: torch.Tensor) -> Issue:
    group, target = team.group, team.ranks[case.root]
    pieces = list(out.chunk(team.size)) if team.index == case.root else None
    return _one(lambda handle: dist.gather(source, pieces, target, group, handle))


def _scatter(case: Case, _s: Shape, team: Team, source: torch.Tensor, out: torch.Tensor) -> Issue:
    group, origin = team.group, team.ranks[case.root]
    pieces = list(source.chunk(team.size)) if team.index == case.root else None
    return _one(lambda handle: dist.scatter(out, pieces, origin, group, handle))


def _along_pairs(
    _c: Case, shape: Shape, team: Team, source: torch.Tensor, out: torch.Tensor
) -> Issue:
    me = team.index
    targets = {receiver for sender, receiver in shape.pairs if sender == me}
    sources = {sender for sender, receiver in shape.pairs if receiver == me}
    places = range(team.size)
    return _messages(
        team,
        [source if place in targets else None for place in places],
        [out if place in sources else None for place in places],
    )


def _barrier(_c: Case, _s: Shape, team: Team, source: torch.Tensor, _o: torch.Tensor) -> Issue:
    group = team.group
    devices = [source.device.index] if source.is_cuda else None
    return _one(lambda handle: dist.barrier(group, handle, devices))


_ISSUES: dict[str, Callable[[Case, Shape, Team, torch.Tensor, torch.Tensor], Issue]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "all_to_all_v": _all_to_all_v,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "gather": _gather,
    "scatter": _scatter,
    "sendrecv": _along_pairs,
    "permute": _along_pairs,
    "barrier": _barrier,
}


def algorithm(team: Team, device: BenchDevice) -> str:
    """Which algorithm the backend chose for its last operation; ``n/a`` where it does not tell.

    A backend tells by a method ``last_algorithm() -> str``.
    """
    with suppress(RuntimeError, AttributeError):
        found: Any = team.group._get_backend(device.torch_device)
        return str(found.last_algorithm())
    return "n/a"
