"""What trials amount to: the plan that ranks get, and that of one arm's process. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from flagscale.bench.placement import Placement
from flagscale.bench.training.arms import Arm
from flagscale.bench.training.models.names import Choice
from flagscale.bench.training.schedule import Block, blocks
from flagscale.errors import ConfigError
from flagscale.records import WRITTEN


@dataclass(frozen=True)
class Training:
    """How long and on what every arm trains."""

    steps: int = 100
    block: int = 10
    """Steps of a turn."""
    warmup: int = 5
    settle: int = 1
    """The first steps of every turn, which are trained and do not count."""
    batch: int = 4
    """Samples of a rank and step."""
    sequence: int | None = None
    """Tokens of a sample; None: the model's size says it."""
    bucket_mb: float = 25.0
    """Of DistributedDataParallel's gradient buckets, MiB."""
    seed: int = 0


@dataclass(frozen=True)
class SessionPlan:
    """One model under one setting: what the ranks of a session do."""

    model: Choice
    setting: str
    arms: tuple[Arm, ...]
    training: Training
    placement: Placement
    comm: tuple[str, ...] = ()
    """Options of backends, as they were given."""
    quiet: bool = False
    result: Path = field(default=Path("result.json"), metadata=WRITTEN)
    """Where rank 0 leaves a :class:`.SessionResult`."""

    def check(self, ranks: int) -> None:
        """Refuse numbers of ranks that say nothing.

        Raises:
            ConfigError: there is one rank, which has nobody to sum with.
        """
        if ranks < 2:
            raise ConfigError("-r 1: one rank has nobody to sum gradients with; expected 2 or more")

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The turns of all arms."""
        t = self.training
        return blocks(len(self.arms), steps=t.steps, block=t.block, warmup=t.warmup, seed=t.seed)


@dataclass(frozen=True)
class ArmPlan:
    """What one process of one arm does."""

    arm: int
    of: SessionPlan
    address: str
    """Of the store at which all processes of the session meet."""
    port: int
    log: Path | None = None
    """Where NCCL writes what it does."""
