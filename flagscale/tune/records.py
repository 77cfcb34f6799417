"""Trials of a search, in ``<exp_dir>/auto_tuner/trials.json``, from which a search goes on.

The file is written before a trial starts and after it has ended. A search that was killed ends the
trial that it finds there as running, and tries that layout again.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from flagscale.config.arguments.layout_choices import CHOSEN_ARGUMENTS, hashable
from flagscale.errors import RunStateError
from flagscale.files import make_private_directory, read_json, require_trusted_file, write_json
from flagscale.launcher.layout import TUNER_DIRECTORY
from flagscale.tune.space import SearchProblem, describe_setting

TRIALS_FILE = "trials.json"

RUNNING, MEASURED, CUT_SHORT, FAILED = "running", "measured", "cut short", "failed"
"""States of a trial. One that was cut short has shown that it is slower than the best."""

_T_QUANTILES = (12.7, 4.3, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
"""Quantiles of Student's distribution for 95 %, by degrees of freedom from 1."""
_USUAL = 1.25
"""Times of steps up to this many medians count as they are."""
_LEAST_ERROR = 0.004
"""Relative standard error that runs of one layout have in any case."""


@dataclass(frozen=True)
class Trial:
    """One run of a layout.

    ``step_seconds`` are those of the counted steps. ``failure`` is the first failure in one line;
    ``ran_out_of_memory`` is True if that is why it failed. ``run`` is the number of the trial that
    started its processes, 0 for the trial itself.
    """

    number: int
    setting: Mapping[str, Any]
    state: str = RUNNING
    step_seconds: Sequence[float] = ()
    memory_gib: float | None = None
    failure: str = ""
    ran_out_of_memory: bool = False
    started: float = 0.0
    seconds: float = 0.0
    log: str = ""
    run: int = 0

    @property
    def directory(self) -> str:
        """Name of the directory of its run."""
        return f"trial_{self.run or self.number:03d}"

    @property
    def key(self) -> str:
        return describe_setting(self.setting)


@dataclass(frozen=True)
class Timing:
    """Seconds per step of a layout over all of its trials, with the relative standard error."""

    seconds: float
    error: float
    steps: int
    trials: int = 1

    @property
    def interval(self) -> tuple[float, float]:
        """Interval that holds the mean with a probability of 95 %."""
        quantile = _T_QUANTILES[min(max(self.steps - 2, 0), len(_T_QUANTILES) - 1)]
        margin = quantile * self.error * self.seconds
        return self.seconds - margin, self.seconds + margin


def time_steps(step_seconds: Sequence[float]) -> Timing | None:
    """Return the time of a step; None without two steps. Times that exceed the median by a quarter,
    as when the machine does something else, count as the largest of the others.
    """
    if len(step_seconds) < 2:
        return None
    ordered = sorted(step_seconds)
    median = ordered[len(ordered) // 2]
    usual = [seconds for seconds in ordered if seconds <= _USUAL * median]
    values = [min(seconds, usual[-1]) for seconds in step_seconds]
    mean = fmean(values)
    error = stdev(values) / mean / math.sqrt(len(values))
    return Timing(mean, max(error, _LEAST_ERROR), len(values))


def combine(timings: Sequence[Timing]) -> Timing:
    """Return the time of a layout over several trials. Trials that differ by more than their steps
    do make the error larger.
    """
    if len(timings) == 1:
        return timings[0]
    mean = fmean(timing.seconds for timing in timings)
    within = math.sqrt(sum(timing.error**2 for timing in timings)) / len(timings)
    between = stdev(t.seconds for t in timings) / mean / math.sqrt(len(timings))
    steps = sum(timing.steps for timing in timings)
    return Timing(mean, max(within, between), steps, len(timings))


@dataclass
class TrialRecords:
    """Recorded trials of one search problem, oldest first."""

    directory: Path
    fingerprint: str
    trials: list[Trial] = field(default_factory=list)

    def start(self, setting: Mapping[str, Any], run: int = 0) -> Trial:
        """Record the start of a trial, before it starts; ``run`` as in :class:`Trial`."""
        number = max((trial.number for trial in self.trials), default=0) + 1
        trial = Trial(number, dict(setting), started=time.time(), run=run)
        self.trials.append(trial)
        self.save()
        return trial

    def finish(self, trial: Trial) -> None:
        """Record the end of a trial."""
        index = next(i for i, other in enumerate(self.trials) if other.number == trial.number)
        self.trials[index] = replace(trial, seconds=time.time() - trial.started)
        self.save()

    def forget(self, trial: Trial) -> None:
        """Remove a trial that was interrupted."""
        self.trials = [other for other in self.trials if other.number != trial.number]
        self.save()

    def save(self) -> None:
        record = {
            "fingerprint": self.fingerprint,
            "trials": [{**vars(trial), "setting": dict(trial.setting)} for trial in self.trials],
        }
        write_json(self.directory / TRIALS_FILE, record)


def fingerprint(problem: SearchProblem) -> str:
    """Return a text that differs for problems whose measurements cannot be compared."""
    values = {
        name: str(value)
        for name, value in sorted(problem.values.items())
        if name not in CHOSEN_ARGUMENTS and name not in _UNIMPORTANT and "/" not in str(value)
    }
    machine = f"{problem.machine.ranks} {problem.machine.ranks_per_host} {problem.machine.name}"
    text = json.dumps([machine, values])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


_UNIMPORTANT = frozenset({"train_iters", "train_samples", "save", "load", "seed", "lr", "min_lr"})
"""Arguments that change nothing about the speed of a step."""


def open_records(exp_dir: Path, problem: SearchProblem) -> tuple[TrialRecords, str]:
    """Return the records of a problem, and a note if those of another problem were set aside.

    Raises:
        RunStateError: The records are unreadable, or another user could have written them.
    """
    directory = exp_dir / TUNER_DIRECTORY
    make_private_directory(exp_dir)
    make_private_directory(directory)
    path, own = directory / TRIALS_FILE, fingerprint(problem)
    if not path.exists():
        return TrialRecords(directory, own), ""
    try:
        require_trusted_file(path, directory)
    except PermissionError as error:
        raise RunStateError(f"{path} {error.strerror}: its trials are not used") from None
    record = read_json(path)
    try:
        if record is None:
            raise ValueError
        trials = [read_trial(entry) for entry in record["trials"]]
        recorded = str(record["fingerprint"])
    except (KeyError, TypeError, ValueError):
        raise RunStateError(f"{path} is damaged", hint=f"remove {directory}") from None
    if recorded == own:
        return TrialRecords(directory, own, trials), ""
    name = f"{TUNER_DIRECTORY}_{recorded[:8]}"
    names = itertools.chain((name,), (f"{name}_{number}" for number in itertools.count(2)))
    aside = next(path for path in map(directory.with_name, names) if not path.exists())
    try:
        directory.rename(aside)
    except OSError as error:
        raise RunStateError(
            f"the trials in {directory} are of another model, batch or machine, and cannot be set "
            f"aside: {error.strerror}",
            hint=f"move {directory} away",
        ) from None
    make_private_directory(directory)
    note = (
        f"the trials in {directory} are of another model, batch or machine; they are now in {aside}"
    )
    return TrialRecords(directory, own), note


def read_trial(entry: Mapping[str, Any]) -> Trial:
    """Return a trial from its entry in the records."""
    setting = {name: hashable(value) for name, value in entry["setting"].items()}
    return Trial(**{**entry, "setting": setting})


@contextmanager
def lock_records(exp_dir: Path) -> Iterator[None]:
    """Hold the lock of a directory's search.

    Raises:
        RunStateError: Another search holds it.
    """
    from filelock import FileLock, Timeout

    make_private_directory(exp_dir)
    lock = FileLock(exp_dir / f".{TUNER_DIRECTORY}.lock", timeout=0, mode=0o600)
    try:
        lock.acquire()
    except Timeout:
        raise RunStateError(
            f"another auto_tune is searching in {exp_dir}", hint="wait for it, or end it"
        ) from None
    try:
        yield
    finally:
        lock.release()
