"""The results of sessions in numbers that tables, pages and files share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby
from operator import attrgetter

from flagscale.bench.training.arms import Arm
from flagscale.bench.training.results import NONE, ArmResult, Probed, SessionResult
from flagscale.bench.training.statistics import (
    RING,
    Agreement,
    agreement,
    block_ratio,
    common_loss,
    shape,
    smoothed,
    time_to,
    unlike,
)
from flagscale.sample_statistics import Ratio, percentile

FEW = 300
"""Below so many steps a 99th percentile is little more than the slowest."""
_SAME = 0.05
"""Arms whose tables of bytes differ by less are not shown to be two."""


@dataclass(frozen=True)
class Line:
    """One arm under one setting; times in seconds a step."""

    model: str
    setting: str
    arm: str
    told: str
    """What the arm is made of."""
    steps: int
    median: float
    p99: float
    compute: float | None
    """Median without exposed communication; None where it is not told, as of what follows."""
    exposed: float | None
    communication: float | None
    slowdown: Ratio | None
    """Of the median against no traffic."""
    slowdown_p99: Ratio | None
    against: Ratio | None
    """Of the median against the first arm of the same session."""
    loss: float
    """Smoothed, at the end."""
    to_loss: float | None
    """Seconds of training until the loss that all arms and settings reach."""
    replicas_equal: bool | None


@dataclass(frozen=True)
class Pair:
    """Whether two arms of a session are shown to be two; ``unlike`` is a share of bytes, of which
    messages and datagrams count as two ways."""

    one: str
    other: str
    unlike: float | None
    """None where the bytes of one are not counted."""
    shape: str = ""
    """What both look like, where that is the same: rings may go round in either direction."""

    @property
    def told(self) -> str:
        """In a sentence."""
        if self.unlike is None:
            return f"{self.one} and {self.other}: bytes of one are not counted, nothing is shown"
        share = f"{self.unlike:.0%} of bytes go between other pairs, or another way"
        if self.shape:
            return f"{self.one} and {self.other}: NOT shown to be different: both are {self.shape}"
        verdict = "proved different" if self.unlike > _SAME else "NOT shown to be different"
        return f"{self.one} and {self.other}: {verdict}: {share}"


def by_model(sessions: Sequence[SessionResult]) -> Iterator[tuple[str, list[SessionResult]]]:
    """The sessions of each model, by what tables call it."""
    for model, some in groupby(sessions, key=attrgetter("model")):
        yield model.title, list(some)


def lines(sessions: Sequence[SessionResult]) -> list[Line]:
    """Every arm under every setting, of the sessions of any models."""
    return [line for _, some in by_model(sessions) for line in _of_model(some)]


def _of_model(sessions: Sequence[SessionResult]) -> Iterator[Line]:
    curves = {
        (session.setting, one.arm.name): smoothed(one.steps.loss)
        for session in sessions
        for one in session.arms
    }
    target = common_loss(list(curves.values()))
    quiet = next((session for session in sessions if session.setting == NONE), None)
    for session in sessions:
        for one in session.arms:
            control = quiet.arm(one.arm.name) if quiet not in (None, session) else None
            curve = curves[session.setting, one.arm.name]
            to_loss = None if target is None else time_to(target, curve, one.steps.seconds)
            yield _line(session, one, control, curve[-1], to_loss)


def _line(
    session: SessionResult,
    one: ArmResult,
    control: ArmResult | None,
    loss: float,
    to_loss: float | None,
) -> Line:
    steps, first = one.steps, session.arms[0]
    return Line(
        model=session.model.title,
        setting=session.setting,
        arm=one.arm.name,
        told=one.arm.told,
        steps=len(steps.seconds),
        median=percentile(steps.seconds, 50),
        p99=percentile(steps.seconds, 99),
        compute=_median(steps.compute),
        exposed=_median(steps.exposed),
        communication=_median(steps.communication),
        slowdown=_ratio(one, control, 50) if control else None,
        slowdown_p99=_ratio(one, control, 99) if control else None,
        against=_ratio(one, first, 50) if one is not first else None,
        loss=loss,
        to_loss=to_loss,
        replicas_equal=one.replicas_equal,
    )


def _median(values: Sequence[float]) -> float | None:
    return percentile(values, 50) if values else None


def _ratio(above: ArmResult, below: ArmResult, percent: float) -> Ratio:
    return block_ratio(above.steps.seconds, below.steps.seconds, above.steps.round, percent)


def interval(ratio: Ratio | None) -> str:
    """``1.33 [1.21, 1.47]``; ``-`` where there is none."""
    return "-" if ratio is None else f"{ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"


COLUMNS = (
    *("model", "setting", "arm", "median s", "p99 s", "compute s", "exposed s", "summing s"),
    *("slowdown [95 %]", "against the first arm", "loss", "s to a loss"),
)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def cells(line: Line) -> list[str]:
    """A line of results for :data:`COLUMNS`."""
    return [
        *(line.model, line.setting, line.arm),
        *map(_number, (line.median, line.p99, line.compute, line.exposed, line.communication)),
        interval(line.slowdown),
        interval(line.against),
        f"{line.loss:.4g}",
        "-" if line.to_loss is None else f"{line.to_loss:.3g}",
    ]


def pairs(session: SessionResult) -> list[Pair]:
    """Whether each two arms of a session are shown to be two. NCCL's log counts as well."""
    found = []
    for one, other in combinations(session.arms, 2):
        share, both = None, ""
        if one.sent and other.sent:
            share = unlike(_by_way(one), _by_way(other))
            shapes = {shape(one.sent), shape(other.sent)}
            alike = bool(one.datagrams) == bool(other.datagrams)
            both = RING if shapes == {RING} and alike else ""
        elif one.algorithms and other.algorithms:
            names = sorted({*one.algorithms, *other.algorithms})
            share = unlike(*([[arm.algorithms.get(n, 0) for n in names]] for arm in (one, other)))
        found.append(Pair(one.arm.name, other.arm.name, share, both))
    return found


def _by_way(one: ArmResult) -> list[tuple[int, ...]]:
    """An arm's table of bytes by messages, and below it that by datagrams."""
    none = tuple(tuple(0 for _ in row) for row in one.sent)
    datagrams = one.datagrams or none
    rows = zip(one.sent, datagrams, strict=True)
    messages = [tuple(a - b for a, b in zip(*row, strict=True)) for row in rows]
    return [*messages, *datagrams]


def sent(one: ArmResult) -> str:
    """What an arm's table of bytes looks like, by whose count; and what a library's log says."""
    words = []
    if one.sent:
        total = sum(map(sum, one.sent)) / 2**20
        way = sum(map(sum, one.datagrams)) / 2**20
        of_these = f", {way:.1f} of them by datagrams" if way else ""
        told = f"{total:.1f} MiB in all{of_these}, counted by {one.counted_by}"
        words.append(f"{shape(one.sent)}; {told}")
    if one.algorithms:
        chosen = ", ".join(f"{name} {count} times" for name, count in one.algorithms.items())
        words.append(f"its log: {chosen}")
    if one.last_algorithm:
        words.append(f"its last algorithm: {one.last_algorithm}")
    if one.tail:
        told = ", ".join(f"{name} {value:g}" for name, value in one.tail.items())
        words.append(f"its bounded sums: {told}")
    return "; ".join(words) or "its bytes are not counted, neither by the kernel nor by itself"


def agreements(session: SessionResult) -> list[tuple[Arm, Arm, Agreement]]:
    """How every arm's losses agree with those of the first exact one, which comes second."""
    first = next((one for one in session.arms if one.arm.exact), None)
    if first is None:
        return []
    losses = _all_losses(first)
    return [
        (one.arm, first.arm, agreement(losses, _all_losses(one)))
        for one in session.arms
        if one is not first
    ]


def _all_losses(one: ArmResult) -> list[float | None]:
    """Of steps that count and do not, as they were trained."""
    known = {
        step: loss
        for part in (one.steps, one.settling)
        for step, loss in zip(part.step, part.loss, strict=True)
    }
    return [known[step] for step in sorted(known)]


def findings(session: SessionResult) -> list[str]:
    """What a session proves or fails to: arms, losses, replicas."""
    told = [f"{one.arm.name} ({one.arm.told}): {sent(one)}" for one in session.arms]
    told += [pair.told for pair in pairs(session)]
    for arm, first, found in agreements(session):
        verdict = "agree" if found.holds else ("do NOT agree" if arm.exact else "differ")
        told.append(
            f"losses of {arm.name} and {first.name} {verdict}: {found.early:.1e} at most in the "
            f"first steps, {found.late:.2%} at the end, where chance makes {found.noise:.2%}"
        )
    for one in session.arms:
        if one.replicas_equal is False:
            told.append(f"{one.arm.name}: the ranks ended with UNLIKE replicas")
    if all(one.replicas_equal for one in session.arms):
        told.append("all ranks of every arm ended with the same bits")
    if session.before is not None and session.after is not None:
        meant = f"{session.target:g} ± {session.tolerance:g} was meant; " if session.target else ""
        told.append(
            f"the probe's p99/p50: {meant}{_probe(session, session.before)} before the ranks "
            f"began, {_probe(session, session.after)} when they had ended"
        )
    return told


def _probe(session: SessionResult, found: Probed) -> str:
    verdict = f", {found.verdict(session.target, session.tolerance)}" if session.target else ""
    return f"{found.ratio:.2f} [{found.low:.2f}, {found.high:.2f}]{verdict}"


def sound(session: SessionResult) -> bool:
    """Whether nothing was found that makes a session's times worthless."""
    agreed = all(found.holds for arm, _, found in agreements(session) if arm.exact)
    return agreed and all(one.replicas_equal is not False for one in session.arms)
