"""Order of the trials, and their end. Nothing here starts a run."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from flagscale.config.arguments.layout_choices import MICRO_BATCH, SAVING_ARGUMENTS
from flagscale.config.arguments.spec.system_arguments import NO_SHARD
from flagscale.config.tuner_schema import Tuner
from flagscale.tune.belief import (
    MEASURED_DEVICES,
    OTHER_DEVICES,
    Belief,
    Expectation,
    Observation,
    Prospects,
)
from flagscale.tune.records import CUT_SHORT, FAILED, MEASURED, Timing, Trial, combine, time_steps
from flagscale.tune.space import Layout, SearchProblem, Space

_REPEATED_TRIALS = 2
"""Most trials of a layout that may be the best."""
_CHEAP_TRIAL = 0.6
"""Duration of a trial that needs no new processes, compared with one that does."""
_SAME_FAILURES = 2
"""Number of first trials that fail alike, after which no layout is expected to work."""
_CONSIDERED = 400
"""Number of layouts, fastest first by prediction, that a search on known devices may try."""

_FAILED_RANK = re.compile(r"^\S+ (rank \d+ )?")
"""Host and rank at the beginning of a failure: of equal ones, any may be reported first."""

Key = frozenset[tuple[str, Any]]


def setting_key(setting: Any) -> Key:
    return frozenset(setting.items())


class Decision(NamedTuple):
    """The next trial, or None with the reason why the search ends."""

    layout: Layout | None
    reason: str = ""
    is_repeat: bool = False


@dataclass(frozen=True)
class Result:
    """Measured layout."""

    layout: Layout
    timing: Timing
    memory_gib: float | None
    state: str


class Search:
    """State of a search, as it follows from its trials."""

    def __init__(
        self, problem: SearchProblem, space: Space, tuner: Tuner, trials: Sequence[Trial]
    ) -> None:
        self._problem, self._tuner = problem, tuner
        self.space, self.trials = space, list(trials)
        self._by_key = {setting_key(layout.setting): layout for layout in space.candidates}

    @cached_property
    def results(self) -> list[Result]:
        """Measured layouts, fastest first; those that were cut short are after all others."""
        by_layout: dict[Key, list[Trial]] = {}
        for trial in self.trials:
            if trial.state in (MEASURED, CUT_SHORT):
                by_layout.setdefault(setting_key(trial.setting), []).append(trial)
        results = []
        for key, trials in by_layout.items():
            if (layout := self._by_key.get(key)) is None:
                continue
            whole = [trial for trial in trials if trial.state == MEASURED]
            timings = [time_steps(trial.step_seconds) for trial in whole or trials]
            known = [timing for timing in timings if timing is not None]
            if known:
                memory = max((t.memory_gib for t in trials if t.memory_gib), default=None)
                state = MEASURED if whole else CUT_SHORT
                results.append(Result(layout, combine(known), memory, state))
        return sorted(results, key=lambda r: (r.state != MEASURED, r.timing.seconds))

    @property
    def fastest(self) -> Result | None:
        """The fastest layout of those that were measured."""
        return self.results[0] if self.results else None

    @property
    def winner(self) -> Result | None:
        """The best layout by the objective."""
        fastest = self.fastest
        if fastest is None or self._tuner.algo.priority == "performance":
            return fastest
        fast_enough = [r for r in self.results if r.timing.seconds <= self._slowest_allowed]
        return min(fast_enough, key=lambda result: result.layout.prediction.memory.bytes)

    @property
    def _slowest_allowed(self) -> float:
        assert self.fastest is not None
        return self.fastest.timing.seconds / self._tuner.algo.min_speed

    @property
    def failures(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.state == FAILED]

    @cached_property
    def belief(self) -> Belief:
        prior = MEASURED_DEVICES if self._problem.machine.is_known else OTHER_DEVICES
        return Belief(prior, [_observe(result, prior.trial) for result in self.results])

    @cached_property
    def remaining(self) -> list[Layout]:
        """Layouts that were not tried, and that no failure proves to be too large."""
        considered = self.space.candidates[: self._considered]
        return [o for o in self._list_untried(considered) if not self._is_too_large(o)]

    @property
    def proven_too_large(self) -> list[Layout]:
        """Layouts that were not tried because a smaller one ran out of memory: smaller by its
        settings, or by calculation.
        """
        return [o for o in self._list_untried(self.space.candidates) if self._is_too_large(o)]

    def _list_untried(self, layouts: Sequence[Layout]) -> list[Layout]:
        tried = {setting_key(trial.setting) for trial in self.trials}
        return [layout for layout in layouts if setting_key(layout.setting) not in tried]

    def _is_too_large(self, layout: Layout) -> bool:
        return layout.prediction.memory.bytes >= self._smallest_exceeding or any(
            takes_at_least(layout.setting, trial.setting)
            for trial in self.failures
            if trial.ran_out_of_memory
        )

    @cached_property
    def _smallest_exceeding(self) -> float:
        """Least calculated memory of the layouts that ran out of it. Infinite without any, and in a
        grid, which does not rely on calculations.
        """
        if self._tuner.algo.name == "grid":
            return math.inf
        layouts = (
            self._by_key.get(setting_key(trial.setting))
            for trial in self.failures
            if trial.ran_out_of_memory
        )
        return min((o.prediction.memory.bytes for o in layouts if o is not None), default=math.inf)

    @property
    def _considered(self) -> int:
        return _CONSIDERED if self._problem.machine.is_known else len(self.space.candidates)

    @cached_property
    def expected(self) -> list[tuple[Expectation, Layout]]:
        """Remaining layouts with their expected times, fastest first."""
        return sorted(
            ((self.expect(layout), layout) for layout in self.remaining),
            key=lambda pair: (pair[0].seconds, pair[1].key),
        )

    def expect(self, layout: Layout) -> Expectation:
        """Return the time of a layout that is expected after all measurements."""
        return self.belief.expect(layout)

    def decide(
        self, spent_seconds: float, is_cheap: Callable[[Layout], bool] = lambda _layout: False
    ) -> Decision:
        """Return the next trial.

        Args:
            spent_seconds: Duration of all trials so far.
            is_cheap: Whether the processes of the last trial can run a layout.
        """
        if reason := self._describe_common_failure():
            return Decision(None, reason)
        control = self._tuner.control
        if control.max_trials is not None and len(self.trials) >= control.max_trials:
            return Decision(None, f"{control.max_trials} trials (auto_tuner.control.max_trials)")
        if control.max_time is not None and spent_seconds >= control.max_time:
            return Decision(None, f"{control.max_time:g} s (auto_tuner.control.max_time)")
        layout, reason = self._choose(is_cheap)
        if layout is not None:
            return Decision(layout)
        if (layout := self._choose_repeat()) is not None:
            return Decision(layout, is_repeat=True)
        return Decision(None, reason)

    def _choose(self, is_cheap: Callable[[Layout], bool]) -> tuple[Layout | None, str]:
        """Return the most promising layout, or None with the reason why none is."""
        best, algo = self.fastest, self._tuner.algo
        if not self.remaining:
            return None, "every layout that fits was tried"
        if best is None:
            return self.remaining[0], ""
        if algo.name == "grid":
            return min(
                self.remaining,
                key=lambda layout: (not is_cheap(layout), self.expect(layout).seconds),
            ), ""
        prospects = self._compare(self.remaining, best.layout)
        probability = prospects.win_probability(algo.tolerance)
        if probability >= 1 - algo.certainty:
            return prospects.most_promising(
                lambda layout: _CHEAP_TRIAL if is_cheap(layout) else 1.0
            ), ""
        if algo.priority == "memory" and (layout := self._choose_smaller()) is not None:
            return layout, ""
        return None, (
            f"with a probability of {1 - probability:.0%}, none of the other "
            f"{len(self.remaining)} layouts is faster by {algo.tolerance:.0%}"
        )

    def _choose_smaller(self) -> Layout | None:
        """Return the layout with the least memory that is expected to be fast enough, if it takes
        less than the best one.
        """
        winner = self.winner
        assert winner is not None
        smaller = [
            layout
            for layout in self.remaining
            if layout.prediction.memory.bytes < winner.layout.prediction.memory.bytes
            and self.expect(layout).seconds <= self._slowest_allowed
        ]
        return min(smaller, key=lambda layout: layout.prediction.memory.bytes, default=None)

    def _choose_repeat(self) -> Layout | None:
        """Return the layout to measure again: the fastest one, and those that may be faster than
        it by the tolerance because of noise.
        """
        # A repeat that fails is not asked for again.
        failed = {setting_key(trial.setting) for trial in self.failures}
        once = [
            result.layout
            for result in self.results
            if result.state == MEASURED
            and result.timing.trials < _REPEATED_TRIALS
            and setting_key(result.layout.setting) not in failed
        ]
        best = self.fastest
        if best is None:
            return None
        if best.layout in once:
            return best.layout
        prospects = self._compare(once, best.layout)
        if prospects.win_probability(self._tuner.algo.tolerance) < 1 - self._tuner.algo.certainty:
            return None
        return prospects.most_promising()

    def _compare(self, layouts: Sequence[Layout], reference: Layout) -> Prospects:
        algo = self._tuner.algo
        return self.belief.compare(
            layouts, reference, min_gain=algo.tolerance, decisive_chance=1 - algo.certainty
        )

    def is_hopeless(self, timing: Timing) -> bool:
        """Return whether a running trial is slower than the best one, even if both intervals err
        in its favor.
        """
        best = self.fastest
        if best is None or self._tuner.algo.name == "grid":
            return False
        limit = best.timing.interval[1]
        if self._tuner.algo.priority == "memory":
            limit /= self._tuner.algo.min_speed
        return timing.interval[0] > limit

    def _describe_common_failure(self) -> str:
        """Return the failure of the first trials, if all failed alike but for memory."""
        first = self.trials[:_SAME_FAILURES]
        if len(first) < _SAME_FAILURES or any(t.state != FAILED for t in self.trials):
            return ""
        texts = {_FAILED_RANK.sub("", trial.failure) for trial in self.trials}
        if any(trial.ran_out_of_memory for trial in self.trials) or len(texts) > 1:
            return ""
        return f"all of the first {len(self.trials)} layouts failed in the same way"


def _observe(result: Result, trial_error: float) -> Observation:
    """Return the observation of a layout. Its error is that of its steps and of its trials."""
    timing = result.timing
    error = math.hypot(timing.error, trial_error / math.sqrt(timing.trials))
    return Observation(result.layout, timing.seconds, error)


def takes_at_least(setting: Any, other: Any) -> bool:
    """Return whether a layout takes at least the memory of another one, whatever the calculation
    says: it has larger micro-batches, or saves less, and is the same otherwise.
    """
    return setting[MICRO_BATCH] >= other[MICRO_BATCH] and all(
        value == other[name] or (name in SAVING_ARGUMENTS and value in (None, False, 0, NO_SHARD))
        for name, value in setting.items()
        if name != MICRO_BATCH
    )
