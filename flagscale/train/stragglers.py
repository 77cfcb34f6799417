"""Detection of stragglers: ranks that work longer in a step than equal ranks, which wait for them.

Working time is the time of a step without waiting for others. A rank is compared with the ranks
that do the same work on the same kind of device. Times are collected over windows of at least
:data:`WINDOW_SECONDS` and :data:`MIN_STEPS` measured steps. A rank is slow in a window if

- it works longer than the median of the equal ranks, by more than the threshold and by more than
  their noise (see :mod:`flagscale.health.slow`), both in the mean and in the median of its steps,
  so that neither single long steps nor a few usual ones decide, and
- the equal ranks wait for others meanwhile, by at least :data:`MIN_COST` of a step.

A rank is a straggler after :data:`CONFIRMING_WINDOWS` slow windows in a row (of fewer than four
equal ranks: :data:`CONFIRMING_WINDOWS_OF_FEW`), until as many windows in a row are not slow. The
first report, which contains warm-up, is left out. No torch here.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from flagscale.health.slow import MIN_COUNT, noise_limit
from flagscale.train.section_times import SECTIONS, WAITING, SectionTimes

WINDOW_SECONDS = 10.0
"""Minimum duration of a window."""
MIN_STEPS = 5
"""Minimum number of measured steps of each rank in a window."""
CONFIRMING_WINDOWS = 3
"""Number of consecutive windows that must agree."""
CONFIRMING_WINDOWS_OF_FEW = 8
"""The same for a rank with fewer than three equal ranks, whose noise is not known."""
MIN_COST = 0.01
"""Smallest cost of a straggler, as a fraction of a step."""
_MAX_LISTED_RANKS = 8


class RankPlace(NamedTuple):
    """Host of a rank, and a description of its work, which ranks of equal work share."""

    host: str
    work: str


@dataclass(frozen=True)
class Straggler:
    """Rank that works longer than equal ranks, by the mean of the windows that agree."""

    rank: int
    host: str
    work_seconds: float
    usual_seconds: float
    """Median of the working times of the equal ranks."""
    equal_ranks: int
    section: str
    """Section with the largest difference."""
    cost_seconds: float
    """Time of a step in which the equal ranks wait for this one."""
    step_seconds: float

    @property
    def excess(self) -> float:
        """Fraction by which it works longer."""
        return self.work_seconds / self.usual_seconds - 1

    @property
    def cost(self) -> float:
        """Cost as a fraction of a step."""
        return self.cost_seconds / self.step_seconds

    def to_fields(self) -> dict[str, str | int | float]:
        """Return the record of a status event."""
        return {
            "rank": self.rank,
            "host": self.host,
            "excess": round(self.excess, 3),
            "cost": round(self.cost, 3),
            "section": self.section,
        }


@dataclass(frozen=True)
class StragglerUpdate:
    """Change of the stragglers."""

    stragglers: tuple[Straggler, ...]
    """All current ones."""
    warnings: tuple[str, ...]
    """Sentences about the new ones."""
    notes: tuple[str, ...]
    """Sentences about ranks that are none any more."""

    @property
    def descriptions(self) -> list[str]:
        """Sentences about all current ones."""
        return list(_describe_stragglers(self.stragglers))


class StragglerDetector:
    """Compares ranks by their times of successive reports."""

    def __init__(self, places: Sequence[RankPlace], threshold: float) -> None:
        """Prepare for ranks of these places.

        Args:
            places: place of each rank.
            threshold: ratio of working times from which on a rank may be a straggler.
        """
        self._places = places
        self._threshold = threshold - 1
        groups: dict[str, list[int]] = defaultdict(list)
        for rank, place in enumerate(places):
            groups[place.work].append(rank)
        self._groups = [ranks for ranks in groups.values() if len(ranks) > 1]
        self._window: list[Mapping[int, SectionTimes]] = []
        self._window_start: float | None = None
        # Consecutive windows in which a rank was slow, and in which a straggler was not.
        self._slow_windows: dict[int, list[Straggler]] = {}
        self._usual_windows: dict[int, int] = {}
        self._stragglers: dict[int, Straggler] = {}

    @property
    def has_equal_ranks(self) -> bool:
        """True if any ranks can be compared."""
        return bool(self._groups)

    @property
    def cost(self) -> float:
        """Fraction of a step that the stragglers cost: that of the slowest one."""
        return max((straggler.cost for straggler in self._stragglers.values()), default=0.0)

    def add_report(
        self, times: Sequence[SectionTimes | None], now: float
    ) -> StragglerUpdate | None:
        """Add the times of all ranks since the last report; return a change, if there is one.

        Args:
            times: times of each rank; None if it has measured no step.
            now: seconds of a monotonic clock.
        """
        if self._window_start is None:  # the first report
            self._window_start = now
            return None
        self._window.append({rank: item for rank, item in enumerate(times) if item is not None})
        ranks = [rank for group in self._groups for rank in group]
        steps = (sum(row[rank].steps for row in self._window if rank in row) for rank in ranks)
        if now - self._window_start < WINDOW_SECONDS or min(steps, default=0) < MIN_STEPS:
            return None
        window, self._window, self._window_start = self._window, [], now
        slow = {item.rank: item for group in self._groups for item in self._judge(group, window)}
        return self._update(slow)

    def _judge(
        self, group: Sequence[int], window: Sequence[Mapping[int, SectionTimes]]
    ) -> Iterator[Straggler]:
        """Yield the ranks of a group that are slow in a window."""
        means = {rank: _average([row[rank] for row in window if rank in row]) for rank in group}
        for rank, times in means.items():
            equal = [item for other, item in means.items() if other != rank]
            usual = statistics.median(item.work_seconds for item in equal)
            excess_seconds = times.work_seconds - usual
            if not (
                self._exceeds(times.work_seconds, [item.work_seconds for item in equal])
                and self._exceeds(
                    times.mean_work_seconds, [item.mean_work_seconds for item in equal]
                )
            ):
                continue
            waiting = statistics.median(item.seconds[WAITING] for item in equal)
            straggler = Straggler(
                rank=rank,
                host=self._places[rank].host,
                work_seconds=times.work_seconds,
                usual_seconds=usual,
                equal_ranks=len(equal),
                section=_find_slow_section(times, equal),
                cost_seconds=min(excess_seconds, waiting),
                step_seconds=times.step_seconds,
            )
            if straggler.cost >= MIN_COST:
                yield straggler

    def _exceeds(self, seconds: float, equal: Sequence[float]) -> bool:
        usual = statistics.median(equal)
        return usual > 0 and seconds / usual - 1 > max(self._threshold, noise_limit(equal))

    def _update(self, slow: Mapping[int, Straggler]) -> StragglerUpdate | None:
        self._slow_windows = {
            rank: [*self._slow_windows.get(rank, ()), item][-_count_windows(item) :]
            for rank, item in slow.items()
        }
        self._usual_windows = {
            rank: 0 if rank in slow else self._usual_windows.get(rank, 0) + 1
            for rank in self._stragglers
        }
        before = set(self._stragglers)
        for rank, count in self._usual_windows.items():
            if count >= _count_windows(self._stragglers[rank]):
                del self._stragglers[rank]
        for rank, windows in self._slow_windows.items():
            if len(windows) >= _count_windows(windows[-1]):
                self._stragglers[rank] = _combine(windows)
        current = set(self._stragglers)
        if current == before:
            return None
        new = [self._stragglers[rank] for rank in sorted(current - before)]
        return StragglerUpdate(
            tuple(self._stragglers[rank] for rank in sorted(current)),
            tuple(_describe_stragglers(new)),
            tuple(self._describe_recovered(sorted(before - current))),
        )

    def _describe_recovered(self, ranks: Sequence[int]) -> Iterator[str]:
        hosts: dict[str, list[int]] = defaultdict(list)
        for rank in ranks:
            hosts[self._places[rank].host].append(rank)
        for host, members in hosts.items():
            verb = "works" if len(members) == 1 else "work"
            yield f"{_format_ranks(members)} ({host}) {verb} as fast as equal ranks again"


def _count_windows(straggler: Straggler) -> int:
    """Return the number of windows that must agree on a rank."""
    is_few = straggler.equal_ranks + 1 < MIN_COUNT
    return CONFIRMING_WINDOWS_OF_FEW if is_few else CONFIRMING_WINDOWS


def _describe_stragglers(stragglers: Sequence[Straggler]) -> Iterator[str]:
    """Yield a sentence per host."""
    hosts: dict[str, list[Straggler]] = defaultdict(list)
    for straggler in stragglers:
        hosts[straggler.host].append(straggler)
    for host, members in hosts.items():
        worst = max(members, key=lambda straggler: straggler.cost)
        one = len(members) == 1
        yield (
            f"straggler: {_format_ranks([item.rank for item in members])} ({host}) "
            f"{'works' if one else 'work up to'} {worst.excess:.0%} longer in a step than "
            f"{worst.equal_ranks} equal rank{'s' * (worst.equal_ranks > 1)}, mostly in "
            f"{worst.section}; this costs all ranks {worst.cost_seconds:.3g} s of a step "
            f"({worst.cost:.0%})"
        )


def _format_ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    listed = ", ".join(map(str, ranks[:_MAX_LISTED_RANKS]))
    return f"ranks {listed}{' …' if len(ranks) > _MAX_LISTED_RANKS else ''}"


def _find_slow_section(times: SectionTimes, equal: Sequence[SectionTimes]) -> str:
    def difference(section: str) -> float:
        usual = statistics.median(item.seconds[section] for item in equal)
        return times.seconds[section] - usual

    return max((name for name in SECTIONS if name != WAITING), key=difference)


def _average(times: Sequence[SectionTimes]) -> SectionTimes:
    """Return the mean sections, and the median of the working times, of several reports."""
    steps = sum(item.steps for item in times)
    return SectionTimes(
        steps,
        {name: sum(item.seconds[name] * item.steps for item in times) / steps for name in SECTIONS},
        statistics.median(item.work_seconds for item in times),
    )


def _combine(windows: Sequence[Straggler]) -> Straggler:
    """Return the mean of a rank's windows, with the section of the last one."""

    def mean(name: str) -> float:
        return statistics.fmean(getattr(window, name) for window in windows)

    return replace(
        windows[-1],
        work_seconds=mean("work_seconds"),
        usual_seconds=mean("usual_seconds"),
        cost_seconds=mean("cost_seconds"),
        step_seconds=mean("step_seconds"),
    )


def median_sections(times: Sequence[SectionTimes | None]) -> dict[str, float]:
    """Return the median over the ranks of each section, in seconds; empty without measurements."""
    measured = [item for item in times if item is not None]
    if not measured:
        return {}
    return {name: statistics.median(item.seconds[name] for item in measured) for name in SECTIONS}
