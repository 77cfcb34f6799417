"""Training loop: steps, evaluations, checkpoints and logs.

:func:`flagscale.train.setup.prepare_training` builds a :class:`Trainer`, which the training program
(:mod:`flagscale.train.train_gpt`) runs.
"""

from __future__ import annotations

import argparse
import gc
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from flagscale.config.arguments.rules.optimizer import save_interval_at
from flagscale.errors import ConfigError, Problem
from flagscale.train.best_evaluation import VALIDATION_LOSS, EvaluationHistory
from flagscale.train.bounded_all_reduce import BoundedReduceStatistics, explain_unbounded_reduce
from flagscale.train.checkpoint import BestCheckpoint, Checkpointer, SavedCheckpoint
from flagscale.train.data.datasets import DataIterators
from flagscale.train.deferred_metrics import DeferredMetrics, StepMetrics
from flagscale.train.evaluation.tasks import TaskEvaluation
from flagscale.train.generation import Generator
from flagscale.train.layers.layer_compilation import get_compile_seconds
from flagscale.train.loss_monitor import LossMonitor
from flagscale.train.memory_checkpoint.copies import MemoryCheckpoints
from flagscale.train.memory_history import MemoryHistory
from flagscale.train.microbatch_balancer import MicrobatchBalancer
from flagscale.train.parameter_norm import compute_parameters_norm
from flagscale.train.rank_comparison import RankComparison
from flagscale.train.report import TrainingReporter
from flagscale.train.state import TrainState
from flagscale.train.step import Stepper, gathered_parameters
from flagscale.train.stop_request import StopReason, StopRequest
from flagscale.train.throughput import ThroughputMeter


class Trainer:
    """Trains a :class:`TrainState` until the configured number of steps or a stop request."""

    def __init__(
        self,
        args: argparse.Namespace,
        state: TrainState,
        stepper: Stepper,
        load_data: Callable[[], DataIterators],
        checkpointer: Checkpointer,
        reporter: TrainingReporter,
        throughput_meter: ThroughputMeter,
        balancer: MicrobatchBalancer | None = None,
    ) -> None:
        """Open the data and prepare the loop.

        Args:
            args: resolved arguments of this rank.
            state: training state, new or as loaded from a checkpoint.
            stepper: runs steps on ``state``.
            load_data: returns this rank's data iterators, starting at the progress of ``state``.
            checkpointer: saves checkpoints.
            reporter: console, status events and metrics sinks.
            throughput_meter: measures throughput.
            balancer: assigns micro-batches to heterogeneous replicas by measured speed, if enabled.
        """
        self._args = args
        self._state = state
        self._stepper = stepper
        self._load_data = load_data
        self._data = load_data()
        self._balancer = balancer
        self._generator: Generator | None = None
        self._task_evaluation: TaskEvaluation | None = None
        self.memory_checkpoints: MemoryCheckpoints | None = None
        """Copies the state to host memory; None without."""
        self.memory_history: MemoryHistory | None = None
        """Writes a memory snapshot after a step; None without."""
        self.rank_comparison: RankComparison | None = None
        """Compares the times of the ranks; None without."""
        self._checkpointer = checkpointer
        self._reporter = reporter
        self._throughput_meter = throughput_meter
        self._deferred_metrics = DeferredMetrics()
        self._bounded_statistics = BoundedReduceStatistics()
        self._loss_monitor = LossMonitor(
            spike_factor=args.loss_spike_factor,
            fail_on_nonfinite=args.check_for_nan_in_loss_and_grad,
        )
        self._stop_request = StopRequest(args.exit_duration_in_mins)
        self._stop_reason: StopReason | None = None
        self._latest_metrics: StepMetrics | None = None
        self._skipped_steps = 0
        self._first_step = state.progress.iteration + 1
        self._last_step = 0 if args.skip_train else args.train_iters
        self._saved_step = state.progress.iteration
        self._logged_step = state.progress.iteration
        self._evaluated_step = -1
        self._tasks_evaluated_step = -1
        self._task_interval = args.eval_tasks_interval or args.eval_interval
        self._tracks_best = not args.skip_train and (
            args.save_best or args.early_stopping_patience is not None
        )
        self.end_detail = ""
        """Explanation of the end, if training has completed before its last step."""

    def prepare_evaluations(
        self, generator: Generator | None, task_evaluation: TaskEvaluation | None
    ) -> None:
        """Set what is evaluated in addition to the loss. Called before :meth:`run`.

        Args:
            generator: generates answers to the prompts of ``eval_prompts``; None without.
            task_evaluation: evaluates the model on ``eval_tasks``; None without.

        Raises:
            ConfigError: evaluations cannot be compared, because nothing measures the metric.
        """
        self._generator, self._task_evaluation = generator, task_evaluation
        if task_evaluation is not None and self._args.best_metric:
            task_evaluation.require_metric(self._args.best_metric)
        if self._tracks_best:
            self._choose_best_metric()

    def run(self) -> StopReason:
        """Train and return the reason for the end. The last checkpoint is complete on return.

        Raises:
            JobError: the loss or the gradient norm is not finite.
        """
        if self._args.exit_signal_handler:
            self._stop_request.install_handler()
        if self.memory_checkpoints is not None and self.memory_checkpoints.has_restored:
            self._saved_step = -1
        if warning := explain_unbounded_reduce(self._args):
            self._reporter.warn(warning)
        if self._args.manual_gc:
            gc.disable()
        # megatron.core collects garbage while it describes the optimizer's state: training would
        # wait for a look at every object of model and libraries at each save.
        gc.collect()
        gc.freeze()
        self._throughput_meter.start_lap()
        reason: StopReason = "completed"
        while self._state.progress.iteration < self._last_step:
            # Also before the first step: a resumed run may have stopped early already.
            if self._stops_early():
                break
            self._run_step()
            if stop_reason := self._pending_stop_reason():
                reason = stop_reason
                break
        self._process_metrics(keep_newest=0)
        self._log_last_step()
        if self.rank_comparison is not None:
            self.rank_comparison.close()
        self._stepper.close()
        if reason == "completed":
            self._run_final_evaluation()
        self._save_final_checkpoint()
        # Wait for checkpoints that are written in the background.
        self._reporter.write_progress(self._state.progress.iteration, "saving a checkpoint")
        self._checkpointer.close(finish_exports=reason == "completed")
        if self.memory_checkpoints is not None:
            self.memory_checkpoints.close()
        self._report_saved_checkpoints()
        gc.unfreeze()
        self._reporter.close("finished" if reason == "completed" else "stopped")
        return reason

    def _run_step(self) -> None:
        args, progress = self._args, self._state.progress
        self._reporter.write_progress(progress.iteration + 1)
        if progress.iteration + 1 in (args.iterations_to_skip or ()):
            self._stepper.skip_step(self._data.train)
            self._reporter.log(f"step {progress.iteration}: its data is skipped")
            return
        samples_before = progress.consumed_train_samples
        host_metrics, device_metrics = self._stepper.train(
            self._data.train, stop_flags=self._stop_request.poll()
        )
        self._throughput_meter.count_step(progress.consumed_train_samples - samples_before)
        if self.memory_history is not None:
            self.memory_history.after_step(progress.iteration)
        self._deferred_metrics.add(host_metrics, device_metrics)
        if self._balancer is not None and self._balancer.rebalance_microbatches():
            self._data = self._load_data()
        step = progress.iteration
        log_due = step % args.log_interval == 0 or step == self._first_step
        evaluation_due = _is_due(step, args.eval_interval) and step < self._last_step
        tasks_due = self._task_evaluation is not None and (
            _is_due(step, self._task_interval) and step < self._last_step
        )
        checkpoint_interval = save_interval_at(vars(args), progress.consumed_train_samples)
        save_due = bool(args.save) and _is_due(step, checkpoint_interval)
        if self._tracks_best and step == self._last_step:
            # Saved after the final evaluation, whose result belongs to the checkpoint.
            save_due = False
        is_pause = log_due or evaluation_due or tasks_due or save_due
        self._process_metrics(keep_newest=0 if is_pause else 1)
        if log_due:
            self._log_progress()
        if step == self._first_step and (compile_seconds := get_compile_seconds()) >= 1:
            self._reporter.log(
                f"step {step}: {compile_seconds:.0f} s of it were compilation; a later start loads "
                "the kernels from torch's cache"
            )
        if evaluation_due:
            self._evaluate("valid")
        if tasks_due:
            self._evaluate_tasks()
        if save_due or (args.save_best and self._is_best_step()):
            self._save_checkpoint(is_extra=not save_due)
        memory_checkpoints = self.memory_checkpoints
        if memory_checkpoints is not None and memory_checkpoints.is_due(step):
            with gathered_parameters(args, self._state.chunks):
                note = memory_checkpoints.save(self._state)
            if note is not None:
                self._reporter.log(note)
        self._report_saved_checkpoints()
        if args.manual_gc and step % args.manual_gc_interval == 0:
            gc.collect()

    def _process_metrics(self, *, keep_newest: int) -> None:
        """Process the metrics of finished steps: the same steps at the same time on all ranks."""
        for metrics in self._deferred_metrics.pop_completed(keep_newest=keep_newest):
            self._stop_reason = self._stop_reason or metrics.stop_reason
            self._latest_metrics = metrics
            self._skipped_steps += bool(metrics.host.skip_reason)
            if warning := self._loss_monitor.check_step(metrics):
                self._reporter.warn(warning)
            self._reporter.log_scalars(metrics)

    def _log_last_step(self) -> None:
        """Log the progress of the last step, unless it is logged already."""
        if self._latest_metrics is not None and self._latest_metrics.host.step != self._logged_step:
            self._log_progress()

    def _log_progress(self) -> None:
        if self._latest_metrics is None:
            return
        self._logged_step = self._latest_metrics.host.step
        throughput = self._throughput_meter.finish_lap()
        extra_metrics: dict[str, float | int] = {
            **(self._stepper.rewards.pop_averages() if self._stepper.rewards else {}),
            **self._stepper.mtp_losses.pop_averages(),
            **self._stepper.router_losses.pop_averages(),
            **self._bounded_statistics.pop_statistics(),
        }
        if self._args.log_params_norm:
            extra_metrics["params_norm"] = compute_parameters_norm(self._state.chunks)
        if self._args.fp16:
            extra_metrics["loss_scale"] = int(self._state.optimizer.get_loss_scale())
        if self._args.fp16 or self._skipped_steps:
            extra_metrics["skipped_steps"], self._skipped_steps = self._skipped_steps, 0
        self._reporter.log_progress(self._latest_metrics, throughput, extra_metrics)
        if self.rank_comparison is not None:
            self.rank_comparison.report(self._logged_step)

    def _pending_stop_reason(self) -> StopReason | None:
        """Return the reason to end after this step, if any. The result is equal on all ranks."""
        if self._stop_reason is not None:
            return self._stop_reason
        if _is_due(self._state.progress.iteration, self._args.exit_interval):
            return "exit-interval"
        return None

    def _evaluate(self, split: Literal["valid", "test"]) -> None:
        # The name of a split's only data set is empty.
        data_sets = {"": self._data.valid if split == "valid" else self._data.test}
        if split == "valid" and self._data.validation_sets:
            data_sets = dict(self._data.validation_sets)
        iterators = {name: iterator for name, iterator in data_sets.items() if iterator is not None}
        if not iterators or not self._args.eval_iters:
            return
        self._reporter.write_progress(self._state.progress.iteration, "evaluating")
        with self._throughput_meter.pause():
            with gathered_parameters(self._args, self._state.chunks):
                evaluations = {
                    name: self._stepper.evaluate(iterator, self._args.eval_iters)
                    for name, iterator in iterators.items()
                }
            progress = self._state.progress
            if split == "valid":
                progress.consumed_valid_samples += (
                    self._args.eval_iters * self._args.global_batch_size
                )
                self._evaluated_step = progress.iteration
            for name, (loss, rewards) in evaluations.items():
                self._reporter.log_evaluation(split, progress.iteration, loss, name, rewards)
            if split == "valid":
                if self._state.validation.metric == VALIDATION_LOSS:
                    losses = [evaluation.loss for evaluation in evaluations.values()]
                    self._track_evaluation(sum(losses) / len(losses))
                self._report_answers()

    def _evaluate_tasks(self) -> None:
        """Evaluate the model on tasks."""
        if self._task_evaluation is None:
            return
        step = self._state.progress.iteration
        self._reporter.write_progress(step, "evaluating")
        with self._throughput_meter.pause(), gathered_parameters(self._args, self._state.chunks):
            scores = self._task_evaluation.run()
            self._tasks_evaluated_step = step
            self._reporter.log_scores(step, scores)
            if self._state.validation.metric != VALIDATION_LOSS:
                metric = self._state.validation.metric
                self._track_evaluation(scores.values.get(metric, math.nan))

    def _choose_best_metric(self) -> None:
        """Set the metric of early stopping and of the best checkpoint.

        The history of a resumed run that was judged by another metric starts anew.
        """
        args, history = self._args, self._state.validation
        metric, higher_is_better = VALIDATION_LOSS, False
        if args.best_metric and self._task_evaluation is not None:
            metric = args.best_metric
            higher_is_better = self._task_evaluation.higher_is_better[metric]
        else:
            self._require_validation_data()
        if history.metric != metric and history.best_value is not None:
            self._reporter.log(
                f"best_metric: {metric} instead of {history.metric}, whose best value is forgotten"
            )
        if (history.metric, history.higher_is_better) != (metric, higher_is_better):
            self._state.validation = EvaluationHistory(
                metric=metric, higher_is_better=higher_is_better
            )

    def _require_validation_data(self) -> None:
        """Refuse early stopping and the best checkpoint without a validation loss."""
        if self._data.valid is None and not self._data.validation_sets:
            name = "save_best" if self._args.save_best else "early_stopping_patience"
            raise ConfigError(
                Problem(name, "requires a validation loss, but there is no validation data"),
                hint="set valid_data_path, or give validation a share in split",
            )

    def _track_evaluation(self, value: float) -> None:
        """Record a value of the metric by which evaluations are compared: a validation loss, the
        mean over the sets if there are several, or a score on tasks.
        """
        # A run that is over already has recorded its last evaluation.
        if not self._tracks_best or self._state.progress.iteration < self._first_step:
            return
        args, history = self._args, self._state.validation
        step = self._state.progress.iteration
        history.add_evaluation(step, value, args.early_stopping_min_delta)
        self._reporter.log_evaluation_history(step, history)

    def _is_best_step(self) -> bool:
        """Return whether the last evaluation is the best one and of the current step."""
        step, history = self._state.progress.iteration, self._state.validation
        is_loss = history.metric == VALIDATION_LOSS
        evaluated_step = self._evaluated_step if is_loss else self._tasks_evaluated_step
        return self._tracks_best and history.best_step == step and evaluated_step == step

    def _stops_early(self) -> bool:
        """Return whether evaluations have stopped improving. Equal on all ranks."""
        args = self._args
        if not self._tracks_best:
            return False
        self.end_detail = self._state.validation.explain_stop(
            args.early_stopping_patience, args.early_stopping_min_delta
        )
        if self.end_detail:
            self._reporter.log(
                f"step {self._state.progress.iteration} | training ends: {self.end_detail} "
                f"(early_stopping_patience: {args.early_stopping_patience})"
            )
        return bool(self.end_detail)

    def _report_answers(self) -> None:
        """Generate and report the answers to the evaluation prompts."""
        if self._generator is None:
            return
        with gathered_parameters(self._args, self._state.chunks):
            answers = self._generator.generate_answers()
        step = self._state.progress.iteration
        for prompt, answer in zip(self._generator.prompts, answers, strict=True):
            self._reporter.log_answer(step, prompt, answer)

    def _run_final_evaluation(self) -> None:
        if self._evaluated_step != self._state.progress.iteration:
            self._evaluate("valid")
        if self._tasks_evaluated_step != self._state.progress.iteration:
            self._evaluate_tasks()
        self._evaluate("test")

    def _save_checkpoint(self, *, is_extra: bool = False) -> None:
        """Save a checkpoint; ``is_extra``: only because it is the best one."""
        self._reporter.write_progress(self._state.progress.iteration, "saving a checkpoint")
        best = None
        if self._args.save_best and self._is_best_step():
            value = self._state.validation.best_value
            assert value is not None
            best = BestCheckpoint(self._state.validation.metric, value, is_extra)
        with self._throughput_meter.pause(), gathered_parameters(self._args, self._state.chunks):
            self._checkpointer.save(self._state, best=best)
            self._saved_step = self._state.progress.iteration

    def _save_final_checkpoint(self) -> None:
        if self._args.save and self._saved_step != self._state.progress.iteration:
            self._save_checkpoint()

    def _report_saved_checkpoints(self) -> None:
        for checkpoint in self._checkpointer.poll():
            self._reporter.log_checkpoint(
                checkpoint.iteration,
                checkpoint.path,
                checkpoint.save_seconds,
                best=_describe_best(checkpoint),
            )
        for message in self._checkpointer.pop_export_messages():
            self._reporter.log(message)


def _describe_best(checkpoint: SavedCheckpoint) -> dict[str, Any]:
    """Return the fields of a checkpoint's status event if it is the best one."""
    if checkpoint.best is None:
        return {}
    best = checkpoint.best
    return {"best": True, **replace(best, value=round(best.value, 6)).record()}


def _is_due(step: int, interval: int | None) -> bool:
    """Return whether something that happens every ``interval`` steps happens after ``step``."""
    return interval is not None and step % interval == 0
