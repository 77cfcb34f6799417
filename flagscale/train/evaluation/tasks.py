"""Evaluation on tasks of lm-evaluation-harness (``eval_tasks``) with the model in training.

Rank 0 runs lm_eval: it loads the tasks, builds the requests and computes the metrics, so that no
other host needs the package or the data. For each batch of token sequences it asks all ranks, which
wait in :meth:`TaskEvaluation.run`, for a forward pass.
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from flagscale.config.arguments.spec.paths import is_task_file
from flagscale.errors import ConfigError, DataError, Problem, first_line
from flagscale.train.checkpoint.collective_errors import run_on_rank_0
from flagscale.train.data.tokenizers import Tokenizer
from flagscale.train.evaluation.generation_options import parse_generation_options
from flagscale.train.evaluation.scores import TaskScores, read_results, score_name
from flagscale.train.evaluation.scoring import Score, ScoredSequence, SequenceScorer

_FEWSHOT_SEED = 1234  # lm_eval's default
_OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
_REQUEST_TYPES = ("loglikelihood", "loglikelihood_rolling", "generate_until")


@dataclass(frozen=True)
class TaskOptions:
    """Selection of an evaluation.

    Attributes:
        tasks: names of lm_eval's tasks, groups and tags, and YAML files of tasks.
        source: argument or option that names them, for messages.
        num_fewshot: number of examples before each question; None for that of the task.
        limit: maximum number of documents of each task; None for all.
    """

    tasks: Sequence[str]
    source: str
    num_fewshot: int | None = None
    limit: int | None = None


class _LeadingScorer:
    """Scorer of rank 0, which has the other ranks take part in each of its calls."""

    def __init__(self, scorer: SequenceScorer) -> None:
        self._scorer = scorer
        self.max_length = scorer.max_length

    def score(self, sequences: Sequence[ScoredSequence]) -> list[Score]:
        return self._scorer.score(run_on_rank_0(lambda: ("score", sequences))[1])

    def predict_next(self, sequences: Sequence[Sequence[int]]) -> list[int]:
        return self._scorer.predict_next(run_on_rank_0(lambda: ("predict_next", sequences))[1])


class TaskEvaluation:
    """Evaluates the model on tasks, as often as :meth:`run` is called."""

    def __init__(self, options: TaskOptions, scorer: SequenceScorer, tokenizer: Tokenizer) -> None:
        """Load the tasks, and check that the model can answer them. All ranks call it.

        Raises:
            ConfigError: lm_eval is not installed, or a task is not known or not supported.
            DataError: a task or its data cannot be loaded without a network.
        """
        self._options, self._scorer = options, scorer
        self._model: Any = None
        self._tasks: Any = None
        metrics: dict[str, bool] = {}
        if dist.get_rank() == 0:
            with _unchanged_generators():
                self._tasks = load_tasks(options)
                from flagscale.train.evaluation.harness import HarnessModel

                self._model = HarnessModel(_LeadingScorer(scorer), tokenizer)
                _check_tasks(self._tasks["tasks"], options, self._model)
            metrics = _list_metrics(self._tasks["tasks"])
        self.higher_is_better: Mapping[str, bool] = run_on_rank_0(lambda: metrics)
        """The metrics of the tasks by name, and whether a higher value is better."""

    def require_metric(self, name: str) -> None:
        """Check that the tasks have the metric ``best_metric``.

        Raises:
            ConfigError: they do not.
        """
        if name in self.higher_is_better:
            return
        similar_names = get_close_matches(name, self.higher_is_better, n=1, cutoff=0.3)
        names = similar_names or [*self.higher_is_better][:3]
        raise ConfigError(
            Problem("best_metric", f"{name} is not a metric of eval_tasks"),
            hint=f"expected TASK/METRIC, such as {', '.join(names)}",
        )

    def run(self) -> TaskScores:
        """Evaluate the model. Collective; all ranks return the same scores.

        The random number generators of training are left as they were.
        """
        if self._model is None:
            return self._serve()
        from lm_eval.evaluator import evaluate

        start_time = time.monotonic()
        with _unchanged_generators():
            for task in self._tasks["tasks"].values():
                task.set_fewshot_seed(seed=_FEWSHOT_SEED)
            results = evaluate(
                self._model,
                self._tasks,
                limit=self._options.limit,
                bootstrap_iters=0,
                log_samples=False,
            )
        scores = read_results(results, time.monotonic() - start_time)
        scores_of_all: TaskScores = run_on_rank_0(lambda: ("finish", scores))[1]
        return scores_of_all

    def _serve(self) -> TaskScores:
        """Take part in the forward passes of rank 0 until it has the scores."""
        while True:
            request: Any = run_on_rank_0(lambda: None)
            command, value = request
            if command == "finish":
                scores: TaskScores = value
                return scores
            getattr(self._scorer, command)(value)


@contextmanager
def _unchanged_generators() -> Iterator[None]:
    """Return a context manager that restores the random number generators of the process."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def load_tasks(options: TaskOptions) -> dict[str, Any]:
    """Load tasks and their data, without a network unless HF_HUB_OFFLINE is 0.

    Returns:
        What lm_eval's ``TaskManager.load`` returns.

    Raises:
        ConfigError: lm_eval is not installed, or a name is not known.
        DataError: a task or its data cannot be loaded.
    """
    manager_class = _import_task_manager(options.source)
    words = list(dict.fromkeys(options.tasks))
    manager = manager_class(include_defaults=not all(map(is_task_file, words)))
    specs: list[Any] = []
    for word in words:
        if is_task_file(word):
            specs.append(_read_task_file(Path(word), options.source))
        elif word in manager.all_tasks:
            specs.append(word)
        else:
            raise _unknown_task(word, manager.all_tasks, options.source)
    loaded: dict[str, Any] = {"tasks": {}, "groups": {}, "group_map": {}}
    for word, spec in zip(words, specs, strict=True):
        try:
            part = manager.load([spec])
        except Exception as error:
            raise DataError(
                f"{options.source}: {word} cannot be loaded: {first_line(error)}",
                hint=_OFFLINE_HINT,
            ) from error
        for key, items in loaded.items():
            items.update(part.get(key, {}))
    for task in loaded["tasks"].values():
        if options.num_fewshot is not None and task.get_config("num_fewshot") != 0:
            task.set_config(key="num_fewshot", value=options.num_fewshot)
        elif task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=_FEWSHOT_SEED)
    return loaded


_OFFLINE_HINT = (
    "nothing is downloaded during training: name a YAML file with local data "
    "(dataset_path: json, data_files), or download the data set once by `HF_HUB_OFFLINE=0 "
    "HF_DATASETS_OFFLINE=0 flagscale evaluate …`"
)


def _import_task_manager(source: str) -> Any:
    """Return lm_eval's ``TaskManager``, set to use local files and to be quiet."""
    for variable in _OFFLINE_VARIABLES:
        os.environ.setdefault(variable, "1")
    try:
        import datasets
        from lm_eval.api import task
        from lm_eval.tasks import TaskManager
        from tqdm import tqdm
    except ImportError as error:
        raise ConfigError(
            Problem(source, f"requires lm_eval, which cannot be imported: {error}"),
            hint="pip install 'flagscale[evaluate]'",
        ) from error
    datasets.disable_progress_bars()
    task.tqdm = partial(tqdm, disable=True)
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    return TaskManager


def _read_task_file(path: Path, source: str) -> dict[str, Any]:
    """Return the content of a task's YAML; its data files may be named relative to it."""
    from lm_eval.tasks._yaml_loader import load_yaml

    try:
        content: dict[str, Any] = load_yaml(path)
    except Exception as error:
        raise DataError(f"{source}: {path} cannot be read: {first_line(error)}") from error
    if not {"task", "group", "class"} & content.keys():
        raise DataError(
            f"{source}: {path} defines no task",
            hint="a task has the keys task, dataset_path, output_type, doc_to_text, doc_to_target",
        )
    anchored: dict[str, Any] = _anchor_data_files(content, path.absolute().parent)
    return anchored


def _anchor_data_files(value: Any, directory: Path, key: str = "") -> Any:
    """Return a part of a task's YAML in which existing files have absolute paths."""
    if isinstance(value, dict):
        is_data = key in ("dataset_kwargs", "data_files")
        return {
            name: _anchor_data_files(
                item, directory, "data_files" if is_data and name not in ("data_dir",) else name
            )
            for name, item in value.items()
        }
    if isinstance(value, list):
        return [_anchor_data_files(item, directory, key) for item in value]
    is_path = key in ("data_files", "data_dir", "dataset_path") and isinstance(value, str)
    return str(directory / value) if is_path and (directory / value).exists() else value


def _unknown_task(word: str, names: Sequence[str], source: str) -> ConfigError:
    similar_names = get_close_matches(word, names, n=3)
    hint = (
        f"did you mean {', '.join(similar_names)}?"
        if similar_names
        else ("name a task of lm_eval (`lm_eval ls tasks` lists them), or a YAML file")
    )
    return ConfigError(Problem(source, f"{word} is not a task of lm_eval"), hint=hint)


def _check_tasks(tasks: Mapping[str, Any], options: TaskOptions, model: Any) -> None:
    """Check that the model can answer every request of the tasks.

    Raises:
        ConfigError: names a task, and what it needs that is not supported.
        DataError: the requests of a task cannot be built from its data.
    """
    for name, task in tasks.items():
        if getattr(task, "MULTIMODAL", False):
            raise _unsupported(
                options.source, name, "has images or audio, which the model cannot read"
            )
        if getattr(task, "UNSAFE_CODE", False):
            raise _unsupported(
                options.source, name, "runs code that the model writes, which is not supported"
            )
        try:
            task.build_all_requests(limit=options.limit, rank=0, world_size=1)
        except Exception as error:
            raise DataError(
                f"{options.source}: the requests of {name} cannot be built: {first_line(error)}"
            ) from error
        for instance in task.instances:
            if problem := _request_problem(instance, model):
                raise _unsupported(options.source, name, problem)


def _request_problem(instance: Any, model: Any) -> str:
    """Return the reason why a request is not supported; empty if it is."""
    if instance.request_type not in _REQUEST_TYPES:
        return f"needs {instance.request_type}, which is not supported"
    if instance.request_type == "generate_until":
        try:
            max_tokens = parse_generation_options(instance.args[1]).max_tokens
        except ValueError as error:
            return str(error)
        if max_tokens >= model.max_length:
            return (
                f"generates up to {max_tokens} tokens (max_gen_toks), but seq_length is "
                f"{model.max_length}"
            )
    if instance.request_type == "loglikelihood":
        continuation = instance.args[1]
        # A token has at least one byte, so most continuations need not be tokenized.
        is_long = len(continuation.encode()) > model.max_length
        if is_long and len(model.tok_encode(continuation)) > model.max_length:
            return f"has an answer of more than seq_length {model.max_length} tokens"
    return ""


def _unsupported(source: str, task: str, reason: str) -> ConfigError:
    return ConfigError(Problem(source, f"{task} {reason}"), hint="leave the task out")


def _list_metrics(tasks: Mapping[str, Any]) -> dict[str, bool]:
    """Return the metrics of tasks by name, and whether a higher value is better."""
    return {
        score_name(name, metric, task_filter.name): bool(higher_is_better)
        for name, task in tasks.items()
        for metric, higher_is_better in task.higher_is_better().items()
        for task_filter in task._filters
    }
