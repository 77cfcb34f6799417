"""Detection of stragglers from the times that ranks report."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flagscale.train.section_times import (
    BACKWARD,
    DATA,
    FORWARD,
    OTHER,
    SECTIONS,
    WAITING,
    SectionTimes,
)
from flagscale.train.stragglers import (
    CONFIRMING_WINDOWS,
    CONFIRMING_WINDOWS_OF_FEW,
    WINDOW_SECONDS,
    PeerTimes,
    RankPlace,
    StragglerDetector,
    StragglerUpdate,
    median_sections,
)

STEP_WORK = {DATA: 0.01, FORWARD: 0.3, BACKWARD: 0.6, OTHER: 0.01}


def create_places(count: int, per_host: int = 1) -> list[RankPlace]:
    return [RankPlace(f"h{rank // per_host + 1:02}", "any") for rank in range(count)]


def create_report(
    factors: Sequence[float], section: str = FORWARD, *, sections: Mapping[str, float] = STEP_WORK
) -> list[SectionTimes]:
    """Return the times of ranks that each need ``factors`` of the usual working time.

    The difference is in ``section``. The faster ranks wait for the slowest one.
    """
    usual = sum(sections.values())
    longest = max(factors) * usual + 0.02
    times = []
    for factor in factors:
        seconds = {**dict.fromkeys(SECTIONS, 0.0), **sections}
        seconds[section] += (factor - 1) * usual
        seconds[WAITING] = longest - factor * usual
        times.append(SectionTimes(10, seconds, factor * usual))
    return times


def feed(
    detector: StragglerDetector,
    create: Callable[[], Sequence[SectionTimes | None]],
    windows: int,
    start: float = 0.0,
) -> list[StragglerUpdate]:
    """Feed the reports of some windows, two per window, and return the updates."""
    updates = []
    for number in range(2 * windows + (start == 0.0)):
        now = start + number * (WINDOW_SECONDS / 2 + 0.01)
        if (update := detector.add_report(create(), now)) is not None:
            updates.append(update)
    return updates


def test_slow_rank_is_named_with_host_section_and_cost() -> None:
    detector = StragglerDetector(create_places(8, per_host=2), 1.1)
    report = create_report([1, 1.01, 0.99, 1, 1, 1.25, 1, 1.02], BACKWARD)
    (update,) = feed(detector, lambda: report, CONFIRMING_WINDOWS)
    assert update.warnings == (
        "straggler: rank 5 (h03) works 25% longer in a step than 7 equal ranks, mostly in "
        "backward; this costs all ranks 0.23 s of a step (20%)",
    )
    assert [item.to_fields() for item in update.stragglers] == [
        {"rank": 5, "host": "h03", "excess": 0.25, "cost": 0.197, "section": "backward"}
    ]
    assert detector.cost == pytest.approx(0.197, abs=1e-3)


def test_ranks_of_a_host_are_one_sentence() -> None:
    detector = StragglerDetector(create_places(8, per_host=2), 1.1)
    report = create_report([1, 1, 1.3, 1.4, 1, 1, 1, 1], DATA)
    (update,) = feed(detector, lambda: report, CONFIRMING_WINDOWS)
    (warning,) = update.warnings
    assert warning.startswith("straggler: ranks 2, 3 (h02) work up to 40% longer in a step than 7")


def test_straggler_that_recovers_is_reported_once() -> None:
    detector = StragglerDetector(create_places(4), 1.1)
    slow = create_report([1, 1.3, 1, 1])
    usual = create_report([1, 1, 1, 1])
    assert len(feed(detector, lambda: slow, 6)) == 1
    (update,) = feed(detector, lambda: usual, 6, start=1000.0)
    assert (update.stragglers, update.warnings) == ((), ())
    assert update.notes == ("rank 1 (h02) works as fast as equal ranks again",)
    assert detector.cost == 0.0


def test_straggler_is_over_within_the_threshold() -> None:
    """A rank that needs less than the threshold is no straggler, but one of more stays one."""
    detector = StragglerDetector(create_places(8), 1.1)
    (named,) = feed(detector, lambda: create_report([1.25, *[1] * 7]), 3)
    assert [item.rank for item in named.stragglers] == [0]
    assert feed(detector, lambda: create_report([1.12, *[1] * 7]), 6, start=1000.0) == []
    (over,) = feed(detector, lambda: create_report([1.08, *[1] * 7]), 6, start=2000.0)
    assert over.stragglers == ()


@pytest.mark.parametrize(
    ("factors", "threshold"),
    [
        pytest.param([1, 1.08, 1, 1], 1.1, id="below-threshold"),
        pytest.param([1, 1.4, 1, 1], 1.5, id="below-own-threshold"),
        pytest.param([1, 1.3, 1.25, 0.8, 0.75, 1, 1.15, 0.9], 1.1, id="within-the-noise"),
        pytest.param([1, 0.5, 1, 1], 1.1, id="fast-rank"),
    ],
)
def test_no_straggler(factors: Sequence[float], threshold: float) -> None:
    detector = StragglerDetector(create_places(len(factors)), threshold)
    assert feed(detector, lambda: create_report(factors), 10) == []


def test_rank_for_which_no_other_waits_is_no_straggler() -> None:
    """Another rank, of other work, is what all wait for."""
    places = [*create_places(4), RankPlace("h05", "other work")]
    times = create_report([1, 1.3, 1, 1])
    longer = [
        SectionTimes(10, {**item.seconds, WAITING: 0.001 * (rank != 1)}, item.work_seconds)
        for rank, item in enumerate(times)
    ]
    detector = StragglerDetector(places, 1.1)
    assert feed(detector, lambda: [*longer, create_report([3])[0]], 10) == []


def test_single_windows_are_no_straggler() -> None:
    reports = [create_report([1, 1.5, 1, 1])] * 3 + [create_report([1, 1, 1, 1])] * 3
    detector = StragglerDetector(create_places(4), 1.1)
    iterator = iter(reports * 9)
    assert feed(detector, lambda: next(iterator), 24) == []


def test_slower_one_of_two_ranks_takes_more_windows() -> None:
    detector = StragglerDetector(create_places(2), 1.1)
    report = create_report([1, 1.2])
    (update,) = feed(detector, lambda: report, CONFIRMING_WINDOWS_OF_FEW)
    assert [item.rank for item in update.stragglers] == [1]
    detector = StragglerDetector(create_places(2), 1.1)
    assert feed(detector, lambda: report, CONFIRMING_WINDOWS_OF_FEW - 1) == []


def test_few_measured_steps_are_collected_into_longer_windows() -> None:
    report = [
        SectionTimes(1, item.seconds, item.work_seconds) for item in create_report([1, 1.5, 1, 1])
    ]
    detector = StragglerDetector(create_places(4), 1.1)
    times = [detector.add_report(report, 100.0 * number) for number in range(17)]
    # The first report is warm-up, five of one step are a window.
    assert [number for number, update in enumerate(times) if update] == [15]


def test_rank_without_equal_ranks_is_not_compared() -> None:
    detector = StragglerDetector([RankPlace("a", "stage 0"), RankPlace("b", "stage 1")], 1.1)
    assert not detector.has_equal_ranks


def test_report_without_measurements() -> None:
    detector = StragglerDetector(create_places(2), 1.1)
    assert feed(detector, lambda: [None, None], 10) == []
    assert median_sections([None]) == {}


@pytest.mark.parametrize("count", [2, 3, 8, 64])
def test_equal_ranks_of_a_busy_machine_cause_no_alarm(count: int) -> None:
    """Reports vary by 8 % (standard deviation) for each rank, and by 30 % together."""
    generator = random.Random(count)

    def create() -> list[SectionTimes]:
        load = generator.uniform(0.7, 1.3)
        factors = [load * max(0.5, generator.gauss(1, 0.08)) for _ in range(count)]
        return create_report(factors)

    detector = StragglerDetector(create_places(count), 1.1)
    assert feed(detector, create, 720) == []  # an hour


@pytest.mark.parametrize("seed", range(10))
def test_slow_rank_of_a_busy_machine_is_named(seed: int) -> None:
    """Windows vary by 6 % (standard deviation) for each rank; the rank needs 25 % more."""
    generator = random.Random(seed)

    def create(slow: float) -> list[SectionTimes]:
        return create_report([slow * max(0.5, generator.gauss(1, 0.08)), *draw(7)])

    def draw(count: int) -> list[float]:
        return [max(0.5, generator.gauss(1, 0.08)) for _ in range(count)]

    detector = StragglerDetector(create_places(8), 1.1)
    assert feed(detector, lambda: create(1.0), 18) == []
    updates = feed(detector, lambda: create(1.25), 12, start=1000.0)  # two minutes
    assert [item.rank for update in updates[:1] for item in update.stragglers] == [0]


@given(st.lists(st.floats(0, 1e3), min_size=2, max_size=40))
def test_median_of_the_others(values: list[float]) -> None:
    peers = PeerTimes(values)
    for index, value in enumerate(values):
        others = values[:index] + values[index + 1 :]
        assert peers.median_without(value) == pytest.approx(statistics.median(others))


def test_times_are_restored_from_a_row() -> None:
    (times,) = create_report([1.5])
    assert SectionTimes.from_row(times.to_row()) == times
    assert SectionTimes.from_row([0.0] * len(times.to_row())) is None
