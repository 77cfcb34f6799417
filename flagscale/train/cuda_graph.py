"""Full-iteration CUDA graphs: the forward and backward passes of a step as one graph launch.

For a small model, kernels finish faster than the host launches them. The first steps (warm-up) run
eagerly. Then the forward and backward passes of all micro-batches are captured once and replayed in
each following step. The graph reads and writes static memory: each step's data is copied into the
captured input tensors, and gradients always accumulate in the same buffers. Gradient
finalization, which communicates, and the optimizer step run outside the graph.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from flagscale.train.device import Device
from flagscale.train.forward_step import ForwardStep, PreparedMicroBatch

LossReports = list[dict[str, torch.Tensor]]

_CAPTURES_UNTIL_WARNING = 4
"""Number of captures after which a warning recommends disabling CUDA graphs."""


class CudaGraphSchedule:
    """megatron.core's forward-backward schedule without pipelining, captured as a CUDA graph.

    Callable with the same arguments as the schedule that it wraps.
    """

    def __init__(
        self,
        schedule: Callable[..., LossReports],
        args: argparse.Namespace,
        config: Any,
        device: Device,
        *,
        invalidate_caches: Callable[[], None],
    ) -> None:
        """Wrap ``schedule`` and intercept the gradient finalization of ``config``.

        Args:
            schedule: megatron.core's ``forward_backward_func`` to capture.
            args: resolved arguments.
            config: the model's configuration. Its ``finalize_model_grads_func`` is replaced, and
                called after the graph.
            device: device of the model.
            invalidate_caches: drops tensors that layers cache between steps, such as FP8 weights.
                The graph must recompute them in each step.
        """
        self._schedule, self._device = schedule, device
        self._invalidate_caches = invalidate_caches
        self._warmup_steps_left = args.cuda_graph_warmup_steps
        self._finalize_grads = config.finalize_model_grads_func
        self._finalize_arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        config.finalize_model_grads_func = self._record_finalize_arguments
        self._static_batches: list[PreparedMicroBatch] = []
        self._replay: Callable[[], None] | None = None
        self._loss_reports: LossReports = []
        self._capture_count = 0

    def __call__(
        self,
        *,
        forward_step_func: ForwardStep,
        data_iterator: Iterator[Any],
        model: list[torch.nn.Module],
        num_microbatches: int,
        forward_only: bool,
        **options: Any,
    ) -> LossReports:
        """Run all micro-batches of a step and return their loss reports.

        The reports of a captured step are overwritten by the next step.
        """

        def run_schedule(batches: Iterator[Any]) -> LossReports:
            return self._schedule(
                forward_step_func=forward_step_func,
                data_iterator=batches,
                model=model,
                num_microbatches=num_microbatches,
                forward_only=forward_only,
                **options,
            )

        if forward_only:
            return run_schedule(data_iterator)
        batches = [
            forward_step_func.prepare(next(data_iterator), model[0])
            for _ in range(num_microbatches)
        ]
        with self._device.side_stream():
            if self._warmup_steps_left > 0:
                self._warmup_steps_left -= 1
                self._loss_reports = run_schedule(iter(batches))
            else:
                self._run_graph(batches, run_schedule)
        finalize_args, finalize_kwargs = self._finalize_arguments
        self._finalize_grads(*finalize_args, **finalize_kwargs)
        return self._loss_reports

    def _run_graph(
        self,
        batches: list[PreparedMicroBatch],
        run_schedule: Callable[[Iterator[Any]], LossReports],
    ) -> None:
        if self._replay is None or _batch_shapes(batches) != _batch_shapes(self._static_batches):
            self._capture_graph(batches, run_schedule)
        else:
            for static_batch, batch in zip(self._static_batches, batches, strict=True):
                for static_tensor, tensor in zip(static_batch.tensors, batch.tensors, strict=True):
                    static_tensor.copy_(tensor)
        assert self._replay is not None
        self._replay()

    def _capture_graph(
        self,
        batches: list[PreparedMicroBatch],
        run_schedule: Callable[[Iterator[Any]], LossReports],
    ) -> None:
        self._capture_count += 1
        if self._capture_count == _CAPTURES_UNTIL_WARNING:
            warnings.warn(
                "the shapes of micro-batches change often, and each change requires a new capture, "
                "which costs more time than CUDA graphs save: remove cuda_graph_impl",
                stacklevel=2,
            )
        # Release the memory of the previous graph before the next capture.
        self._replay, self._loss_reports = None, []
        self._static_batches = [batch.copy() for batch in batches]
        self._invalidate_caches()

        def run_static_batches() -> None:
            self._loss_reports = run_schedule(iter(self._static_batches))

        self._replay = self._device.capture_graph(run_static_batches)

    def _record_finalize_arguments(self, *args: Any, **kwargs: Any) -> None:
        """Record the arguments of gradient finalization, which runs after the graph."""
        self._finalize_arguments = (args, kwargs)


def _batch_shapes(batches: list[PreparedMicroBatch]) -> list[list[torch.Size]]:
    return [[tensor.shape for tensor in batch.tensors] for batch in batches]
