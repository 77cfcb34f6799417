"""The training loop."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from typing import Literal

from flagscale.config.arguments.growth import save_interval
from flagscale.train.checkpoint import Checkpointer
from flagscale.train.data.datasets import DataIterators
from flagscale.train.generation import Generator
from flagscale.train.layers.compiling import seconds_spent
from flagscale.train.meter import Meter
from flagscale.train.microbatch_balancer import Sharing
from flagscale.train.norms import parameters_norm
from flagscale.train.readings import Reading, Readings
from flagscale.train.report import Reporter
from flagscale.train.signals import Reason, StopRequest
from flagscale.train.state import TrainState
from flagscale.train.step import Stepper, gathered
from flagscale.train.tail import TailReadings, without_effect
from flagscale.train.watch import LossWatch


class Trainer:
    """Trains a :class:`TrainState` to the end of the arguments' length, or until told to stop."""

    def __init__(
        self,
        args: argparse.Namespace,
        state: TrainState,
        stepper: Stepper,
        load_data: Callable[[], DataIterators],
        checkpointer: Checkpointer,
        reporter: Reporter,
        meter: Meter,
        sharing: Sharing | None = None,
    ) -> None:
        """``load_data`` gives this rank's part of the data from where ``state`` is on; ``sharing``
        decides how large that is, where it is not given."""
        self._args = args
        self._state = state
        self._stepper = stepper
        self._load_data = load_data
        self._data = load_data()
        self._sharing = sharing
        self.generator: Generator | None = None
        """Answers prompts at evaluations, if any are to be."""
        self._checkpointer = checkpointer
        self._reporter = reporter
        self._meter = meter
        self._readings, self._tail = Readings(), TailReadings()
        self._watch = LossWatch(
            spike_factor=args.loss_spike_factor, fatal=args.check_for_nan_in_loss_and_grad
        )
        self._stop = StopRequest(args.exit_duration_in_mins)
        self._leave: Reason | None = None
        self._latest: Reading | None = None
        self._skipped = 0
        self._first_step = state.progress.iteration + 1
        self._end = 0 if args.skip_train else args.train_iters
        self._saved_at = state.progress.iteration
        self._evaluated_at = -1

    def run(self) -> Reason:
        """Train; returns why it ended. The last checkpoint is whole when it returns.

        Raises:
            JobError: the loss or the gradient is not finite.
        """
        if self._args.exit_signal_handler:
            self._stop.listen()
        if told := without_effect(self._args):
            self._reporter.warn(told)
        if self._args.manual_gc:
            gc.disable()
            gc.collect()
        self._meter.start()
        reason: Reason = "completed"
        while self._state.progress.iteration < self._end:
            self._step()
            if leave := self._must_leave():
                reason = leave
                break
        self._read(leave=0)
        self._stepper.close()
        if reason == "completed":
            self._evaluate_at_the_end()
        self._save_if_not_saved()
        # What is still being written in the background is waited for.
        self._reporter.place(self._state.progress.iteration, "saving a checkpoint")
        self._checkpointer.close()
        self._report_saved()
        self._reporter.close()
        return reason

    def _step(self) -> None:
        args, progress = self._args, self._state.progress
        self._reporter.place(progress.iteration + 1)
        if progress.iteration + 1 in (args.iterations_to_skip or ()):
            self._stepper.pass_over(self._data.train)
            self._reporter.say(f"step {progress.iteration}: its data is passed over")
            return
        before = progress.consumed_train_samples
        numbers, values = self._stepper.train(self._data.train, stop=self._stop.wishes())
        self._meter.add(progress.consumed_train_samples - before)
        self._readings.add(numbers, values)
        if self._sharing is not None and self._sharing.settle():
            self._data = self._load_data()
        step = progress.iteration
        logged = step % args.log_interval == 0 or step == self._first_step
        evaluated = _due(step, args.eval_interval) and step < self._end
        interval = save_interval(vars(args), progress.consumed_train_samples)
        saved = bool(args.save) and _due(step, interval)
        self._read(leave=0 if logged or evaluated or saved else 1)
        if logged:
            self._log()
        if step == self._first_step and (compiling := seconds_spent()) >= 1:
            self._reporter.say(
                f"step {step}: {compiling:.0f} s of it were compiling; a later start takes the "
                "kernels from torch's cache"
            )
        if evaluated:
            self._evaluate("valid")
        if saved:
            self._save()
        self._report_saved()
        if args.manual_gc and step % args.manual_gc_interval == 0:
            gc.collect()

    def _read(self, *, leave: int) -> None:
        """Look at steps that are done. All ranks read the same ones at the same time."""
        for reading in self._readings.take(leave=leave):
            self._leave = self._leave or reading.stop
            self._latest = reading
            self._skipped += bool(reading.numbers.skipped)
            if warning := self._watch.observe(reading):
                self._reporter.warn(warning)
            self._reporter.scalars(reading)

    def _log(self) -> None:
        if self._latest is None:
            return
        speed = self._meter.lap()
        more: dict[str, float | int] = {
            **self._stepper.further.take(),
            **self._stepper.routers.take(),
            **self._tail.take(),
        }
        if self._args.log_params_norm:
            more["params_norm"] = parameters_norm(self._state.chunks)
        if self._args.fp16:
            more["loss_scale"] = int(self._state.optimizer.get_loss_scale())
        if self._args.fp16 or self._skipped:
            more["skipped_steps"], self._skipped = self._skipped, 0
        self._reporter.progress(self._latest, speed, more)

    def _must_leave(self) -> Reason | None:
        """Whether to end after this step; every rank finds the same answer."""
        if self._leave is not None:
            return self._leave
        if _due(self._state.progress.iteration, self._args.exit_interval):
            return "exit-interval"
        return None

    def _evaluate(self, split: Literal["valid", "test"]) -> None:
        data = {"": self._data.valid if split == "valid" else self._data.test}
        if split == "valid" and self._data.validations:
            data = dict(self._data.validations)
        wanted = {name: one for name, one in data.items() if one is not None}
        if not wanted or not self._args.eval_iters:
            return
        self._reporter.place(self._state.progress.iteration, "evaluating")
        with self._meter.paused():
            with gathered(self._args, self._state.chunks):
                losses = {
                    name: self._stepper.evaluate(one, self._args.eval_iters)
                    for name, one in wanted.items()
                }
            progress = self._state.progress
            if split == "valid":
                progress.consumed_valid_samples += (
                    self._args.eval_iters * self._args.global_batch_size
                )
                self._evaluated_at = progress.iteration
            for name, loss in losses.items():
                self._reporter.evaluation(split, progress.iteration, loss, name)
            if split == "valid":
                self._answer()

    def _answer(self) -> None:
        """Show what the model answers to the prompts that are given."""
        if self.generator is None:
            return
        with gathered(self._args, self._state.chunks):
            answers = self.generator.answers()
        step = self._state.progress.iteration
        for prompt, answer in zip(self.generator.prompts, answers, strict=True):
            self._reporter.answer(step, prompt, answer)

    def _evaluate_at_the_end(self) -> None:
        if self._evaluated_at != self._state.progress.iteration:
            self._evaluate("valid")
        self._evaluate("test")

    def _save(self) -> None:
        self._reporter.place(self._state.progress.iteration, "saving a checkpoint")
        with self._meter.paused(), gathered(self._args, self._state.chunks):
            self._checkpointer.save(self._state)
            self._saved_at = self._state.progress.iteration

    def _save_if_not_saved(self) -> None:
        if self._args.save and self._saved_at != self._state.progress.iteration:
            self._save()

    def _report_saved(self) -> None:
        for saved in self._checkpointer.poll():
            self._reporter.checkpoint(saved.iteration, saved.path, saved.seconds)


def _due(step: int, interval: int | None) -> bool:
    return interval is not None and step % interval == 0
