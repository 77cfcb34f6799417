"""Point-to-point communication between pipeline stages with different parallel layouts.

The communicator has the interface of megatron.core's ``P2PCommunicator`` and executes the transfers
of :mod:`.transfer_plan`. Receives are posted before sends, and the receive of the next micro-batch
is posted before the current one is computed. Sends complete while the stage computes; their tensors
are kept until then.
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
from flagscale.config.arguments.hetero.meshes import Meshes, Stage
from flagscale.train.meshes.groups import PipelineStagePosition, StageCommunicationGroups
from flagscale.train.meshes.transfer_plan import (
    BlockTransfer,
    StageRegion,
    compute_region,
    plan_transfers,
)

_MAX_PENDING_SENDS = 4
"""Maximum number of incomplete sends, whose tensors are kept: two in each direction."""
_DEVICE_BLOCKING_BACKENDS = ("nccl",)
"""Backends whose posted receives occupy multiprocessors of the device until the message arrives."""


@dataclass
class _MessageFlow:
    """One direction of messages: activations or gradients.

    Attributes:
        group: process group of the messages.
        sends: transfers of a micro-batch from this rank.
        receives: transfers of a micro-batch to this rank.
        sends_from_host: whether device tensors are sent from host memory.
        receives_on_host: whether device tensors are received in host memory.
        early_receives_left: number of receives of this step that may still be posted before the
            schedule requests them.
        posted_receive: receive that was posted early and not yet requested, or None.
    """

    group: dist.ProcessGroup
    sends: tuple[BlockTransfer, ...] = ()
    receives: tuple[BlockTransfer, ...] = ()
    sends_from_host: bool = False
    receives_on_host: bool = False
    early_receives_left: int = 0
    posted_receive: _PendingReceive | None = None


class MeshP2PCommunicator:
    """Communicator for megatron.core's pipeline schedules.

    The tensor shapes that schedules pass are ignored: the plan determines the shapes.
    """

    def __init__(
        self,
        config: Any,
        meshes: Meshes,
        stage: Stage,
        stage_groups: StageCommunicationGroups,
        tensor_parallel: dist.ProcessGroup,
        device: Device,
        *,
        sequence_length: int,
    ) -> None:
        """Plan the transfers of this rank.

        Args:
            config: the model's configuration on this rank.
            meshes: meshes of the whole job.
            stage: stage of this rank.
            stage_groups: process groups for messages.
            tensor_parallel: tensor-parallel group of this rank.
            device: device of this rank.
            sequence_length: number of tokens of a whole sequence.
        """
        self.config = config
        # The schedule derives the number of warm-up forward passes from the distance to the last
        # stage. With hetero_eager_1f1b distances are doubled, and so is that number.
        virtual_positions = 2 if meshes.eager else 1
        self.pp_group = PipelineStagePosition(
            virtual_positions * stage.index, virtual_positions * (len(meshes.stages) - 1) + 1
        )
        self.virtual_pipeline_model_parallel_size = config.virtual_pipeline_model_parallel_size
        self._tensor_parallel = tensor_parallel
        self._device = device
        rank, stages = dist.get_rank(), meshes.stages
        self._region = compute_region(meshes, stage, rank, sequence_length)
        next_stage = stages[(stage.index + 1) % len(stages)]
        previous_stage = stages[stage.index - 1]

        def uses_host_memory(peer_stage: Stage) -> bool:
            has_other_devices = (
                stage_groups.mixed_devices and peer_stage.mesh_index != stage.mesh_index
            )
            return not device.is_host and (stage_groups.via_host_memory or has_other_devices)

        def build_flow(group: dist.ProcessGroup, target: Stage, origin: Stage) -> _MessageFlow:
            outgoing = plan_transfers(meshes, stage, target, sequence_length)
            incoming = plan_transfers(meshes, origin, stage, sequence_length)
            return _MessageFlow(
                group,
                tuple(transfer for transfer in outgoing if transfer.sender == rank),
                tuple(transfer for transfer in incoming if transfer.receiver == rank),
                sends_from_host=uses_host_memory(target),
                receives_on_host=uses_host_memory(origin),
            )

        # With interleaved stages the first stage follows the last one.
        self._forward = build_flow(stage_groups.forward, next_stage, previous_stage)
        self._backward = build_flow(stage_groups.backward, previous_stage, next_stage)
        # The loss of a rank is the mean over its part of a micro-batch, and gradients are averaged
        # over the data- and context-parallel ranks of a mesh. Gradients from a mesh with fewer of
        # these are scaled up accordingly.
        self._gradient_scale = 1.0
        if not config.calculate_per_token_loss:
            own_parts = stage.mesh.dp * stage.mesh.cp
            self._gradient_scale = own_parts / (next_stage.mesh.dp * next_stage.mesh.cp)
        self._pending_sends: deque[_PendingSend] = deque()
        # A single thread keeps messages in order.
        self._send_executor = ThreadPoolExecutor(1, thread_name_prefix="pipeline-send")

    def begin_step(self, micro_batches: int, *, forward_only: bool) -> None:
        """Prepare a step of ``micro_batches``.

        With virtual stages the schedule itself requests receives early.
        """
        if self.virtual_pipeline_model_parallel_size is not None:
            return
        for flow in (self._forward, self._backward):
            can_receive_early = dist.get_backend(flow.group) not in _DEVICE_BLOCKING_BACKENDS
            flow.early_receives_left = micro_batches if can_receive_early else 0
        if forward_only:
            self._backward.early_receives_left = 0

    # --- interface of megatron.core's schedules ---------------------------------------------------

    def recv_forward(self, tensor_shapes: Any, is_first_stage: bool) -> Any:
        received = None if is_first_stage else self._receive(self._forward)
        return _wrap_as_requested(tensor_shapes, received)

    def recv_backward(self, tensor_shapes: Any, is_last_stage: bool) -> Any:
        received = None if is_last_stage else self._receive(self._backward)
        return _wrap_as_requested(tensor_shapes, received)

    def send_forward(self, output_tensors: Any, is_last_stage: bool) -> None:
        if not is_last_stage:
            self._post_messages(self._forward, output_tensors, receives=False)

    def send_backward(self, input_tensor_grads: Any, is_first_stage: bool) -> None:
        if not is_first_stage:
            self._post_messages(self._backward, input_tensor_grads, receives=False)

    def send_forward_recv_backward(
        self, output_tensors: Any, tensor_shapes: Any, is_last_stage: bool
    ) -> Any:
        if is_last_stage:
            return _wrap_as_requested(tensor_shapes, None)
        return _wrap_as_requested(
            tensor_shapes, self._send_and_receive(self._backward, self._forward, output_tensors)
        )

    def send_backward_recv_forward(
        self, input_tensor_grads: Any, tensor_shapes: Any, is_first_stage: bool
    ) -> Any:
        if is_first_stage:
            return _wrap_as_requested(tensor_shapes, None)
        received = self._send_and_receive(self._forward, self._backward, input_tensor_grads)
        return _wrap_as_requested(tensor_shapes, received)

    def send_forward_recv_forward(
        self, output_tensor: Any, recv_prev: bool, tensor_shape: Any, overlap_p2p_comm: bool = False
    ) -> Any:
        pending = self._post_messages(self._forward, output_tensor, receives=recv_prev)
        return _overlapped_result(pending, "recv_prev", overlap_p2p_comm)

    def send_backward_recv_backward(
        self,
        input_tensor_grad: Any,
        recv_next: bool,
        tensor_shape: Any,
        overlap_p2p_comm: bool = False,
    ) -> Any:
        pending = self._post_messages(self._backward, input_tensor_grad, receives=recv_next)
        return _overlapped_result(pending, "recv_next", overlap_p2p_comm)

    def send_forward_backward_recv_forward_backward(
        self,
        output_tensor: Any,
        input_tensor_grad: Any,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Any,
    ) -> Any:
        forward = self._post_messages(self._forward, output_tensor, receives=recv_prev)
        backward = self._post_messages(self._backward, input_tensor_grad, receives=recv_next)
        return (forward.wait() if forward else None, backward.wait() if backward else None)

    def finish_step(self) -> None:
        """Wait for all sends of the step."""
        while self._pending_sends:
            self._complete_oldest_send()

    # --- implementation ---------------------------------------------------------------------------

    def _complete_oldest_send(self) -> None:
        """Wait for the oldest send. A work object can be waited for only once."""
        for work in self._pending_sends.popleft().works():
            work.wait()

    def _receive(self, flow: _MessageFlow) -> torch.Tensor:
        return self._complete_receive(flow, self._post_receive(flow))

    def _send_and_receive(
        self, receive_flow: _MessageFlow, send_flow: _MessageFlow, tensor: Any
    ) -> torch.Tensor:
        """Post a receive of one flow, then send on the other flow, then wait for the receive."""
        pending = self._post_receive(receive_flow)
        self._post_messages(send_flow, tensor, receives=False)
        return self._complete_receive(receive_flow, pending)

    def _post_receive(self, flow: _MessageFlow) -> _PendingReceive:
        """Return the next receive of a flow, which may be posted already."""
        pending, flow.posted_receive = flow.posted_receive, None
        if pending is None:
            flow.early_receives_left -= 1
            pending = self._post_messages(flow, None, receives=True)
        assert pending is not None
        return pending

    def _complete_receive(self, flow: _MessageFlow, pending: _PendingReceive) -> torch.Tensor:
        """Wait for a receive and post the next one, so that it arrives during the computation."""
        tensor = pending.wait()
        if flow.early_receives_left > 0:
            flow.posted_receive = self._post_receive(flow)
        return tensor

    def _post_messages(
        self, flow: _MessageFlow, tensor: Any, *, receives: bool
    ) -> _PendingReceive | None:
        """Start sending ``tensor``, unless it is None, and receiving.

        Both directions of a flow are one batch. NCCL has one order per group, so two ranks that
        both receive first would deadlock.
        """
        pending = self._prepare_receive(flow) if receives else None
        receive_ops = pending.ops if pending else []
        if tensor is not None and flow.sends and flow.sends_from_host:
            self._send_from_host(flow, tensor)
            tensor = None
        send_ops = []
        if tensor is not None:
            send_ops = self._build_send_ops(flow, self._extract_blocks(flow, tensor))
        if not receive_ops and not send_ops:
            return pending
        works = _start_operations(flow, [*receive_ops, *send_ops])
        # NCCL returns one work per batch, other backends return one per operation.
        work_per_op = len(works) == len(receive_ops) + len(send_ops)
        if pending:
            pending.works = works[: len(receive_ops)] if work_per_op else works
        if send_ops:
            send_works = works[len(receive_ops) :] if work_per_op else works
            self._pending_sends.append(
                _PendingSend(lambda: send_works, [op.tensor for op in send_ops])
            )
        return pending

    def _send_from_host(self, flow: _MessageFlow, tensor: Any) -> None:
        """Copy the blocks to host memory and send them, both asynchronously.

        A thread waits for the copies and starts the sends.
        """
        blocks = self._extract_blocks(flow, tensor)
        host_copies = [self._device.copy_to_host(block) for block in blocks]
        ops = self._build_send_ops(flow, [host for host, _ in host_copies])

        def wait_and_send() -> Sequence[Any]:
            for _, wait in host_copies:
                wait()
            return _start_operations(flow, ops)

        future = self._send_executor.submit(wait_and_send)
        self._pending_sends.append(
            _PendingSend(future.result, [*blocks, *(host for host, _ in host_copies)])
        )

    def _extract_blocks(self, flow: _MessageFlow, tensor: Any) -> list[torch.Tensor]:
        """Return the blocks of ``tensor`` that this rank sends."""
        while len(self._pending_sends) >= _MAX_PENDING_SENDS:
            self._complete_oldest_send()
        (activations,) = tensor if isinstance(tensor, list) else (tensor,)
        activations = activations.detach()
        blocks = [
            _select_block(
                activations, send.source_token, send.length, send.source_sequence, send.sequences
            )
            for send in flow.sends
        ]
        return [block.contiguous() for block in blocks]

    def _build_send_ops(
        self, flow: _MessageFlow, blocks: Sequence[torch.Tensor]
    ) -> list[dist.P2POp]:
        return [
            dist.P2POp(dist.isend, block, send.receiver, flow.group)
            for block, send in zip(blocks, flow.sends, strict=True)
        ]

    def _prepare_receive(self, flow: _MessageFlow) -> _PendingReceive:
        """Allocate the tensor to receive and build its receive operations."""
        region = self._region
        shape = (region.length, len(region.batch), self.config.hidden_size)
        dtype, device = self.config.pipeline_dtype, self._device
        tensor = torch.empty(shape, dtype=dtype, device=device.torch_device)
        blocks, ops = [], []
        for receive in flow.receives:
            target = _select_block(
                tensor,
                receive.target_token,
                receive.length,
                receive.target_sequence,
                receive.sequences,
            )
            block = target
            if flow.receives_on_host:
                block = device.allocate_host_buffer(target.shape, dtype)
            elif not target.is_contiguous():
                block = torch.empty_like(target, memory_format=torch.contiguous_format)
            blocks.append((target, block))
            ops.append(dist.P2POp(dist.irecv, block, receive.sender, flow.group))
        gather_group = self._tensor_parallel if region.slice_length < region.length else None
        scale = self._gradient_scale if flow is self._backward else 1.0
        return _PendingReceive(tensor, ops, blocks, region, gather_group, scale)


@dataclass
class _PendingSend:
    """Incomplete send.

    Attributes:
        works: returns torch's work handles; waits until the send has started.
        memory: tensors that the send reads, kept until it is complete.
    """

    works: Callable[[], Sequence[Any]]
    memory: list[torch.Tensor]


@dataclass
class _PendingReceive:
    """Incomplete receive.

    Attributes:
        tensor: tensor to receive, valid after :meth:`wait`.
        ops: receive operations, one per block.
        blocks: pairs of a part of ``tensor`` and the buffer in which it is received.
        region: region of this rank.
        gather_group: group of the all-gather of tensor-parallel slices, or None.
        scale: factor of the received values.
        works: torch's work handles, once the operations have started.
    """

    tensor: torch.Tensor
    ops: list[dist.P2POp]
    blocks: Sequence[tuple[torch.Tensor, torch.Tensor]]
    region: StageRegion
    gather_group: dist.ProcessGroup | None
    scale: float
    works: Sequence[Any] = ()

    def wait(self) -> torch.Tensor:
        """Complete the receive and return the tensor.

        With tensor parallelism but without sequence parallelism, peers' slices are all-gathered.
        """
        for work in self.works:
            work.wait()
        for target, block in self.blocks:
            if target is not block:
                target.copy_(block, non_blocking=True)
        start = self.region.slice_start
        rank_slice = self.tensor[start : start + self.region.slice_length]
        if self.scale != 1.0:
            rank_slice.mul_(self.scale)
        if self.gather_group is not None:
            dist.all_gather_into_tensor(self.tensor, rank_slice.clone(), group=self.gather_group)
        return self.tensor.requires_grad_()


def _select_block(
    tensor: torch.Tensor, token: int, length: int, sequence: int, sequences: int
) -> torch.Tensor:
    """Return the block [length, sequences, h] of ``tensor`` that begins at [token, sequence]."""
    return tensor[token : token + length, sequence : sequence + sequences]


def _start_operations(flow: _MessageFlow, ops: list[dist.P2POp]) -> Sequence[Any]:
    """Start operations and return their works.

    From host memory they start one by one: a batch belongs to the group, so messages of other
    threads would join it.
    """
    if flow.sends_from_host:
        return [op.op(op.tensor, op.peer, op.group) for op in ops]
    works: Sequence[Any] = dist.batch_isend_irecv(ops)
    return works


def _overlapped_result(pending: _PendingReceive | None, name: str, overlap: bool) -> Any:
    """Return the result of a receive as the interleaved schedule expects it.

    This is the tensor, or with overlap the tensor before it is complete and a dictionary of handles
    with a method ``wait``.
    """
    if not overlap:
        return pending.wait() if pending else None
    return (pending.tensor, {name: pending}) if pending else (None, {})


def _wrap_as_requested(shapes: Any, tensor: torch.Tensor | None) -> Any:
    """Return the tensor as the schedule expects it.

    The interleaved schedule passes one shape and expects a tensor. The other schedules pass a list
    of shapes and expect a list.
    """
    single = bool(shapes) and isinstance(shapes[0], int)
    return tensor if single else [tensor]
