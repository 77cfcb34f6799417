"""Carries activations and gradients between stages that are laid out unlike each other.

The methods that megatron.core's pipeline schedules call are those of its ``P2PCommunicator``; what
crosses is what :mod:`.boundary` has planned. Receives are posted before sends, and the next
micro-batch's before this one is computed; a send is under way while the stage computes, and its
tensor is kept until it is through.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from flagscale.accelerators.device import Device
from flagscale.config.arguments.meshes import Meshes, Stage
from flagscale.train.meshes.boundary import Move, Region, moves, region
from flagscale.train.meshes.groups import Boundaries, Stages

_MOST_UNDER_WAY = 4
"""Messages that are being sent at once, whose tensors are kept: two in each direction."""
_WAITS_ON_DEVICE = ("nccl",)
"""Backends whose receives take multiprocessors of the device from what it computes, for as long as
they wait for the message."""


@dataclass
class _Flow:
    """One kind of message: what this rank sends and is sent of it, a micro-batch; and whether that
    goes through the host's memory, though the device has it. ``left``: how many are still to be
    asked for in this step, as far as that may be done ahead of the schedule; ``coming``: the one
    that has been."""

    group: dist.ProcessGroup
    sends: tuple[Move, ...] = ()
    receives: tuple[Move, ...] = ()
    sends_from_host: bool = False
    receives_on_host: bool = False
    left: int = 0
    coming: _Coming | None = None


class Exchange:
    """What the schedule calls the communicator of its pipeline.

    Shapes that the schedule gives are those of this rank's own layout, which the plan knows.
    """

    def __init__(
        self,
        config: Any,
        meshes: Meshes,
        stage: Stage,
        boundaries: Boundaries,
        tensor_parallel: dist.ProcessGroup,
        device: Device,
        *,
        sequence: int,
    ) -> None:
        """
        Args:
            config: the model's configuration on this rank.
            meshes: of the whole job.
            stage: this rank's.
            boundaries: the groups to send in.
            tensor_parallel: this rank's tensor-parallel group.
            device: this rank's.
            sequence: tokens of a whole sequence.
        """
        self.config = config
        # How many forward passes the schedule does ahead follows from this.
        places = 2 if meshes.eager else 1
        self.pp_group = Stages(places * stage.index, places * (len(meshes.stages) - 1) + 1)
        self.virtual_pipeline_model_parallel_size = config.virtual_pipeline_model_parallel_size
        self._tensor_parallel = tensor_parallel
        self._device = device
        rank, stages = dist.get_rank(), meshes.stages
        self._region = region(meshes, stage, rank, sequence)
        after, before = stages[(stage.index + 1) % len(stages)], stages[stage.index - 1]

        def by_host(other: Stage) -> bool:
            unlike = boundaries.unlike and other.mesh_index != stage.mesh_index
            return not device.is_host and (boundaries.on_host or unlike)

        def flow(group: dist.ProcessGroup, to: Stage, origin: Stage) -> _Flow:
            out = moves(meshes, stage, to, sequence)
            into = moves(meshes, origin, stage, sequence)
            return _Flow(
                group,
                tuple(move for move in out if move.sender == rank),
                tuple(move for move in into if move.receiver == rank),
                sends_from_host=by_host(to),
                receives_on_host=by_host(origin),
            )

        # With interleaved stages the last one's successor is the first.
        self._forward = flow(boundaries.forward, after, before)
        self._backward = flow(boundaries.backward, before, after)
        # Each rank's loss is a mean over its own part of a micro-batch, and gradients are averaged
        # over the parts of a mesh: what comes of fewer parts counts more.
        parts = stage.mesh.dp * stage.mesh.cp
        self._scale = 1.0
        if not config.calculate_per_token_loss:
            self._scale = parts / (after.mesh.dp * after.mesh.cp)
        self._under_way: deque[_Sent] = deque()
        # One thread, so that messages go in their order.
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="exchange")

    def begin(self, micro_batches: int, *, forward_only: bool) -> None:
        """Before a step of so many micro-batches. With virtual stages the schedule itself says
        early what it will want."""
        if self.virtual_pipeline_model_parallel_size is not None:
            return
        for flow in (self._forward, self._backward):
            ahead = dist.get_backend(flow.group) not in _WAITS_ON_DEVICE
            flow.left = micro_batches if ahead else 0
        if forward_only:
            self._backward.left = 0

    # --- as the schedules call it -----------------------------------------------------------------

    def recv_forward(self, tensor_shapes: Any, is_first_stage: bool) -> Any:
        received = None if is_first_stage else self._receive(self._forward)
        return _as_asked(tensor_shapes, received)

    def recv_backward(self, tensor_shapes: Any, is_last_stage: bool) -> Any:
        received = None if is_last_stage else self._receive(self._backward)
        return _as_asked(tensor_shapes, received)

    def send_forward(self, output_tensors: Any, is_last_stage: bool) -> None:
        if not is_last_stage:
            self._begin(self._forward, output_tensors, receives=False)

    def send_backward(self, input_tensor_grads: Any, is_first_stage: bool) -> None:
        if not is_first_stage:
            self._begin(self._backward, input_tensor_grads, receives=False)

    def send_forward_recv_backward(
        self, output_tensors: Any, tensor_shapes: Any, is_last_stage: bool
    ) -> Any:
        if is_last_stage:
            return _as_asked(tensor_shapes, None)
        return _as_asked(tensor_shapes, self._cross(self._backward, self._forward, output_tensors))

    def send_backward_recv_forward(
        self, input_tensor_grads: Any, tensor_shapes: Any, is_first_stage: bool
    ) -> Any:
        if is_first_stage:
            return _as_asked(tensor_shapes, None)
        received = self._cross(self._forward, self._backward, input_tensor_grads)
        return _as_asked(tensor_shapes, received)

    def send_forward_recv_forward(
        self, output_tensor: Any, recv_prev: bool, tensor_shape: Any, overlap_p2p_comm: bool = False
    ) -> Any:
        coming = self._begin(self._forward, output_tensor, receives=recv_prev)
        return _now_or_later(coming, "recv_prev", overlap_p2p_comm)

    def send_backward_recv_backward(
        self,
        input_tensor_grad: Any,
        recv_next: bool,
        tensor_shape: Any,
        overlap_p2p_comm: bool = False,
    ) -> Any:
        coming = self._begin(self._backward, input_tensor_grad, receives=recv_next)
        return _now_or_later(coming, "recv_next", overlap_p2p_comm)

    def send_forward_backward_recv_forward_backward(
        self,
        output_tensor: Any,
        input_tensor_grad: Any,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Any,
    ) -> Any:
        forward = self._begin(self._forward, output_tensor, receives=recv_prev)
        backward = self._begin(self._backward, input_tensor_grad, receives=recv_next)
        return (forward.wait() if forward else None, backward.wait() if backward else None)

    def finish(self) -> None:
        """Wait for what is still being sent; between steps nothing is."""
        while self._under_way:
            self._let_go()

    # --- how --------------------------------------------------------------------------------------

    def _let_go(self) -> None:
        """Wait for the oldest message that was sent. A work can be waited for once."""
        for work in self._under_way.popleft().works():
            work.wait()

    def _receive(self, flow: _Flow) -> torch.Tensor:
        return self._wait(flow, self._ask(flow))

    def _cross(self, into: _Flow, out: _Flow, tensor: Any) -> torch.Tensor:
        """Receive of one flow, which is posted first, while sending of the other."""
        coming = self._ask(into)
        self._begin(out, tensor, receives=False)
        return self._wait(into, coming)

    def _ask(self, flow: _Flow) -> _Coming:
        """The next message of a flow, which may have been asked for already."""
        coming, flow.coming = flow.coming, None
        if coming is None:
            flow.left -= 1
            coming = self._begin(flow, None, receives=True)
        assert coming is not None
        return coming

    def _wait(self, flow: _Flow, coming: _Coming) -> torch.Tensor:
        """The message, and the next one asked for: it arrives while this one is computed."""
        tensor = coming.wait()
        if flow.left > 0:
            flow.coming = self._ask(flow)
        return tensor

    def _begin(self, flow: _Flow, tensor: Any, *, receives: bool) -> _Coming | None:
        """Start sending ``tensor``, unless it is None, and receiving. What goes and what comes of
        one flow goes in one batch: NCCL has an order for each group, in which two ranks that both
        receive first would wait for ever."""
        coming = self._awaited(flow) if receives else None
        comes = coming.ops if coming else []
        if tensor is not None and flow.sends and flow.sends_from_host:
            self._fetch_and_send(flow, tensor)
            tensor = None
        goes = [] if tensor is None else self._sends(flow, self._blocks(flow, tensor))
        if not comes and not goes:
            return coming
        works = _start(flow, [*comes, *goes])
        # NCCL has one work for all of a batch, others have one for each operation.
        each = len(works) == len(comes) + len(goes)
        if coming:
            coming.works = works[: len(comes)] if each else works
        if goes:
            own = works[len(comes) :] if each else works
            self._under_way.append(_Sent(lambda: own, [op.tensor for op in goes]))
        return coming

    def _fetch_and_send(self, flow: _Flow, tensor: Any) -> None:
        """Send copies, which the device makes while it goes on; a thread waits for them."""
        blocks = self._blocks(flow, tensor)
        fetched = [self._device.fetch(block) for block in blocks]
        ops = self._sends(flow, [host for host, _ in fetched])

        def send() -> Sequence[Any]:
            for _, wait in fetched:
                wait()
            return _start(flow, ops)

        begun = self._sender.submit(send)
        self._under_way.append(_Sent(begun.result, [*blocks, *(host for host, _ in fetched)]))

    def _blocks(self, flow: _Flow, tensor: Any) -> list[torch.Tensor]:
        """What this rank sends of a tensor."""
        while len(self._under_way) >= _MOST_UNDER_WAY:
            self._let_go()
        (whole,) = tensor if isinstance(tensor, list) else (tensor,)
        whole = whole.detach()
        return [
            _block(whole, move.source, move.length, move.source_batch, move.sequences).contiguous()
            for move in flow.sends
        ]

    def _sends(self, flow: _Flow, blocks: Sequence[torch.Tensor]) -> list[dist.P2POp]:
        return [
            dist.P2POp(dist.isend, block, move.receiver, flow.group)
            for block, move in zip(blocks, flow.sends, strict=True)
        ]

    def _awaited(self, flow: _Flow) -> _Coming:
        """The tensor that is to come, and what this rank is sent of it."""
        held = self._region
        shape = (held.length, len(held.batch), self.config.hidden_size)
        dtype, device = self.config.pipeline_dtype, self._device
        tensor = torch.empty(shape, dtype=dtype, device=device.torch_device)
        blocks, ops = [], []
        for move in flow.receives:
            place = _block(tensor, move.target, move.length, move.target_batch, move.sequences)
            block = place
            if flow.receives_on_host:
                block = device.landing(place.shape, dtype)
            elif not place.is_contiguous():
                block = torch.empty_like(place, memory_format=torch.contiguous_format)
            blocks.append((place, block))
            ops.append(dist.P2POp(dist.irecv, block, move.sender, flow.group))
        gathers = self._tensor_parallel if held.own < held.length else None
        scale = self._scale if flow is self._backward else 1.0
        return _Coming(tensor, ops, blocks, held, gathers, scale)


@dataclass
class _Sent:
    """A message on its way: its works, once it has begun, and the memory that it is read from."""

    works: Callable[[], Sequence[Any]]
    memory: list[torch.Tensor]


@dataclass
class _Coming:
    """A tensor on its way, which is whole after :meth:`wait`."""

    tensor: torch.Tensor
    ops: list[dist.P2POp]
    blocks: Sequence[tuple[torch.Tensor, torch.Tensor]]
    region: Region
    gathers: dist.ProcessGroup | None
    scale: float
    works: Sequence[Any] = ()

    def wait(self) -> torch.Tensor:
        for work in self.works:
            work.wait()
        for place, block in self.blocks:
            if place is not block:
                place.copy_(block, non_blocking=True)
        own = self.tensor[self.region.first : self.region.first + self.region.own]
        if self.scale != 1.0:
            own.mul_(self.scale)
        if self.gathers is not None:
            dist.all_gather_into_tensor(self.tensor, own.clone(), group=self.gathers)
        return self.tensor.requires_grad_()


def _block(
    tensor: torch.Tensor, token: int, length: int, sequence: int, sequences: int
) -> torch.Tensor:
    return tensor[token : token + length, sequence : sequence + sequences]


def _start(flow: _Flow, ops: list[dist.P2POp]) -> Sequence[Any]:
    """Works of messages. A batch is a group's: another thread's message would get into it."""
    if flow.sends_from_host:
        return [op.op(op.tensor, op.peer, op.group) for op in ops]
    works: Sequence[Any] = dist.batch_isend_irecv(ops)
    return works


def _now_or_later(coming: _Coming | None, name: str, later: bool) -> Any:
    """What the interleaved schedule wants of a receive: the tensor, or where it overlaps the tensor
    that is to come and what to wait for."""
    if not later:
        return coming.wait() if coming else None
    return (coming.tensor, {name: coming}) if coming else (None, {})


def _as_asked(shapes: Any, tensor: torch.Tensor | None) -> Any:
    """The interleaved schedule gives one shape and takes a tensor, the other lists of both."""
    one = bool(shapes) and isinstance(shapes[0], int)
    return tensor if one else [tensor]
