"""Training and evaluation steps on megatron.core's pipeline schedules.

The training loop (:mod:`flagscale.train.trainer`) calls :class:`Stepper`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig

from flagscale.config.arguments.layout import sequences_per_sample
from flagscale.config.arguments.rules.optimizer import captures_steps
from flagscale.config.arguments.rules.sharding import shards_gradients
from flagscale.train.bounded_all_reduce import SkippedReduceDetector
from flagscale.train.cuda_graph import CudaGraphSchedule
from flagscale.train.deferred_metrics import GRADIENTS_LOST, GRADIENTS_OVERFLOWED, HostMetrics
from flagscale.train.device import Device
from flagscale.train.forward_step import LOSS_REPORT_KEY, ForwardStep
from flagscale.train.layers.fp8_layers import invalidate_fp8_weights
from flagscale.train.meshes.finalize_grads import MeshGradientFinalizer, build_group_collection
from flagscale.train.meshes.groups import MeshGroups
from flagscale.train.meshes.p2p_communicator import MeshP2PCommunicator
from flagscale.train.microbatch_balancer import StepStopwatch
from flagscale.train.models.base import get_model_spec
from flagscale.train.models.document_mask import DocumentMaskBuilder
from flagscale.train.mtp_losses import MtpLossAverages
from flagscale.train.preference_loss import (
    PairForwardStep,
    PreferenceLoss,
    RewardAverages,
    finish_training,
)
from flagscale.train.profiling import Profiler
from flagscale.train.router_losses import RouterLossAverages
from flagscale.train.section_recorder import SectionRecorder, SectionTimers
from flagscale.train.section_times import DATA, OPTIMIZER
from flagscale.train.sharding.data_parallel import ShardedDataParallel
from flagscale.train.state import TrainState


class Evaluation(NamedTuple):
    """Result of an evaluation.

    Attributes:
        loss: mean loss in nats.
        rewards: means of preference training by name; empty for other training.
    """

    loss: float
    rewards: Mapping[str, float]


class Stepper:
    """Runs training steps on a :class:`TrainState` without synchronizing the device."""

    def __init__(
        self,
        args: argparse.Namespace,
        config: TransformerConfig,
        state: TrainState,
        device: Device,
        profiler: Profiler | None = None,
        groups: MeshGroups | None = None,
        stopwatch: StepStopwatch | None = None,
        sections: SectionRecorder | None = None,
    ) -> None:
        """Connect the schedules of megatron.core to the training state.

        Args:
            args: resolved arguments of this rank.
            config: the model's configuration. The functions that schedules read from it are set.
            state: training state to update.
            device: device of this rank.
            profiler: profiler of selected steps.
            groups: additional process groups of heterogeneous training, in which groups of ranks
                (meshes) have different parallel sizes. None for a homogeneous layout.
            stopwatch: times the steps while it is enabled.
            sections: measures the sections of the steps; None without.
        """
        self._args = args
        self._state = state
        self._device = device.torch_device
        self._profiler = profiler
        self._forward_step = _build_forward_step(args, config, device, sections)
        self._sections = sections
        if sections is not None:
            config.timers = SectionTimers(sections)
        self.router_losses = RouterLossAverages(args, self._device)
        self.rewards = RewardAverages(self._device) if args.dpo else None
        """Rewards of preference training; None without."""
        self.mtp_losses = MtpLossAverages(args.mtp_num_layers, state.modules(), self._device)
        self._skip_detector = SkippedReduceDetector()
        self._schedule = get_forward_backward_func()
        _set_schedule_functions(args, config, state)
        if captures_steps(vars(args)):
            self._schedule = CudaGraphSchedule(
                self._schedule, args, config, device, invalidate_caches=self._invalidate_fp8_weights
            )
        self._stopwatch = stopwatch
        if stopwatch is not None:
            config.finalize_model_grads_func = stopwatch.stop_lap_before(finalize_model_grads)
        self._schedule_options: dict[str, Any] = {}
        self._p2p_communicator: MeshP2PCommunicator | None = None
        if groups is not None:
            self._p2p_communicator = _connect_meshes(args, config, state, groups, device)
            self._schedule_options = {
                "p2p_communicator": self._p2p_communicator,
                "pg_collection": build_group_collection(),
            }

    def train(
        self, data: Any, *, stop_flags: tuple[bool, bool]
    ) -> tuple[HostMetrics, torch.Tensor]:
        """Take one training step: all micro-batches, optimizer step, scheduler step, sample counts.

        Args:
            data: iterator of this rank's micro-batches; a list of iterators with several chunks.
            stop_flags: whether this rank received a signal, and whether it is out of time. Both are
                reduced over all ranks.

        Returns:
            The metrics on the host and the tensor of metrics on the device; see
            :meth:`DeferredMetrics.add`.
        """
        state, batch_size = self._state, self.next_batch_size()
        if self._profiler:
            self._profiler.before_step(state.progress.iteration + 1)
        if self._sections is not None:
            self._sections.start_step()
        micro_batches = self.count_micro_batches(batch_size)
        for chunk in state.chunks:
            chunk.zero_grad_buffer()
            if isinstance(chunk, ShardedDataParallel):
                chunk.set_micro_batches(micro_batches)
        state.optimizer.zero_grad()
        with self._time_step():
            loss_reports = self._run_schedule(data, micro_batches, forward_only=False)
        self.router_losses.count_step(micro_batches)
        if self.rewards is not None:
            self.rewards.add(loss_reports)
        # With ``tail_above: skip``, an all_reduce that lost too much data was skipped.
        are_gradients_lost = self._skip_detector.pop_skipped()
        if are_gradients_lost:
            is_updated, grad_norm, zero_gradients = False, None, None
            skip_reason = GRADIENTS_LOST
        else:
            with nullcontext() if self._sections is None else self._sections.section(OPTIMIZER):
                is_updated, grad_norm, zero_gradients = state.optimizer.step()
            skip_reason = "" if is_updated else GRADIENTS_OVERFLOWED
            self._invalidate_fp8_weights()
        learning_rate = _get_learning_rate(state.optimizer.param_groups)
        if is_updated:
            state.scheduler.step(increment=batch_size)
        state.progress.iteration += 1
        state.progress.consumed_train_samples += batch_size
        host_metrics = HostMetrics(
            step=state.progress.iteration,
            consumed_samples=state.progress.consumed_train_samples,
            learning_rate=learning_rate,
            skip_reason=skip_reason,
            zero_gradients=zero_gradients or None,
        )
        device_metrics = self._reduce_metrics(loss_reports, grad_norm, stop_flags)
        if self._sections is not None:
            self._sections.finish_step()
        if self._profiler:
            self._profiler.after_step(host_metrics.step)
        return host_metrics, device_metrics

    def _invalidate_fp8_weights(self) -> None:
        if self._args.fp8:
            for model in self._state.modules():
                invalidate_fp8_weights(model)

    def close(self) -> None:
        """End a running profile after the last step."""
        if self._profiler:
            self._profiler.close()

    def evaluate(self, data: Any, steps: int) -> Evaluation:
        """Evaluate ``steps`` global batches. The result is equal on all ranks."""
        chunks = self._state.chunks
        for chunk in chunks:
            chunk.eval()
        # Sum of losses and number of tokens.
        total = torch.zeros(2, dtype=torch.float64, device=self._device)
        rewards = RewardAverages(self._device) if self._args.dpo else None
        with torch.no_grad():
            for _ in range(steps):
                loss_reports = self._run_schedule(
                    data, self._args.num_microbatches, forward_only=True
                )
                for loss_report in loss_reports:
                    total += loss_report[LOSS_REPORT_KEY]
                if rewards is not None:
                    rewards.add(loss_reports)
        for chunk in chunks:
            chunk.train()
        dist.all_reduce(total)
        loss_sum, tokens = total.tolist()
        return Evaluation(
            loss_sum / tokens if tokens else 0.0,
            rewards.pop_averages() if rewards is not None else {},
        )

    @contextmanager
    def _time_step(self) -> Iterator[None]:
        """Return a context manager that starts timing a step if the stopwatch is enabled.

        Parameters are gathered before it starts, so that the time includes no waiting for other
        ranks. The stopwatch stops before gradients are reduced.
        """
        if self._stopwatch is None or not self._stopwatch.enabled:
            yield
            return
        with gathered_parameters(self._args, self._state.chunks):
            self._stopwatch.start_lap()
            yield

    def next_batch_size(self) -> int:
        """Return the number of sequences of the next step over all ranks."""
        rampup = self._args.rampup
        if rampup is None:
            return int(self._args.global_batch_size)
        return int(rampup.batch_size_after(self._state.progress.consumed_train_samples))

    def count_micro_batches(self, batch_size: int) -> int:
        """Return the number of this rank's micro-batches in a step of ``batch_size`` sequences."""
        rampup = self._args.rampup
        if rampup is None:
            return int(self._args.num_microbatches)
        return int(rampup.micro_batches(batch_size, self._args.num_microbatches))

    def skip_step(self, data: Any) -> None:
        """Consume the data of a step without training on it."""
        progress, batch_size = self._state.progress, self.next_batch_size()
        for iterator in data if isinstance(data, list) else [data]:
            for _ in range(self.count_micro_batches(batch_size) if iterator is not None else 0):
                next(iterator)
        progress.iteration += 1
        progress.consumed_train_samples += batch_size

    def _run_schedule(
        self, data: Any, micro_batches: int, *, forward_only: bool
    ) -> list[dict[str, torch.Tensor]]:
        args = self._args
        if self._p2p_communicator is not None:
            self._p2p_communicator.begin_step(micro_batches, forward_only=forward_only)
        loss_reports: list[dict[str, torch.Tensor]] = self._schedule(
            forward_step_func=self._forward_step,
            data_iterator=data,
            model=self._state.chunks,
            num_microbatches=micro_batches,
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size * sequences_per_sample(vars(args)),
            forward_only=forward_only,
            **self._schedule_options,
        )
        if self._p2p_communicator is not None:
            self._p2p_communicator.finish_step()
        return loss_reports

    def _reduce_metrics(
        self,
        loss_reports: list[dict[str, torch.Tensor]],
        grad_norm: Any,
        stop_flags: tuple[bool, bool],
    ) -> torch.Tensor:
        """Return the fp64 tensor [6] that :meth:`DeferredMetrics.add` expects.

        The sum of losses, the number of tokens and the two stop flags are summed over all ranks.
        Tensor-parallel ranks report the same
        micro-batches, which cancels in the quotient of losses and tokens.
        """
        values = torch.zeros(4, dtype=torch.float64, device=self._device)
        if loss_reports:
            values[:2] = torch.stack([report[LOSS_REPORT_KEY] for report in loss_reports]).sum(0)
        rank_loss = values[:1].clone()
        for index, requested in enumerate(stop_flags, start=2):
            if requested:
                values[index].fill_(1.0)
        dist.all_reduce(values)
        norm_value = torch.as_tensor(0.0 if grad_norm is None else grad_norm, dtype=torch.float64)
        return torch.cat(
            [values, norm_value.to(self._device, non_blocking=True).view(1), rank_loss]
        )


def _build_forward_step(
    args: argparse.Namespace,
    config: TransformerConfig,
    device: Device,
    sections: SectionRecorder | None,
) -> ForwardStep:
    spec, mask_builder = get_model_spec(args), DocumentMaskBuilder(config, device)
    per_token = args.calculate_per_token_loss
    measure_data = nullcontext if sections is None else partial(sections.section, DATA)
    if not args.dpo:
        return ForwardStep(
            spec,
            device,
            per_token=per_token,
            mask_builder=mask_builder,
            measure_data=measure_data,
        )
    loss = PreferenceLoss(args.dpo_beta, args.dpo_loss, args.dpo_label_smoothing)
    return PairForwardStep(
        spec,
        device,
        mask_builder=mask_builder,
        measure_data=measure_data,
        finish=partial(finish_training, loss, per_token),
    )


def _set_schedule_functions(
    args: argparse.Namespace, config: TransformerConfig, state: TrainState
) -> None:
    """Set the functions of ``config`` for loss scaling, gradient reduction, parameter gathering."""
    chunks = state.chunks
    config.grad_scale_func = state.optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    if shards_gradients(vars(args)):
        return  # every backward pass reduces gradients, and every forward pass gathers weights
    if args.overlap_grad_reduce:
        config.no_sync_func = _unwrap_single([chunk.no_sync for chunk in chunks])
    if args.overlap_param_gather and args.align_param_gather:
        config.param_sync_func = _unwrap_single([chunk.start_param_sync for chunk in chunks])


def _connect_meshes(
    args: argparse.Namespace,
    config: TransformerConfig,
    state: TrainState,
    groups: MeshGroups,
    device: Device,
) -> MeshP2PCommunicator:
    """Connect the pipeline schedule to stages whose ranks have another parallel layout."""
    config.finalize_model_grads_func = MeshGradientFinalizer(
        state.chunks, groups.tied_embedding_groups
    )
    return MeshP2PCommunicator(
        config,
        args.meshes,
        args.stage,
        groups.stage_groups,
        parallel_state.get_tensor_model_parallel_group(),
        device,
        sequence_length=args.seq_length,
    )


def _unwrap_single(functions: list[Any]) -> Any:
    return functions[0] if len(functions) == 1 else functions


def _get_learning_rate(groups: list[dict[str, Any]]) -> float:
    """Return the learning rate of the parameter groups that have no override."""
    for group in groups:
        if group.get("default_config", True) and group["params"]:
            return float(group["lr"])
    return 0.0


@contextmanager
def gathered_parameters(
    args: argparse.Namespace, chunks: list[DistributedDataParallel]
) -> Iterator[None]:
    """Return a context manager in which forward passes need not wait for other ranks' parameters.

    With ``overlap_param_gather`` parameters are gathered layer by layer in the next forward pass,
    so that they are out of date between steps. Weights in shards are still gathered by each pass.
    """
    if not args.overlap_param_gather or shards_gradients(vars(args)):
        yield
        return
    for chunk in chunks:
        chunk.disable_forward_pre_hook(param_sync=True)
    try:
        yield
    finally:
        for chunk in chunks:
            chunk.enable_forward_pre_hook()
