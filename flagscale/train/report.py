"""What training tells the world: console, status events, TensorBoard, Weights & Biases.

One rank of a job speaks; on the others everything here but the status events is silent. What cannot
be written, say since a disk is full, is left out: no figure is worth a training run.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from textwrap import shorten
from typing import Any

from flagscale.errors import ConfigError
from flagscale.status import STEP, StatusWriter
from flagscale.train.readings import Reading

_TRY_AGAIN_SECONDS = 60.0
_ROOM_BYTES = 256 * 1024
"""What has to fit before TensorBoard's files, which failed, are begun anew."""


@dataclass(frozen=True)
class Speed:
    """Throughput over the steps since the last report."""

    step_seconds: float
    tokens_per_second: float
    tflops_per_gpu: float | None
    """None where nobody has counted the model's arithmetic."""
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
        self._board: Board | None = None
        self._wandb: Any = None
        if speaks and args.tensorboard_dir:
            self._board = Board(args, warn=self.warn)
        if speaks and args.wandb_project:
            self._wandb = _start_wandb(args)

    def place(self, step: int, doing: str = STEP) -> None:
        """How far this rank is, for the launcher; see :meth:`StatusWriter.write_progress`. Every
        rank says it, so that the one that holds up the others is known."""
        self._status.write_progress(step, doing)

    def say(self, text: str) -> None:
        """A line for the person at the console."""
        if self._speaks:
            _print(text)

    def warn(self, message: str) -> None:
        """A warning, once a job, also for the launcher."""
        if self._speaks:
            self._status.write("warning", message=message)
            _print(f"warning: {message}")

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
            tflops_per_gpu=_rounded(speed.tflops_per_gpu, 3),
            mfu=_rounded(speed.mfu, 4),
            memory_gib=_rounded(speed.memory_gib, 2),
            **{name: round(value, 6) for name, value in more.items()},
        )
        _print(progress_line(reading, speed, steps, more))
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

    def evaluation(self, split: str, step: int, loss: float, name: str = "") -> None:
        """The loss on a split that is not trained on, or on one of its sets, which has a name."""
        if not self._speaks:
            return
        perplexity = math.exp(min(loss, 20.0))
        if split == "valid":
            of = {"data": name} if name else {}
            self._status.write("evaluation", step=step, loss=round(loss, 6), **of)
        shown = f"{split} {name}" if name else split
        _print(f"step {step} | {shown} loss {loss:.4f} | perplexity {perplexity:.2f}")
        prefix = f"{split}/{name}" if name else split
        values: dict[str, float | None] = {f"{prefix}/loss": loss}
        if self._args.log_validation_ppl_to_tensorboard:
            values[f"{prefix}/perplexity"] = perplexity
        self._plot(step, values)

    def answer(self, step: int, prompt: str, text: str) -> None:
        """What the model answers to a prompt."""
        self.say(f"step {step} | {shorten(prompt, 60)} → {shorten(text, 200)}")

    def checkpoint(self, step: int, path: Any, seconds: float) -> None:
        """A checkpoint is whole on disk."""
        if self._speaks:
            self._status.write("checkpoint", step=step, path=str(path), seconds=round(seconds, 2))
            _print(f"step {step} | checkpoint saved in {seconds:.1f} s: {path}")

    def close(self) -> None:
        """Write out what is buffered."""
        if self._board is not None:
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish()

    def _plot(self, step: int, values: Mapping[str, float | None]) -> None:
        known = {name: value for name, value in values.items() if value is not None}
        if self._board is not None:
            self._board.plot(step, known)
        if self._wandb is not None and known:
            self._wandb.log(known, step=step)


class Board:
    """TensorBoard's event files. Whatever keeps them from being written ends no training: it is
    said once, the figures are left out, and new files are begun when there is room again."""

    def __init__(self, args: argparse.Namespace, *, warn: Callable[[str], None]) -> None:
        self._args = args
        self._warn = warn
        self._writer: Any = _open_board(args)
        self._try_again = 0.0

    def plot(self, step: int, values: Mapping[str, float]) -> None:
        """Show the values of a step; they are written in the background, a little later."""
        if self._writer is None and time.monotonic() >= self._try_again:
            self._begin_again(step)
        if self._writer is None:
            return
        try:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)
        # What the background thread met, which is no OSError where TensorFlow is installed.
        except Exception as error:  # noqa: BLE001
            self._give_up(step, error)

    def close(self) -> None:
        """Write out what is buffered."""
        if self._writer is None:
            return
        try:
            self._writer.close()
        except Exception as error:  # noqa: BLE001 - as above
            self._warn(f"{self._place()}: the last figures could not be written: {_reason(error)}")
        self._writer = None

    def _give_up(self, step: int, error: Exception) -> None:
        # It is not closed: its thread is gone, and closing would wait for it or fail again.
        self._writer = None
        self._try_again = time.monotonic() + _TRY_AGAIN_SECONDS
        self._warn(
            f"{self._place()} cannot be written: {_reason(error)}; from about step {step} on its "
            "figures are left out until it can be"
        )

    def _begin_again(self, step: int) -> None:
        """Go on in a new file, if there is room: where there is none, the writer's thread would
        leave a traceback in the log."""
        self._try_again = time.monotonic() + _TRY_AGAIN_SECONDS
        try:
            with tempfile.TemporaryFile(dir=self._args.tensorboard_dir) as file:
                file.write(bytes(_ROOM_BYTES))
                file.flush()
                os.fsync(file.fileno())
            self._writer = _open_board(self._args)
        except (OSError, ConfigError):
            return
        self._warn(f"{self._place()} can be written again: its figures go on at step {step}")

    def _place(self) -> str:
        return f"tensorboard_dir: {self._args.tensorboard_dir}"


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _print(line: str) -> None:
    """A line for the console, at once. One that cannot be written is dropped: standard output may
    be a file on a disk that is full."""
    try:
        print(line, flush=True)
    except OSError:
        _forget_buffered()


def _forget_buffered() -> None:
    """Drop what standard output has not got rid of, if it is buffered: it would be tried again as
    the process ends, which would then fail."""
    with suppress(OSError), Path(os.devnull).open("wb") as nowhere:
        descriptor = sys.stdout.fileno()
        kept = os.dup(descriptor)
        try:
            os.dup2(nowhere.fileno(), descriptor)
            sys.stdout.flush()
        finally:
            os.dup2(kept, descriptor)
            os.close(kept)


def progress_line(
    reading: Reading, speed: Speed, steps: int, more: Mapping[str, float | int]
) -> str:
    """One line that tells a person how training goes."""
    numbers, flops = reading.numbers, speed.tflops_per_gpu
    parts = [
        f"step {numbers.step:>{len(str(steps))}}/{steps}",
        f"loss {reading.loss:.4f}",
        "skipped" if numbers.skipped else f"grad norm {reading.grad_norm:.3f}",
        f"lr {numbers.learning_rate:.2e}",
        f"{speed.step_seconds:.3f} s/step",
        f"{speed.tokens_per_second:,.0f} tok/s",
        f"{flops:.1f} TFLOP/s/GPU" if flops is not None and speed.memory_gib is not None else "",
        f"MFU {100 * speed.mfu:.1f} %" if speed.mfu is not None else "",
        f"{speed.memory_gib:.1f} GiB" if speed.memory_gib is not None else "",
        *(f"{name.replace('_', ' ')} {_number(value)}" for name, value in more.items()),
        f"{timedelta(seconds=round((steps - numbers.step) * speed.step_seconds))} left",
    ]
    return " | ".join(part for part in parts if part)


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


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
