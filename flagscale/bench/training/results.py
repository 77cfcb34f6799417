"""Results of training sessions: every step of every arm. Stored as JSON. Imports no torch.

A session is one model trained under one network setting; its arms are the compared ways to reduce
gradients (:mod:`.arms`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from flagscale.bench.training.arms import Arm

NO_TRAFFIC = "none"
"""Label of the setting without traffic."""


@dataclass(frozen=True)
class TrainingSubject:
    """The trained model, by its name on the command line and in tables."""

    name: str
    title: str


@dataclass(frozen=True)
class TailRatio:
    """Tail ratio p99/p50 of the traffic's probe (:mod:`flagscale.bench.traffic`), with its 95 %
    interval.
    """

    ratio: float
    low: float
    high: float

    def verdict(self, target: float, tolerance: float) -> str:
        """Return a phrase that compares the ratio with ``target`` ± ``tolerance``. With a wide
        interval the result may be undecided.
        """
        low, high = target - tolerance, target + tolerance
        if low <= self.ratio <= high:
            return "as meant"
        if self.high < low or self.low > high:
            return "NOT what was meant"
        return "not told apart from what was meant"


@dataclass(frozen=True)
class Steps:
    """Measurements of the steps that count, one value per step in their order."""

    step: tuple[int, ...] = ()
    round: tuple[int, ...] = ()
    seconds: tuple[float, ...] = ()
    """Duration of the whole step on the slowest rank."""
    exposed: tuple[float, ...] = ()
    """Exposed communication: time in which nothing was left to compute while gradients were
    reduced. It is that of the rank which waited least, because the others also wait for that rank's
    computation. Empty if not measured, as for an experiment's own program.
    """
    communication: tuple[float, ...] = ()
    """Time in which gradients were being reduced, whether hidden behind the backward pass or not,
    on the rank with the least. Empty if the device does not report it.
    """
    loss: tuple[float | None, ...] = ()
    """Loss before the step, mean over ranks; None if it is not finite."""

    @property
    def compute(self) -> list[float]:
        """Duration of each step without its exposed communication; empty if that is not
        measured."""
        if not self.exposed:
            return []
        return [
            seconds - exposed_seconds
            for seconds, exposed_seconds in zip(self.seconds, self.exposed, strict=True)
        ]


@dataclass(frozen=True)
class ArmResult:
    """Result of one arm in one session."""

    arm: Arm
    version: str
    """Version of the backend."""
    steps: Steps
    settling: Steps
    """Steps that do not count: the first of each turn."""
    parameters: int
    buckets: tuple[int, ...]
    """Size of each gradient bucket in bytes."""
    replicas_equal: bool | None
    """True if all ranks ended with the same bits; None if not checked."""
    sent: tuple[tuple[int, ...], ...] = ()
    """Bytes from rank to rank in the steps of counted rounds; empty if not counted."""
    datagrams: tuple[tuple[int, ...], ...] = ()
    """Part of these bytes that was sent in datagrams; empty if none."""
    counted_by: str = ""
    algorithms: dict[str, int] = field(default_factory=dict)
    """Algorithms that the library's log reports, with their counts."""
    last_algorithm: str = ""
    """Algorithm of the last operation as the backend reports it; empty if it does not."""
    tail: dict[str, float] = field(default_factory=dict)
    """Statistics of bounded all_reduces, summed over ranks."""


@dataclass(frozen=True)
class SessionResult:
    """Result of one model under one setting of the network."""

    model: TrainingSubject
    setting: str
    ranks: int
    device: str
    hosts: tuple[str, ...]
    """Host of each rank."""
    arms: tuple[ArmResult, ...]
    before: TailRatio | None = None
    """Tail ratio before the ranks started, if there was traffic."""
    after: TailRatio | None = None
    """Tail ratio after they had ended."""
    target: float | None = None
    """Tail ratio that the traffic was calibrated for; None if it was not, or is on another network.
    """
    tolerance: float = 0.0

    def find_arm(self, name: str) -> ArmResult | None:
        """Return the result of the arm with this name; None if there is none."""
        return next((result for result in self.arms if result.arm.name == name), None)
