"""Summary of training sessions: statistics of each arm, and findings as sentences.

Shared by the tables, pages and files of ``flagscale bench training`` (:mod:`.output`, :mod:`.page`,
:mod:`.figures`). A session is one model trained under one network setting by all arms, the compared
ways to reduce gradients (:mod:`.arms`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby
from operator import attrgetter

from flagscale.bench.bootstrap import percentile_ratio
from flagscale.bench.statistics import Ratio, percentile
from flagscale.bench.training.arms import Arm
from flagscale.bench.training.byte_counts import RING_TOPOLOGY, describe_matrix, matrix_difference
from flagscale.bench.training.losses import (
    LossAgreement,
    common_loss,
    compare_losses,
    smooth,
    time_to_loss,
)
from flagscale.bench.training.results import NO_TRAFFIC, ArmResult, SessionResult, TailRatio

MIN_P99_STEPS = 300
"""Number of steps below which a 99th percentile is little more than the slowest step."""
_DIFFERENCE_THRESHOLD = 0.05
"""Smallest difference of byte matrices that proves that two arms communicate differently."""


@dataclass(frozen=True)
class ArmSummary:
    """One arm under one setting; times in seconds per step. Stored in the JSON result."""

    model: str
    setting: str
    arm: str
    told: str
    """The arm's backend and variables."""
    steps: int
    median: float
    p99: float
    compute: float | None
    """Median time without exposed communication; None if not measured."""
    exposed: float | None
    """Median time of exposed communication, see :class:`.Steps`; None if not measured."""
    communication: float | None
    """Median time in which gradients were being reduced; None if not measured."""
    slowdown: Ratio | None
    """Ratio of the median to the same arm's median without traffic."""
    slowdown_p99: Ratio | None
    """The same for the 99th percentile."""
    against: Ratio | None
    """Ratio of the median to that of the first arm of the session."""
    loss: float
    """Smoothed loss at the end."""
    to_loss: float | None
    """Seconds of training until the loss that all arms and settings reach."""
    replicas_equal: bool | None


@dataclass(frozen=True)
class ArmDifference:
    """Evidence that two arms of a session communicate differently."""

    first: str
    second: str
    share: float | None
    """Fraction of bytes that are sent between different pairs of ranks, or by datagrams instead of
    TCP messages; None if the bytes of one arm are not counted.
    """
    common_topology: str = ""
    """Topology of both arms if both are rings. Two rings in opposite directions have different
    bytes without being different algorithms.
    """

    @property
    def sentence(self) -> str:
        """The finding in a sentence."""
        pair = f"{self.first} and {self.second}"
        if self.share is None:
            return f"{pair}: bytes of one are not counted, nothing is shown"
        if self.common_topology:
            return f"{pair}: NOT shown to be different: both are {self.common_topology}"
        verdict = (
            "proved different"
            if self.share > _DIFFERENCE_THRESHOLD
            else "NOT shown to be different"
        )
        return (
            f"{pair}: {verdict}: {self.share:.0%} of bytes go between other pairs, or another way"
        )


def group_by_model(sessions: Sequence[SessionResult]) -> Iterator[tuple[str, list[SessionResult]]]:
    """Yield each model's title with its sessions."""
    for model, model_sessions in groupby(sessions, key=attrgetter("model")):
        yield model.title, list(model_sessions)


def summarize_arms(sessions: Sequence[SessionResult]) -> list[ArmSummary]:
    """Return the summary of every arm under every setting, for sessions of any models."""
    return [
        summary
        for _, model_sessions in group_by_model(sessions)
        for summary in _summarize_model(model_sessions)
    ]


def _summarize_model(sessions: Sequence[SessionResult]) -> Iterator[ArmSummary]:
    curves = {
        (session.setting, result.arm.name): smooth(result.steps.loss)
        for session in sessions
        for result in session.arms
    }
    target_loss = common_loss(list(curves.values()))
    without_traffic = next((session for session in sessions if session.setting == NO_TRAFFIC), None)
    for session in sessions:
        for result in session.arms:
            arm_without_traffic = None
            if without_traffic is not None and without_traffic is not session:
                arm_without_traffic = without_traffic.find_arm(result.arm.name)
            curve = curves[session.setting, result.arm.name]
            to_loss = (
                None
                if target_loss is None
                else time_to_loss(target_loss, curve, result.steps.seconds)
            )
            yield _summarize_arm(session, result, arm_without_traffic, curve[-1], to_loss)


def _summarize_arm(
    session: SessionResult,
    result: ArmResult,
    arm_without_traffic: ArmResult | None,
    loss: float,
    to_loss: float | None,
) -> ArmSummary:
    steps, first_arm = result.steps, session.arms[0]
    return ArmSummary(
        model=session.model.title,
        setting=session.setting,
        arm=result.arm.name,
        told=result.arm.description,
        steps=len(steps.seconds),
        median=percentile(steps.seconds, 50),
        p99=percentile(steps.seconds, 99),
        compute=_median(steps.compute),
        exposed=_median(steps.exposed),
        communication=_median(steps.communication),
        slowdown=_time_ratio(result, arm_without_traffic, 50) if arm_without_traffic else None,
        slowdown_p99=_time_ratio(result, arm_without_traffic, 99) if arm_without_traffic else None,
        against=_time_ratio(result, first_arm, 50) if result is not first_arm else None,
        loss=loss,
        to_loss=to_loss,
        replicas_equal=result.replicas_equal,
    )


def _median(values: Sequence[float]) -> float | None:
    return percentile(values, 50) if values else None


def _time_ratio(numerator: ArmResult, denominator: ArmResult, percent: float) -> Ratio:
    return percentile_ratio(
        numerator.steps.seconds, denominator.steps.seconds, numerator.steps.round, percent
    )


COLUMNS = (
    "model",
    "setting",
    "arm",
    "median s",
    "p99 s",
    "compute s",
    "exposed s",
    "summing s",
    "slowdown [95 %]",
    "against the first arm",
    "loss",
    "s to a loss",
)


def format_row(summary: ArmSummary) -> list[str]:
    """Return the cells of a summary for :data:`COLUMNS`."""
    return [
        summary.model,
        summary.setting,
        summary.arm,
        _format_number(summary.median),
        _format_number(summary.p99),
        _format_number(summary.compute),
        _format_number(summary.exposed),
        _format_number(summary.communication),
        _format_ratio(summary.slowdown),
        _format_ratio(summary.against),
        f"{summary.loss:.4g}",
        "-" if summary.to_loss is None else f"{summary.to_loss:.3g}",
    ]


def _format_number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _format_ratio(ratio: Ratio | None) -> str:
    """Format a ratio such as ``1.33 [1.21, 1.47]``; None is ``-``."""
    return "-" if ratio is None else f"{ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"


def compare_arms(session: SessionResult) -> list[ArmDifference]:
    """Compare the communication of every two arms by the bytes between ranks, or by the algorithms
    in NCCL's log if bytes were not counted.
    """
    differences = []
    for first, second in combinations(session.arms, 2):
        share, topology = None, ""
        if first.sent and second.sent:
            share = matrix_difference(_split_by_transport(first), _split_by_transport(second))
            topologies = {describe_matrix(first.sent), describe_matrix(second.sent)}
            same_transport = bool(first.datagrams) == bool(second.datagrams)
            topology = RING_TOPOLOGY if topologies == {RING_TOPOLOGY} and same_transport else ""
        elif first.algorithms and second.algorithms:
            names = sorted({*first.algorithms, *second.algorithms})
            counts = ([[arm.algorithms.get(n, 0) for n in names]] for arm in (first, second))
            share = matrix_difference(*counts)
        differences.append(ArmDifference(first.arm.name, second.arm.name, share, topology))
    return differences


def _split_by_transport(result: ArmResult) -> list[tuple[int, ...]]:
    """Return the byte matrix of an arm's TCP messages, followed by the rows of its datagrams'."""
    datagrams = result.datagrams or tuple(tuple(0 for _ in row) for row in result.sent)
    rows = zip(result.sent, datagrams, strict=True)
    messages = [tuple(a - b for a, b in zip(*row, strict=True)) for row in rows]
    return [*messages, *datagrams]


def describe_communication(result: ArmResult) -> str:
    """Describe an arm's topology and bytes with the source of the counts, and the algorithms in its
    log.
    """
    parts = []
    if result.sent:
        total_mib = sum(map(sum, result.sent)) / 2**20
        datagram_mib = sum(map(sum, result.datagrams)) / 2**20
        datagram_text = f", {datagram_mib:.1f} of them by datagrams" if datagram_mib else ""
        amount = f"{total_mib:.1f} MiB in all{datagram_text}, counted by {result.counted_by}"
        parts.append(f"{describe_matrix(result.sent)}; {amount}")
    if result.algorithms:
        counts = ", ".join(f"{name} {count} times" for name, count in result.algorithms.items())
        parts.append(f"its log: {counts}")
    if result.last_algorithm:
        parts.append(f"its last algorithm: {result.last_algorithm}")
    if result.tail:
        statistics = ", ".join(f"{name} {value:g}" for name, value in result.tail.items())
        parts.append(f"its bounded sums: {statistics}")
    return "; ".join(parts) or "its bytes are not counted, neither by the kernel nor by itself"


def compare_arm_losses(session: SessionResult) -> list[tuple[Arm, Arm, LossAgreement]]:
    """Compare every arm's losses with those of the first exact arm.

    Returns:
        The arm, the first exact arm, and their agreement, for every arm but the latter.
    """
    reference = next((result for result in session.arms if result.arm.exact), None)
    if reference is None:
        return []
    losses = _all_losses(reference)
    return [
        (result.arm, reference.arm, compare_losses(losses, _all_losses(result)))
        for result in session.arms
        if result is not reference
    ]


def _all_losses(result: ArmResult) -> list[float | None]:
    """Return the losses of all steps in their order, including those that do not count."""
    losses = {
        step: loss
        for part in (result.steps, result.settling)
        for step, loss in zip(part.step, part.loss, strict=True)
    }
    return [losses[step] for step in sorted(losses)]


def list_findings(session: SessionResult) -> list[str]:
    """Return sentences on the communication, losses, replicas and traffic of a session."""
    findings = [
        f"{result.arm.name} ({result.arm.description}): {describe_communication(result)}"
        for result in session.arms
    ]
    findings += [difference.sentence for difference in compare_arms(session)]
    for arm, reference, agreement in compare_arm_losses(session):
        verdict = (
            "agree" if agreement.is_acceptable else ("do NOT agree" if arm.exact else "differ")
        )
        findings.append(
            f"losses of {arm.name} and {reference.name} {verdict}: {agreement.early:.1e} at most "
            f"in the first steps, {agreement.late:.2%} at the end, where chance makes "
            f"{agreement.noise:.2%}"
        )
    for result in session.arms:
        if result.replicas_equal is False:
            findings.append(f"{result.arm.name}: the ranks ended with DIFFERENT replicas")
    if all(result.replicas_equal for result in session.arms):
        findings.append("all ranks of every arm ended with the same bits")
    if session.before is not None and session.after is not None:
        target = f"{session.target:g} ± {session.tolerance:g} was meant; " if session.target else ""
        findings.append(
            f"the probe's p99/p50: {target}{_describe_tail(session, session.before)} before the "
            f"ranks began, {_describe_tail(session, session.after)} when they had ended"
        )
    return findings


def _describe_tail(session: SessionResult, tail: TailRatio) -> str:
    verdict = f", {tail.verdict(session.target, session.tolerance)}" if session.target else ""
    return f"{tail.ratio:.2f} [{tail.low:.2f}, {tail.high:.2f}]{verdict}"


def is_valid(session: SessionResult) -> bool:
    """Return whether a session's times can be trusted: exact arms agree, and replicas are equal."""
    losses_agree = all(
        agreement.is_acceptable for arm, _, agreement in compare_arm_losses(session) if arm.exact
    )
    return losses_agree and all(result.replicas_equal is not False for result in session.arms)
