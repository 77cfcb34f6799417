"""What trials leave: of each session, what every arm did in every step. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from flagscale.bench.training.arms import Arm

NONE = "none"
"""The setting without traffic."""


@dataclass(frozen=True)
class Trained:
    """What was trained: as it is typed, and as tables call it."""

    name: str
    title: str


@dataclass(frozen=True)
class Probed:
    """p99/p50 of the traffic's own probe, with its 95 % interval."""

    ratio: float
    low: float
    high: float

    def verdict(self, target: float, tolerance: float) -> str:
        """Whether that is the tail that was meant, in words: a short look may leave it open."""
        low, high = target - tolerance, target + tolerance
        if low <= self.ratio <= high:
            return "as meant"
        if self.high < low or self.low > high:
            return "NOT what was meant"
        return "not told apart from what was meant"


@dataclass(frozen=True)
class Steps:
    """Steps that count, one value each, in their order."""

    step: tuple[int, ...] = ()
    round: tuple[int, ...] = ()
    seconds: tuple[float, ...] = ()
    """Of the whole step: of the slowest rank."""
    exposed: tuple[float, ...] = ()
    """Of these, waiting for gradients to be summed with nothing left to compute: of the rank that
    waited least, for the others wait for that one's computing as well. Empty where nobody tells,
    as of an experiment's own program."""
    communication: tuple[float, ...] = ()
    """During which gradients were under way, hidden behind the backward pass or not; of the rank
    with least. Empty where the device does not tell."""
    loss: tuple[float | None, ...] = ()
    """Before the step, the mean over ranks; None where it is no number."""

    @property
    def compute(self) -> list[float]:
        """What is left of each step without the exposed communication; empty where that is."""
        if not self.exposed:
            return []
        return [whole - part for whole, part in zip(self.seconds, self.exposed, strict=True)]


@dataclass(frozen=True)
class ArmResult:
    """One arm in one session."""

    arm: Arm
    version: str
    """Of the backend."""
    steps: Steps
    settling: Steps
    """Steps that do not count: the first of a turn."""
    parameters: int
    buckets: tuple[int, ...]
    """Bytes of each gradient bucket."""
    replicas_equal: bool | None
    """Whether all ranks have ended with the same bits; None where nobody has looked."""
    sent: tuple[tuple[int, ...], ...] = ()
    """Bytes from rank to rank in the steps of counted rounds; empty where nothing counts them."""
    datagrams: tuple[tuple[int, ...], ...] = ()
    """How many of these by datagrams; empty where none."""
    counted_by: str = ""
    algorithms: dict[str, int] = field(default_factory=dict)
    """What the library's own log says it chose, and how often."""
    last_algorithm: str = ""
    """What the backend says of its last operation; empty where it does not tell."""
    tail: dict[str, float] = field(default_factory=dict)
    """The statistics of bounded sums, added up over ranks."""


@dataclass(frozen=True)
class SessionResult:
    """One model under one setting of the network."""

    model: Trained
    setting: str
    ranks: int
    device: str
    hosts: tuple[str, ...]
    """Of each rank."""
    arms: tuple[ArmResult, ...]
    before: Probed | None = None
    """What the traffic's probe found before the ranks began, where there was traffic."""
    after: Probed | None = None
    """And when they had ended."""
    target: float | None = None
    """The p99/p50 that the traffic was calibrated for; None where it was not, or is elsewhere."""
    tolerance: float = 0.0

    def arm(self, name: str) -> ArmResult | None:
        """What the arm of this name did."""
        return next((one for one in self.arms if one.arm.name == name), None)
