"""One optimizer step, and one evaluation, by megatron.core's schedules."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig

from flagscale.config.arguments.graphs import captures_steps
from flagscale.train.captured import CapturedSchedule
from flagscale.train.device import Device
from flagscale.train.forward import LOSS_KEY, ForwardStep
from flagscale.train.further_losses import FurtherLosses
from flagscale.train.layers.precision import weights_changed
from flagscale.train.meshes.exchange import Exchange
from flagscale.train.meshes.gradients import Finalize, collection
from flagscale.train.meshes.groups import MeshGroups
from flagscale.train.microbatch_balancer import Stopwatch
from flagscale.train.models.base import spec_of
from flagscale.train.models.documents import DocumentMasks
from flagscale.train.profiling import Profiler
from flagscale.train.readings import LOST, OVERFLOW, StepNumbers
from flagscale.train.router_losses import RouterLosses
from flagscale.train.state import TrainState
from flagscale.train.tail import LeftOut


class Stepper:
    """Runs steps on a :class:`TrainState`. Nothing here waits for the device."""

    def __init__(
        self,
        args: argparse.Namespace,
        config: TransformerConfig,
        state: TrainState,
        device: Device,
        profiler: Profiler | None = None,
        groups: MeshGroups | None = None,
        stopwatch: Stopwatch | None = None,
    ) -> None:
        """``groups``: those that heterogeneous training has beyond megatron.core's. ``stopwatch``:
        times the steps, as long as it is running."""
        self._args = args
        self._state = state
        self._device = device.torch_device
        self._profiler = profiler
        self._forward = ForwardStep(
            spec_of(args),
            device,
            per_token=args.calculate_per_token_loss,
            masks=DocumentMasks(config, device),
        )
        self.routers = RouterLosses(args, self._device)
        self.further = FurtherLosses(args.mtp_num_layers, state.modules(), self._device)
        self._left_out = LeftOut()
        self._schedule = get_forward_backward_func()
        _connect(args, config, state)
        if captures_steps(vars(args)):
            self._schedule = CapturedSchedule(
                self._schedule, args, config, device, forget=self._weights_changed
            )
        self._stopwatch = stopwatch
        if stopwatch is not None:
            config.finalize_model_grads_func = stopwatch.stop_before(finalize_model_grads)
        self._pipeline: dict[str, Any] = {}
        self._exchange: Exchange | None = None
        if groups is not None:
            self._exchange = _over_meshes(args, config, state, groups, device)
            self._pipeline = {"p2p_communicator": self._exchange, "pg_collection": collection()}

    def train(self, data: Any, *, stop: tuple[bool, bool]) -> tuple[StepNumbers, torch.Tensor]:
        """Take one step: all micro-batches, the optimizer, the schedule; count the samples.

        Args:
            data: iterator of this rank's micro-batches; with several chunks a list of them.
            stop: whether this rank got a signal or is out of time; all ranks will learn of it.

        Returns:
            What the host knows, and what the device will know: see :meth:`Readings.add`.
        """
        state, batch = self._state, self.batch()
        if self._profiler:
            self._profiler.before(state.progress.iteration + 1)
        for chunk in state.chunks:
            chunk.zero_grad_buffer()
        state.optimizer.zero_grad()
        with self._timed():
            reports = self._run(data, self.micro_batches(batch), forward_only=False)
        self.routers.add(self.micro_batches(batch))
        lost = self._left_out.take()
        if lost:
            updated, norm, zeros = False, None, None
        else:
            updated, norm, zeros = state.optimizer.step()
            self._weights_changed()
        rate = _learning_rate(state.optimizer.param_groups)
        if updated:
            state.scheduler.step(increment=batch)
        state.progress.iteration += 1
        state.progress.consumed_train_samples += batch
        numbers = StepNumbers(
            step=state.progress.iteration,
            samples=state.progress.consumed_train_samples,
            learning_rate=rate,
            skipped="" if updated else LOST if lost else OVERFLOW,
            zeros=zeros or None,
        )
        values = self._shared(reports, norm, stop)
        if self._profiler:
            self._profiler.after(numbers.step)
        return numbers, values

    def _weights_changed(self) -> None:
        if self._args.fp8:
            for model in self._state.modules():
                weights_changed(model)

    def close(self) -> None:
        """No more steps come."""
        if self._profiler:
            self._profiler.close()

    def evaluate(self, data: Any, steps: int) -> float:
        """Mean loss in nats over ``steps`` global batches, equal on all ranks."""
        chunks = self._state.chunks
        for chunk in chunks:
            chunk.eval()
        total = torch.zeros(2, dtype=torch.float64, device=self._device)
        with torch.no_grad():
            for _ in range(steps):
                for report in self._run(data, self._args.num_microbatches, forward_only=True):
                    total += report[LOSS_KEY]
        for chunk in chunks:
            chunk.train()
        dist.all_reduce(total)
        loss_sum, tokens = total.tolist()
        return loss_sum / tokens if tokens else 0.0

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """A context in which a step is timed, if it is to be. No parameters are waited for in it:
        they are gathered before."""
        if self._stopwatch is None or not self._stopwatch.running:
            yield
            return
        with gathered(self._args, self._state.chunks):
            self._stopwatch.start()
            yield

    def batch(self) -> int:
        """Sequences of the next step, over all ranks."""
        args = self._args
        if args.growth is None:
            return int(args.global_batch_size)
        return int(args.growth.batch(self._state.progress.consumed_train_samples))

    def micro_batches(self, batch: int) -> int:
        """How many of a step of ``batch`` sequences are this rank's."""
        args = self._args
        if args.growth is None:
            return int(args.num_microbatches)
        return int(args.growth.micro_batches(batch, args.num_microbatches))

    def pass_over(self, data: Any) -> None:
        """Take the data of a step without training on it."""
        progress, batch = self._state.progress, self.batch()
        for each in data if isinstance(data, list) else [data]:
            for _ in range(self.micro_batches(batch) if each is not None else 0):
                next(each)
        progress.iteration += 1
        progress.consumed_train_samples += batch

    def _run(
        self, data: Any, micro_batches: int, *, forward_only: bool
    ) -> list[dict[str, torch.Tensor]]:
        args = self._args
        if self._exchange is not None:
            self._exchange.begin(micro_batches, forward_only=forward_only)
        reports: list[dict[str, torch.Tensor]] = self._schedule(
            forward_step_func=self._forward,
            data_iterator=data,
            model=self._state.chunks,
            num_microbatches=micro_batches,
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            forward_only=forward_only,
            **self._pipeline,
        )
        if self._exchange is not None:
            self._exchange.finish()
        return reports

    def _shared(
        self, reports: list[dict[str, torch.Tensor]], norm: Any, stop: tuple[bool, bool]
    ) -> torch.Tensor:
        """Loss sum, tokens and wishes to stop of all ranks, gradient norm, own loss sum.

        Tensor-parallel ranks report the same micro-batches; sum and tokens grow alike.
        """
        values = torch.zeros(4, dtype=torch.float64, device=self._device)
        if reports:
            values[:2] = torch.stack([report[LOSS_KEY] for report in reports]).sum(0)
        own = values[:1].clone()
        for place, wish in enumerate(stop, start=2):
            if wish:
                values[place].fill_(1.0)
        dist.all_reduce(values)
        length = torch.as_tensor(0.0 if norm is None else norm, dtype=torch.float64)
        return torch.cat([values, length.to(self._device, non_blocking=True).view(1), own])


def _connect(args: argparse.Namespace, config: TransformerConfig, state: TrainState) -> None:
    """Tell megatron.core's schedules, through its configuration, how to scale, when to reduce
    gradients and when to gather parameters."""
    chunks = state.chunks
    config.grad_scale_func = state.optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    if args.overlap_grad_reduce:
        config.no_sync_func = _one_or_all([chunk.no_sync for chunk in chunks])
    if args.overlap_param_gather and args.align_param_gather:
        config.param_sync_func = _one_or_all([chunk.start_param_sync for chunk in chunks])


def _over_meshes(
    args: argparse.Namespace,
    config: TransformerConfig,
    state: TrainState,
    groups: MeshGroups,
    device: Device,
) -> Exchange:
    """Connect the schedules to the other meshes'."""
    config.finalize_model_grads_func = Finalize(state.chunks, groups.ends)
    return Exchange(
        config,
        args.meshes,
        args.stage,
        groups.boundaries,
        parallel_state.get_tensor_model_parallel_group(),
        device,
        sequence=args.seq_length,
    )


def _one_or_all(functions: list[Any]) -> Any:
    return functions[0] if len(functions) == 1 else functions


def _learning_rate(groups: list[dict[str, Any]]) -> float:
    """The rate of the parameters that have no rate of their own."""
    for group in groups:
        if group.get("default_config", True) and group["params"]:
            return float(group["lr"])
    return 0.0


@contextmanager
def gathered(args: argparse.Namespace, chunks: list[DistributedDataParallel]) -> Iterator[None]:
    """A context in which every rank holds all its parameters.

    With ``overlap_param_gather`` they are fetched layer by layer in the next forward pass, so
    that between steps they are out of date.
    """
    if not args.overlap_param_gather:
        yield
        return
    for chunk in chunks:
        chunk.disable_forward_pre_hook(param_sync=True)
    yield
    for chunk in chunks:
        chunk.enable_forward_pre_hook()
