"""Reporting of training progress: console, status events and metrics sinks.

One rank of a job reports (rank 0); on the others only the status events of
:meth:`TrainingReporter.write_progress` are written. Output that cannot be written, for example
because a disk is full, is dropped instead of ending the training run.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from textwrap import shorten
from typing import Any

from flagscale.sinks.base import Outcome
from flagscale.sinks.delivery import MetricsDelivery
from flagscale.sinks.registry import create_sinks
from flagscale.status import TRAINING, StatusWriter
from flagscale.train.best_evaluation import VALIDATION_LOSS, EvaluationHistory
from flagscale.train.deferred_metrics import StepMetrics
from flagscale.train.evaluation.scores import TaskScores
from flagscale.train.section_times import SectionTimes
from flagscale.train.stragglers import StragglerUpdate


@dataclass(frozen=True)
class Throughput:
    """Throughput over the steps since the last report."""

    step_seconds: float
    tokens_per_second: float
    tflops_per_gpu: float | None
    """Model TFLOP/s; None if the model's floating-point operations are not known."""
    mfu: float | None
    """Model FLOPs utilization, 0 to 1; None if the peak of the device is not known."""
    memory_gib: float | None
    """Peak memory of this rank; None on devices that do not record it."""
    ranks: int = 1
    """Number of ranks, each of which has a device."""

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.tokens_per_second / self.ranks


class TrainingReporter:
    """Writes the progress of a run to all configured outputs."""

    def __init__(
        self, args: argparse.Namespace, status: StatusWriter, *, is_reporting_rank: bool
    ) -> None:
        self._args = args
        self._status = status
        self.is_reporting_rank = is_reporting_rank
        """True on the rank that reports for the job."""
        sinks = create_sinks(vars(args), os.environ) if is_reporting_rank else []
        self._sinks = MetricsDelivery(sinks, vars(args))

    def start_sinks(self, iteration: int) -> None:
        """Start or continue the run at each metrics sink, without waiting for them.

        Args:
            iteration: number of the step that training continues after; 0 for a new training.
        """
        self._sinks.start(iteration, os.environ)

    def write_progress(self, step: int, activity: str = TRAINING) -> None:
        """Write this rank's progress to its status file, as :meth:`StatusWriter.write_progress`.

        Every rank calls it, so that the launcher can detect the rank that blocks the others.
        """
        self._status.write_progress(step, activity)

    def log(self, text: str) -> None:
        """Print a line to the console, once per job."""
        if self.is_reporting_rank:
            _print(text)

    def warn(self, message: str) -> None:
        """Print a warning and write it as a status event, once per job."""
        if self.is_reporting_rank:
            self._status.write("warning", message=message)
            _print(f"warning: {message}")

    def log_scalars(self, metrics: StepMetrics) -> None:
        """Queue the metrics of one step for the metrics sinks."""
        host = metrics.host
        if not self.is_reporting_rank or host.step % self._args.tensorboard_log_interval:
            return
        values: dict[str, float | None] = {
            "train/loss": metrics.loss,
            "train/grad-norm": metrics.grad_norm,
            "train/samples": host.consumed_samples,
            "train/grad-zeros": host.zero_gradients,
        }
        if self._args.log_learning_rate_to_tensorboard:
            values["train/learning-rate"] = host.learning_rate
        self._write_scalars(host.step, values)

    def log_progress(
        self, metrics: StepMetrics, throughput: Throughput, extra_metrics: Mapping[str, float | int]
    ) -> None:
        """Print the progress line of every ``log_interval`` steps and write its status event.

        Args:
            metrics: metrics of the latest step.
            throughput: throughput since the last call.
            extra_metrics: metrics that not every model or configuration has, by name.
        """
        if not self.is_reporting_rank:
            return
        host, train_steps = metrics.host, self._args.train_iters
        self._status.write(
            "progress",
            step=host.step,
            train_steps=train_steps,
            samples=host.consumed_samples,
            loss=round(metrics.loss, 6),
            grad_norm=round(metrics.grad_norm, 6),
            learning_rate=host.learning_rate,
            step_seconds=round(throughput.step_seconds, 4),
            tokens_per_second=round(throughput.tokens_per_second, 1),
            tokens_per_second_per_gpu=round(throughput.tokens_per_second_per_gpu, 1),
            tflops_per_gpu=_round_optional(throughput.tflops_per_gpu, 3),
            mfu=_round_optional(throughput.mfu, 4),
            memory_gib=_round_optional(throughput.memory_gib, 2),
            **{name: round(value, 6) for name, value in extra_metrics.items()},
        )
        _print(format_progress(metrics, throughput, train_steps, extra_metrics))
        args = self._args
        values: dict[str, float | None] = {
            f"train/{name.replace('_', '-')}": value for name, value in extra_metrics.items()
        }
        if args.log_timers_to_tensorboard:
            values["speed/step-seconds"] = throughput.step_seconds
        if args.log_throughput:
            values["speed/tokens-per-second"] = throughput.tokens_per_second
            values["speed/tokens-per-second-per-gpu"] = throughput.tokens_per_second_per_gpu
            values["speed/tflops-per-gpu"] = throughput.tflops_per_gpu
            values["speed/mfu"] = throughput.mfu
        if args.log_memory_to_tensorboard:
            values["memory/peak-gib"] = throughput.memory_gib
        self._write_scalars(host.step, values)

    def write_sections(self, step: int, times: SectionTimes | None) -> None:
        """Write the times of this rank since its last report to its status file."""
        if times is not None:
            seconds = {name: round(value, 6) for name, value in times.seconds.items()}
            self._status.write("sections", step=step, steps=times.steps, **seconds)

    def log_sections(
        self, step: int, seconds: Mapping[str, float], straggler_cost: float | None
    ) -> None:
        """Queue the sections of a step for the metrics sinks.

        Args:
            step: last step of the report.
            seconds: median over the ranks, by section.
            straggler_cost: fraction of a step that stragglers cost; None if no ranks are compared.
        """
        if not self.is_reporting_rank:
            return
        values: dict[str, float | None] = {"speed/straggler-cost": straggler_cost}
        if self._args.log_timers_to_tensorboard:
            values |= {f"speed/{name}-seconds": value for name, value in seconds.items()}
        self._write_scalars(step, values)

    def log_stragglers(self, step: int, update: StragglerUpdate) -> None:
        """Report that stragglers were detected, or are none any more."""
        if not self.is_reporting_rank:
            return
        self._status.write(
            "stragglers",
            step=step,
            stragglers=[straggler.to_fields() for straggler in update.stragglers],
            messages=update.descriptions,
        )
        for message in update.warnings:
            _print(f"warning: {message}")
        for message in update.notes:
            _print(f"step {step} | {message}")

    def log_evaluation(
        self,
        split: str,
        step: int,
        loss: float,
        name: str = "",
        rewards: Mapping[str, float] | None = None,
    ) -> None:
        """Report the loss on a validation or test split.

        Args:
            split: ``valid`` or ``test``.
            step: number of the last training step.
            loss: mean loss in nats.
            name: name of the data set, if the split has several.
            rewards: means over pairs by name, in preference training. Its loss has no perplexity.
        """
        if not self.is_reporting_rank:
            return
        metrics = dict(rewards) if rewards else {"perplexity": math.exp(min(loss, 20.0))}
        if split == "valid":
            fields: dict[str, Any] = {"data": name} if name else {}
            fields |= {key: round(value, 6) for key, value in (rewards or {}).items()}
            self._status.write("evaluation", step=step, loss=round(loss, 6), **fields)
        label = f"{split} {name}" if name else split
        digits = 3 if rewards else 2
        texts = [f"{key.replace('_', ' ')} {metrics[key]:.{digits}f}" for key in metrics]
        _print(" | ".join((f"step {step}", f"{label} loss {loss:.4f}", *texts)))
        prefix = f"{split}/{name}" if name else split
        values: dict[str, float | None] = {f"{prefix}/loss": loss}
        if rewards or self._args.log_validation_ppl_to_tensorboard:
            values |= {f"{prefix}/{key.replace('_', '-')}": metrics[key] for key in metrics}
        self._write_scalars(step, values)

    def log_scores(self, step: int, scores: TaskScores) -> None:
        """Report the scores of an evaluation on tasks after step ``step``."""
        if not self.is_reporting_rank:
            return
        values = {name: value for name, value in scores.values.items() if math.isfinite(value)}
        rounded = {name: round(value, 6) for name, value in values.items()}
        self._status.write("tasks", step=step, seconds=round(scores.seconds, 2), scores=rounded)
        for name, value in scores.values.items():
            _print(f"step {step} | {name} {value:.4f}")
        _print(f"step {step} | tasks evaluated in {scores.seconds:.1f} s")
        self._write_scalars(step, {f"tasks/{name}": value for name, value in values.items()})

    def log_answer(self, step: int, prompt: str, text: str) -> None:
        """Print the model's answer to an evaluation prompt."""
        self.log(f"step {step} | {shorten(prompt, 60)} → {shorten(text, 200)}")

    def log_evaluation_history(self, step: int, history: EvaluationHistory) -> None:
        """Report the best evaluation after that of ``step``."""
        parts = []
        if history.best_value is not None:
            is_new = history.best_step == step
            place = "so far" if is_new else f"{history.best_value:.4f} at step {history.best_step}"
            name = f"best {history.metric}"
            if history.metric == VALIDATION_LOSS:
                name = f"lowest {VALIDATION_LOSS}"
            parts.append(f"{name} {place}")
        patience = self._args.early_stopping_patience
        count = history.evaluations_without_improvement
        if patience is not None and count:
            parts.append(f"{count} of {patience} evaluations without improvement")
        self.log(" | ".join((f"step {step}", *parts)))

    def log_checkpoint(
        self, step: int, path: Any, seconds: float, *, best: Mapping[str, Any] | None = None
    ) -> None:
        """Report that a checkpoint is complete on disk.

        ``best`` has fields of the status event if it is marked as the best checkpoint.
        """
        if self.is_reporting_rank:
            self._status.write(
                "checkpoint", step=step, path=str(path), seconds=round(seconds, 2), **(best or {})
            )
            mark = "best checkpoint" if best else "checkpoint"
            _print(f"step {step} | {mark} saved in {seconds:.1f} s: {path}")

    def close(self, outcome: Outcome) -> None:
        """Deliver the last metrics to the sinks, and close them. The time for it is limited."""
        self._sinks.close(outcome)
        self._print_sink_messages()

    def _write_scalars(self, step: int, values: Mapping[str, float | None]) -> None:
        defined_values = {name: value for name, value in values.items() if value is not None}
        if defined_values:
            self._sinks.log(step, defined_values)
        self._print_sink_messages()

    def _print_sink_messages(self) -> None:
        # Sinks have threads of their own; the log is written by this one alone.
        for message in self._sinks.pop_messages():
            if message.is_warning:
                self.warn(message.text)
            else:
                self.log(message.text)


def _print(line: str) -> None:
    """Print a line and flush.

    A line that cannot be written is dropped, because standard output may be a file on a full disk.
    """
    try:
        print(line, flush=True)
    except OSError:
        _discard_buffered_output()


def _discard_buffered_output() -> None:
    """Discard the buffered output of stdout.

    Python would otherwise flush it at exit, and the process would fail.
    """
    with suppress(OSError), Path(os.devnull).open("wb") as null_device:
        descriptor = sys.stdout.fileno()
        saved_descriptor = os.dup(descriptor)
        try:
            os.dup2(null_device.fileno(), descriptor)
            sys.stdout.flush()
        finally:
            os.dup2(saved_descriptor, descriptor)
            os.close(saved_descriptor)


def format_progress(
    metrics: StepMetrics,
    throughput: Throughput,
    train_steps: int,
    extra_metrics: Mapping[str, float | int],
) -> str:
    """Return the console line of the training progress at a step.

    ``train_steps`` is the number of steps of the whole run. Figures per GPU are omitted on a CPU,
    which records no peak memory.
    """
    host, tflops, memory_gib = metrics.host, throughput.tflops_per_gpu, throughput.memory_gib
    parts = [
        f"step {host.step:>{len(str(train_steps))}}/{train_steps}",
        f"loss {metrics.loss:.4f}",
        "skipped" if host.skip_reason else f"grad norm {metrics.grad_norm:.3f}",
        f"lr {host.learning_rate:.2e}",
        f"{throughput.step_seconds:.3f} s/step",
        _format_speed(throughput),
        f"{tflops:.1f} TFLOP/s/GPU" if tflops is not None and memory_gib is not None else "",
        f"MFU {100 * throughput.mfu:.1f} %" if throughput.mfu is not None else "",
        f"{memory_gib:.1f} GiB" if memory_gib is not None else "",
        *(f"{name.replace('_', ' ')} {_format_number(v)}" for name, v in extra_metrics.items()),
        f"{timedelta(seconds=round((train_steps - host.step) * throughput.step_seconds))} left",
    ]
    return " | ".join(part for part in parts if part)


def _format_speed(throughput: Throughput) -> str:
    text = f"{throughput.tokens_per_second:,.0f} tok/s"
    if throughput.ranks > 1 and throughput.memory_gib is not None:
        text += f" ({throughput.tokens_per_second_per_gpu:,.0f}/GPU)"
    return text


def _round_optional(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def _format_number(value: float | int) -> str:
    return f"{value:,d}" if isinstance(value, int) else f"{value:.3f}"
