"""The winner of a search: as overrides, as a YAML that runs, and as a table of all trials."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flagscale.config.schema import Experiment
from flagscale.estimate.plan import GIB
from flagscale.files import write_atomic
from flagscale.launcher.layout import TUNER_DIRECTORY
from flagscale.tune.prediction import CAUSES
from flagscale.tune.records import CUT_SHORT, FAILED, Trial
from flagscale.tune.search import Result, Search, setting_key
from flagscale.tune.show import explain_difference, tokens_per_step
from flagscale.tune.space import SearchProblem
from flagscale.tune.trial import load_with, setting_overrides

BEST_FILE, HISTORY_FILE = "best.yaml", "history.csv"
_LISTED_EXPECTATIONS = 20


def winner_overrides(
    experiment: Experiment, problem: SearchProblem, setting: Mapping[str, Any]
) -> list[str]:
    """Return the overrides that give an experiment a layout and keep its batch size."""
    overrides = setting_overrides(experiment, setting)
    if experiment.train["global_batch_size"] is None:
        key = experiment.train.key_of("global_batch_size")
        overrides.append(f"{key}={problem.values['global_batch_size']}")
    return overrides


def load_winner(
    experiment: Experiment, problem: SearchProblem, result: Result, purpose: Any = "plan"
) -> Experiment:
    """Return the experiment with the layout of a result.

    Raises:
        ConfigError: It is wrong.
    """
    overrides = winner_overrides(experiment, problem, result.layout.setting)
    return load_with(experiment, overrides, purpose)


def write_best(experiment: Experiment, problem: SearchProblem, result: Result) -> Path:
    """Write the experiment with the best layout as a YAML that runs, and return its path."""
    import yaml

    from flagscale.launcher.actions import composed_config

    best = load_winner(experiment, problem, result)
    path = experiment.exp_dir / TUNER_DIRECTORY / BEST_FILE
    text = yaml.safe_dump(composed_config(best), sort_keys=False, allow_unicode=True)
    heading = (
        f"# {result.layout.key}: {result.timing.seconds:.4g} s per step on "
        f"{problem.machine.describe()}, found by auto_tune.\n"
    )
    write_atomic(path, heading + text)
    return path


def format_winner(
    experiment: Experiment, problem: SearchProblem, result: Result, path: Path
) -> Iterator[str]:
    """Yield lines that name the winner and how to run it."""
    low, high = result.timing.interval
    tokens = tokens_per_step(problem)
    yield (
        f"best: {result.layout.key}: {result.timing.seconds:.4g} s/step ({low:.4g} to {high:.4g} "
        f"in {result.timing.trials} trial{'s' * (result.timing.trials > 1)}), "
        f"{tokens / result.timing.seconds:,.0f} tokens/s"
    )
    overrides = winner_overrides(experiment, problem, result.layout.setting)
    yield f"  overrides: {shlex.join(overrides) or 'none: it is the layout of the YAML'}"
    yield f"  YAML:      {path}"
    yield f"  run it:    flagscale run {shlex.quote(str(path))}"


def trial_rows(search: Search, problem: SearchProblem) -> Iterator[dict[str, Any]]:
    """Yield a record of every layout that was tried, fastest first, then the failed ones."""
    winner = search.winner
    tokens = tokens_per_step(problem)
    trials = {setting_key(trial.setting): trial for trial in search.trials}
    for result in search.results:
        low, high = result.timing.interval
        is_best = result is winner
        yield {
            "name": result.layout.key,
            "layout": dict(result.layout.setting),
            "state": result.state,
            "best": is_best,
            "seconds": result.timing.seconds,
            "low": low,
            "high": high,
            "trials": result.timing.trials,
            "tokens_per_second": tokens / result.timing.seconds,
            "memory_gib": result.memory_gib,
            "predicted_seconds": result.layout.prediction.seconds,
            "seconds_by_cause": dict(result.layout.prediction.seconds_by_cause),
            "predicted_memory_gib": result.layout.prediction.memory.bytes / GIB,
            "why": _explain(result, winner),
            "log": trials[setting_key(result.layout.setting)].log,
        }
    for trial in search.failures:
        yield {
            "name": trial.key,
            "layout": dict(trial.setting),
            "state": FAILED,
            "best": False,
            "why": trial.failure,
            "log": trial.log,
        }


def _explain(result: Result, winner: Result | None) -> str:
    if winner is None or result is winner:
        return ""
    text = explain_difference(result.layout, winner.layout)
    if result.state == CUT_SHORT:
        return f"ended early, slower{': ' * bool(text)}{text}"
    return text


def write_history(directory: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the trials as CSV, a column per argument."""
    from flagscale.launcher.sweep_runs import write_csv_file

    names = list(rows[0]["layout"]) if rows else []
    columns = ("state", "seconds", "low", "high", "tokens_per_second", "memory_gib")
    predicted = ("predicted_seconds", "predicted_memory_gib", "best", "why")
    write_csv_file(
        directory / HISTORY_FILE,
        [*names, *columns, *predicted],
        [
            [row["layout"][name] for name in names]
            + [row.get(name) for name in (*columns, *predicted)]
            for row in rows
        ],
    )


def expectations(search: Search) -> dict[str, Any]:
    """Return the corrections of the causes, and the most promising layouts that were not tried."""
    causes = set[str]().union(*(r.layout.prediction.main_causes for r in search.results))
    return {
        "corrections": {
            CAUSES[cause]: search.belief.correction(cause) for cause in CAUSES if cause in causes
        },
        "untried": len(search.expected),
        "expected": [
            {
                "name": layout.key,
                "seconds": expectation.seconds,
                "low": expectation.interval[0],
                "high": expectation.interval[1],
                "memory_bytes": layout.prediction.memory.bytes,
            }
            for expectation, layout in search.expected[:_LISTED_EXPECTATIONS]
        ],
    }


def first_failure(trials: Sequence[Trial]) -> Trial | None:
    """Return the first trial that failed for another reason than memory."""
    return next((t for t in trials if t.state == FAILED and not t.ran_out_of_memory), None)
