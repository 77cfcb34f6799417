"""What training tells the world: console, status events, TensorBoard, Weights & Biases.

One rank of a job speaks; on the others everything here but the status events is silent.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from flagscale.errors import ConfigError
from flagscale.status import STEP, StatusWriter
from flagscale.train.readings import Reading


@dataclass(frozen=True)
class Speed:
    """Throughput over the steps since the last report."""

    step_seconds: float
    tokens_per_second: float
    tflops_per_gpu: float
    mfu: float | None
    """Share of the device's peak, 0 to 1; None where the peak is not known."""
    memory_gib: float | None
    """Peak memory of this rank; None where it is not counted."""


def require_packages(args: argparse.Namespace) -> None:
    """Check what the arguments need before anything starts.

    Raises:
        ConfigError: TensorBoard or W&B is asked for and not installed.
    """
    for wanted, package, key in (
        (args.tensorboard_dir, "tensorboard", "tensorboard_dir"),
        (args.wandb_project, "wandb", "wandb_project"),
    ):
        if wanted and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"{key} is set, but the Python package {package} is not installed",
                hint=f"install {package}, or remove {key}",
            )


class Reporter:
    """Writes a run's progress where the arguments want it. ``speaks`` on one rank of the job."""

    def __init__(self, args: argparse.Namespace, status: StatusWriter, *, speaks: bool) -> None:
        self._args = args
        self._status = status
        self._speaks = speaks
        self._board: Any = None
        self._wandb: Any = None
        if speaks and args.tensorboard_dir:
            self._board = _open_board(args)
        if speaks and args.wandb_project:
            self._wandb = _start_wandb(args)

    def place(self, step: int, doing: str = STEP) -> None:
        """Where this rank is, for the launcher; see :meth:`StatusWriter.place`. Every rank says
        it, so that the one that holds up the others is known."""
        self._status.place(step, doing)

    def say(self, text: str) -> None:
        """A line for the person at the console."""
        if self._speaks:
            print(text, flush=True)

    def warn(self, message: str) -> None:
        """A warning, once a job, also for the launcher."""
        if self._speaks:
            self._status.write("warning", message=message)
            print(f"warning: {message}", flush=True)

    def scalars(self, reading: Reading) -> None:
        """The numbers of one step, for TensorBoard and W&B."""
        numbers = reading.numbers
        if not self._speaks or numbers.step % self._args.tensorboard_log_interval:
            return
        values: dict[str, float | None] = {
            "train/loss": reading.loss,
            "train/grad-norm": reading.grad_norm,
            "train/samples": numbers.samples,
            "train/grad-zeros": numbers.zeros,
        }
        if self._args.log_learning_rate_to_tensorboard:
            values["train/learning-rate"] = numbers.learning_rate
        self._plot(numbers.step, values)

    def progress(self, reading: Reading, speed: Speed, more: Mapping[str, float | int]) -> None:
        """The line of every ``log_interval`` steps, and its event. ``more``: what not every model
        or configuration has, by name."""
        if not self._speaks:
            return
        numbers, steps = reading.numbers, self._args.train_iters
        self._status.write(
            "progress",
            step=numbers.step,
            train_steps=steps,
            samples=numbers.samples,
            loss=round(reading.loss, 6),
            grad_norm=round(reading.grad_norm, 6),
            learning_rate=numbers.learning_rate,
            step_seconds=round(speed.step_seconds, 4),
            tokens_per_second=round(speed.tokens_per_second, 1),
            tflops_per_gpu=round(speed.tflops_per_gpu, 3),
            mfu=None if speed.mfu is None else round(speed.mfu, 4),
            memory_gib=None if speed.memory_gib is None else round(speed.memory_gib, 2),
            **{name: round(value, 6) for name, value in more.items()},
        )
        print(progress_line(reading, speed, steps, more), flush=True)
        args = self._args
        values: dict[str, float | None] = {
            f"train/{name.replace('_', '-')}": value for name, value in more.items()
        }
        if args.log_timers_to_tensorboard:
            values["speed/step-seconds"] = speed.step_seconds
        if args.log_throughput:
            values["speed/tokens-per-second"] = speed.tokens_per_second
            values["speed/tflops-per-gpu"] = speed.tflops_per_gpu
            values["speed/mfu"] = speed.mfu
        if args.log_memory_to_tensorboard:
            values["memory/peak-gib"] = speed.memory_gib
        self._plot(numbers.step, values)

    def evaluation(self, split: str, step: int, loss: float) -> None:
        """The loss on a split that is not trained on."""
        if not self._speaks:
            return
        perplexity = math.exp(min(loss, 20.0))
        if split == "valid":
            self._status.write("evaluation", step=step, loss=round(loss, 6))
        print(f"step {step} | {split} loss {loss:.4f} | perplexity {perplexity:.2f}", flush=True)
        values: dict[str, float | None] = {f"{split}/loss": loss}
        if self._args.log_validation_ppl_to_tensorboard:
            values[f"{split}/perplexity"] = perplexity
        self._plot(step, values)

    def checkpoint(self, step: int, path: Any, seconds: float) -> None:
        """A checkpoint is whole on disk."""
        if self._speaks:
            self._status.write("checkpoint", step=step, path=str(path), seconds=round(seconds, 2))
            print(f"step {step} | checkpoint saved in {seconds:.1f} s: {path}", flush=True)

    def close(self) -> None:
        """Write out what is buffered."""
        if self._board is not None:
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish()

    def _plot(self, step: int, values: Mapping[str, float | None]) -> None:
        known = {name: value for name, value in values.items() if value is not None}
        if self._board is not None:
            for name, value in known.items():
                self._board.add_scalar(name, value, step)
        if self._wandb is not None and known:
            self._wandb.log(known, step=step)


def progress_line(
    reading: Reading, speed: Speed, steps: int, more: Mapping[str, float | int]
) -> str:
    """One line that tells a person how training goes."""
    numbers = reading.numbers
    parts = [
        f"step {numbers.step:>{len(str(steps))}}/{steps}",
        f"loss {reading.loss:.4f}",
        "skipped" if numbers.skipped else f"grad norm {reading.grad_norm:.3f}",
        f"lr {numbers.learning_rate:.2e}",
        f"{speed.step_seconds:.3f} s/step",
        f"{speed.tokens_per_second:,.0f} tok/s",
        f"{speed.tflops_per_gpu:.1f} TFLOP/s/GPU" if speed.memory_gib is not None else "",
        f"MFU {100 * speed.mfu:.1f} %" if speed.mfu is not None else "",
        f"{speed.memory_gib:.1f} GiB" if speed.memory_gib is not None else "",
        *(f"{name.replace('_', ' ')} {_number(value)}" for name, value in more.items()),
        f"{timedelta(seconds=round((steps - numbers.step) * speed.step_seconds))} left",
    ]
    return " | ".join(part for part in parts if part)


def _number(value: float | int) -> str:
    return f"{value:,d}" if isinstance(value, int) else f"{value:.3f}"


def _open_board(args: argparse.Namespace) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    try:
        return SummaryWriter(args.tensorboard_dir, max_queue=args.tensorboard_queue_size)
    except OSError as error:
        raise ConfigError(
            f"tensorboard_dir: {args.tensorboard_dir} cannot be written: {error.strerror}",
            hint="set tensorboard_dir to a directory that can be written, or to null to do without",
        ) from error


def _start_wandb(args: argparse.Namespace) -> Any:
    import wandb

    plain = {k: v for k, v in vars(args).items() if isinstance(v, (bool, int, float, str))}
    return wandb.init(
        project=args.wandb_project,
        name=args.wandb_exp_name,
        entity=args.wandb_entity,
        dir=args.wandb_save_dir,
        config=plain,
    )
