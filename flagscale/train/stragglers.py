"""Detection of stragglers: ranks that need longer for their own work than equal ranks, and make
those wait.

Working time is the time of a step without waiting for others. Equal ranks do the same work on the
same kind of device. Times are collected over windows of at least :data:`WINDOW_SECONDS` and
:data:`MIN_STEPS` measured steps. The excess of a rank in a window is the fraction by which it works
longer than the median of the other equal ranks. It is taken of the mean and of the median of the
steps, and both have to be large: single long steps change the mean alone. A window is slow if

- the excess is more than half of the threshold (in a small group, of less than
  :data:`.slow.MIN_COUNT` ranks, whose noise is not known: more than the threshold), and
- its cost is at least :data:`MIN_COST` of a step, see :attr:`Straggler.cost_seconds`.

A rank is a straggler after n slow windows in a row, n >= :data:`CONFIRMING_WINDOWS` (in a small
group: :data:`CONFIRMING_WINDOWS_OF_FEW`), if the mean of their excesses is more than the threshold
and more than

    L * sqrt(CONFIRMING_WINDOWS / n)

L is the mean noise limit of the last :data:`_NOISE_WINDOWS` windows, 3.5 standard deviations of one
window (:mod:`flagscale.health.slow`). The noise of a mean of n windows is smaller by sqrt(n); the
factor makes that 6 of its standard deviations, because an hour has many windows and many ranks.

It is a straggler until the mean excess of the last :data:`CONFIRMING_WINDOWS` windows (in a small
group: :data:`CONFIRMING_WINDOWS_OF_FEW`) is within the threshold or L / 3, two standard deviations
of this mean. The first report, which contains warm-up, is left out. This module does not import
torch.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from flagscale.health.slow import MIN_COUNT, noise_limit
from flagscale.train.section_times import SECTIONS, WAITING, SectionTimes

WINDOW_SECONDS = 10.0
"""Minimum duration of a window."""
MIN_STEPS = 5
"""Minimum number of measured steps of each rank in a window."""
CONFIRMING_WINDOWS = 3
"""Smallest number of consecutive slow windows of a straggler."""
CONFIRMING_WINDOWS_OF_FEW = 8
"""The same in a small group."""
_MOST_WINDOWS = 9
"""Largest number n of slow windows: the last ones count."""
_NOISE_WINDOWS = 18
MIN_COST = 0.01
"""Smallest cost of a straggler, as a fraction of a step."""
_MAX_LISTED_RANKS = 8


class RankPlace(NamedTuple):
    """Host of a rank, and a description of its work, which ranks of equal work share."""

    host: str
    work: str


@dataclass(frozen=True)
class Straggler:
    """Rank that works longer than equal ranks, in one window or in the mean of several."""

    rank: int
    host: str
    work_seconds: float
    usual_seconds: float
    """Median of the working times of the equal ranks."""
    equal_ranks: int
    section: str
    """Section with the largest difference."""
    cost_seconds: float
    """Time of a step in which the equal ranks wait for this one: its excess, but at most the median
    of their waiting times."""
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


_Pair = tuple[float, float]
"""Values by the median and by the mean of a window's steps."""


class _Window(NamedTuple):
    """Excess of a rank in a window, with the measured times if the window is slow."""

    excesses: _Pair
    slow: Straggler | None


class PeerTimes:
    """Times of at least two equal ranks."""

    def __init__(self, values: Iterable[float]) -> None:
        self._sorted = sorted(values)

    def median_without(self, value: float) -> float:
        """Return the median of the times without one that equals ``value``."""
        index = bisect_left(self._sorted, value)
        count = len(self._sorted) - 1
        lower, upper = (count - 1) // 2, count // 2
        return (self._sorted[lower + (lower >= index)] + self._sorted[upper + (upper >= index)]) / 2

    def excess_of(self, value: float) -> float:
        """Return the fraction by which a time is longer than the median of the others."""
        usual = self.median_without(value)
        return value / usual - 1 if usual > 0 else 0.0

    @property
    def noise_limit(self) -> float:
        """Largest usual excess; 0 if there are too few values."""
        is_known = len(self._sorted) >= MIN_COUNT and statistics.median(self._sorted) > 0
        return noise_limit(self._sorted) if is_known else 0.0


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


class _Group:
    """Ranks of equal work, and the noise of the last windows."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = ranks
        self.noise_limits: deque[_Pair] = deque(maxlen=_NOISE_WINDOWS)

    @property
    def is_small(self) -> bool:
        """True if the noise of so few ranks is not known."""
        return len(self.ranks) < MIN_COUNT

    @property
    def confirming_windows(self) -> int:
        """Smallest number of consecutive windows that decide about a rank."""
        return CONFIRMING_WINDOWS_OF_FEW if self.is_small else CONFIRMING_WINDOWS


class StragglerDetector:
    """Compares ranks by their times of successive reports."""

    def __init__(self, places: Sequence[RankPlace], threshold: float) -> None:
        """Prepare for ranks of these places.

        Args:
            places: place of each rank.
            threshold: ratio of working times, above 1, above which a rank may be a straggler.
        """
        self._places = places
        self._least_excess = threshold - 1
        groups: dict[str, list[int]] = defaultdict(list)
        for rank, place in enumerate(places):
            groups[place.work].append(rank)
        self._groups = [_Group(ranks) for ranks in groups.values() if len(ranks) > 1]
        self._window: list[Mapping[int, SectionTimes]] = []
        self._window_start: float | None = None
        self._slow_windows: dict[int, list[_Window]] = {}
        """The last consecutive slow windows of each rank."""
        self._last_windows: dict[int, list[_Window]] = {}
        """The last windows of each straggler since it was named."""
        self._stragglers: dict[int, Straggler] = {}

    @property
    def has_equal_ranks(self) -> bool:
        """True if any ranks can be compared."""
        return bool(self._groups)

    @property
    def cost(self) -> float:
        """Fraction of a step that the stragglers cost: the largest of all."""
        return max((straggler.cost for straggler in self._stragglers.values()), default=0.0)

    def add_report(
        self, times: Sequence[SectionTimes | None], now: float
    ) -> StragglerUpdate | None:
        """Add the times of all ranks since the last report; return a change, if there is one.

        Args:
            times: times of each rank; None if it has measured no step.
            now: seconds of a monotonic clock.
        """
        if not self._groups:
            return None
        if self._window_start is None:  # the first report
            self._window_start = now
            return None
        self._window.append({rank: item for rank, item in enumerate(times) if item is not None})
        ranks = [rank for group in self._groups for rank in group.ranks]
        steps = (sum(row[rank].steps for row in self._window if rank in row) for rank in ranks)
        if now - self._window_start < WINDOW_SECONDS or min(steps, default=0) < MIN_STEPS:
            return None
        window, self._window, self._window_start = self._window, [], now
        windows = {
            rank: item for group in self._groups for rank, item in self._judge(group, window)
        }
        return self._update(windows)

    def _judge(
        self, group: _Group, window: Sequence[Mapping[int, SectionTimes]]
    ) -> Iterator[tuple[int, _Window]]:
        """Yield the window of each rank of a group."""
        times = {
            rank: _average([row[rank] for row in window if rank in row]) for rank in group.ranks
        }
        medians = PeerTimes(item.work_seconds for item in times.values())
        means = PeerTimes(item.mean_work_seconds for item in times.values())
        waiting = PeerTimes(item.seconds[WAITING] for item in times.values())
        usual_sections = median_sections(list(times.values()))
        group.noise_limits.append((medians.noise_limit, means.noise_limit))
        least = self._least_excess if group.is_small else self._least_excess / 2
        for rank, item in times.items():
            excesses = (
                medians.excess_of(item.work_seconds),
                means.excess_of(item.mean_work_seconds),
            )
            if min(excesses) <= least:
                yield rank, _Window(excesses, None)
                continue
            usual = medians.median_without(item.work_seconds)
            straggler = Straggler(
                rank=rank,
                host=self._places[rank].host,
                work_seconds=item.work_seconds,
                usual_seconds=usual,
                equal_ranks=len(times) - 1,
                section=_find_slow_section(item, usual_sections),
                cost_seconds=min(
                    item.work_seconds - usual, waiting.median_without(item.seconds[WAITING])
                ),
                step_seconds=item.step_seconds,
            )
            yield rank, _Window(excesses, straggler if straggler.cost >= MIN_COST else None)

    def _update(self, windows: Mapping[int, _Window]) -> StragglerUpdate | None:
        before = set(self._stragglers)
        for group in self._groups:
            for rank in group.ranks:
                self._update_rank(rank, windows[rank], group)
        current = set(self._stragglers)
        if current == before:
            return None
        new = [self._stragglers[rank] for rank in sorted(current - before)]
        return StragglerUpdate(
            tuple(self._stragglers[rank] for rank in sorted(current)),
            tuple(_describe_stragglers(new)),
            tuple(self._describe_recovered(sorted(before - current))),
        )

    def _update_rank(self, rank: int, window: _Window, group: _Group) -> None:
        count = group.confirming_windows
        if window.slow is None:
            self._slow_windows.pop(rank, None)
        else:
            slow_windows = [*self._slow_windows.get(rank, ()), window]
            self._slow_windows[rank] = slow_windows[-_MOST_WINDOWS:]
        if rank in self._stragglers:
            last_windows = [*self._last_windows.get(rank, ()), window][-count:]
            self._last_windows[rank] = last_windows
            if len(last_windows) == count and not self._exceed(last_windows, group, 1 / 3):
                del self._stragglers[rank], self._last_windows[rank]
                self._slow_windows.pop(rank, None)
        slow_windows = self._slow_windows.get(rank, [])
        if len(slow_windows) >= count and self._exceed(
            slow_windows, group, math.sqrt(CONFIRMING_WINDOWS / len(slow_windows))
        ):
            self._stragglers[rank] = _combine([item.slow for item in slow_windows if item.slow])

    def _exceed(self, windows: Sequence[_Window], group: _Group, noise_factor: float) -> bool:
        """Return True if the mean excesses are more than the threshold, and more than the noise
        limits times a factor.
        """
        return all(
            statistics.fmean(excesses)
            > max(self._least_excess, noise_factor * statistics.fmean(limits))
            for excesses, limits in zip(
                zip(*(window.excesses for window in windows), strict=True),
                zip(*group.noise_limits, strict=True),
                strict=True,
            )
        )

    def _describe_recovered(self, ranks: Sequence[int]) -> Iterator[str]:
        hosts: dict[str, list[int]] = defaultdict(list)
        for rank in ranks:
            hosts[self._places[rank].host].append(rank)
        for host, members in hosts.items():
            verb = "works" if len(members) == 1 else "work"
            yield f"{_format_ranks(members)} ({host}) {verb} as fast as equal ranks again"


def _describe_stragglers(stragglers: Sequence[Straggler]) -> Iterator[str]:
    """Yield a sentence per host."""
    hosts: dict[str, list[Straggler]] = defaultdict(list)
    for straggler in stragglers:
        hosts[straggler.host].append(straggler)
    for host, members in hosts.items():
        worst = max(members, key=lambda straggler: straggler.excess)
        costliest = max(members, key=lambda straggler: straggler.cost)
        one = len(members) == 1
        yield (
            f"straggler: {_format_ranks([item.rank for item in members])} ({host}) "
            f"{'works' if one else 'work up to'} {worst.excess:.0%} longer in a step than "
            f"{worst.equal_ranks} equal rank{'s' * (worst.equal_ranks > 1)}, mostly in "
            f"{worst.section}; this costs all ranks {costliest.cost_seconds:.3g} s of a step "
            f"({costliest.cost:.0%})"
        )


def _format_ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    listed = ", ".join(map(str, ranks[:_MAX_LISTED_RANKS]))
    return f"ranks {listed}{' …' if len(ranks) > _MAX_LISTED_RANKS else ''}"


def _find_slow_section(times: SectionTimes, usual: Mapping[str, float]) -> str:
    def difference(section: str) -> float:
        return times.seconds[section] - usual[section]

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
