"""Steps whose passes are launched as one graph.

A small model's kernels are done sooner than the host launches them. The first steps run as always;
then the passes over all micro-batches are captured once, and launched as a whole from then on. What
a graph reads and writes has places of its own: each step's data is copied to where the graph takes
it from, and gradients are added to the same buffers anyway. Completing gradients, which
communicates, and the optimizer's step stay outside.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from flagscale.train.device import Device
from flagscale.train.forward import ForwardStep, Prepared

Reports = list[dict[str, torch.Tensor]]

_MANY = 4
"""Graphs in a row whose shapes were new, after which that is said."""


class CapturedSchedule:
    """megatron.core's schedule of a step without a pipeline, captured; called as that is."""

    def __init__(
        self,
        schedule: Callable[..., Reports],
        args: argparse.Namespace,
        config: Any,
        device: Device,
        *,
        forget: Callable[[], None],
    ) -> None:
        """
        Args:
            schedule: what is captured.
            args: resolved arguments.
            config: the model's configuration, whose function that completes gradients is called
                after the graph.
            device: where the model is.
            forget: drops what layers keep of their weights between passes; the graph has to make
                it anew in each step.
        """
        self._schedule, self._device = schedule, device
        self._forget = forget
        self._warm_up = args.cuda_graph_warmup_steps
        self._finalize = config.finalize_model_grads_func
        self._finalized: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        config.finalize_model_grads_func = self._note
        self._batches: list[Prepared] = []
        self._replay: Callable[[], None] | None = None
        self._reports: Reports = []
        self._captures = 0

    def __call__(
        self,
        *,
        forward_step_func: ForwardStep,
        data_iterator: Iterator[Any],
        model: list[torch.nn.Module],
        num_microbatches: int,
        forward_only: bool,
        **options: Any,
    ) -> Reports:
        """What megatron.core's ``forward_backward_func`` gives: reports of the micro-batches. Those
        of a captured step are overwritten by the next one."""

        def passes(batches: Iterator[Any]) -> Reports:
            return self._schedule(
                forward_step_func=forward_step_func,
                data_iterator=batches,
                model=model,
                num_microbatches=num_microbatches,
                forward_only=forward_only,
                **options,
            )

        if forward_only:
            return passes(data_iterator)
        batches = [
            forward_step_func.prepare(next(data_iterator), model[0])
            for _ in range(num_microbatches)
        ]
        with self._device.beside():
            if self._warm_up > 0:
                self._warm_up -= 1
                self._reports = passes(iter(batches))
            else:
                self._launch(batches, passes)
        arguments, named = self._finalized
        self._finalize(*arguments, **named)
        return self._reports

    def _launch(self, batches: list[Prepared], passes: Callable[[Iterator[Any]], Reports]) -> None:
        if self._replay is None or _shapes(batches) != _shapes(self._batches):
            self._capture(batches, passes)
        else:
            for old, new in zip(self._batches, batches, strict=True):
                for place, tensor in zip(old.tensors, new.tensors, strict=True):
                    place.copy_(tensor)
        assert self._replay is not None
        self._replay()

    def _capture(self, batches: list[Prepared], passes: Callable[[Iterator[Any]], Reports]) -> None:
        self._captures += 1
        if self._captures == _MANY:
            warnings.warn(
                "a step's shapes change often, and each time it is captured anew, which costs more "
                "than it gives: leave cuda_graph_impl out",
                stacklevel=2,
            )
        # What an older graph holds is free for this one.
        self._replay, self._reports = None, []
        self._batches = [batch.copy() for batch in batches]
        self._forget()

        def work() -> None:
            self._reports = passes(iter(self._batches))

        self._replay = self._device.capture(work)

    def _note(self, *arguments: Any, **named: Any) -> None:
        """What gradients are to be completed with, after the graph."""
        self._finalized = (arguments, named)


def _shapes(batches: list[Prepared]) -> list[list[torch.Size]]:
    return [[tensor.shape for tensor in batch.tensors] for batch in batches]
