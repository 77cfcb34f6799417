"""Plans that ``flagscale bench training`` sends to its processes. Imports no torch.

:class:`SessionPlan` is for the ranks of a session (:mod:`.session`), one model under one network
setting. Each rank starts a process per arm with an :class:`ArmPlan` (:mod:`.worker`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from flagscale.bench.placement import Placement
from flagscale.bench.training.arms import Arm
from flagscale.bench.training.models.names import ModelChoice
from flagscale.bench.training.schedule import Block, schedule_blocks
from flagscale.errors import ConfigError
from flagscale.records import WRITTEN_BY_RANK


@dataclass(frozen=True)
class TrainingOptions:
    """Numbers of steps, and data, which are the same for every arm."""

    steps: int = 100
    """Counted steps of each arm."""
    block: int = 10
    """Steps of a turn."""
    warmup: int = 5
    """Uncounted steps of each arm before its first turn."""
    settle: int = 1
    """Steps at the start of every turn that are trained but do not count."""
    batch: int = 4
    """Samples per rank and step."""
    sequence: int | None = None
    """Tokens of a sample; None: the default of the model's size."""
    bucket_mb: float = 25.0
    """Size of DistributedDataParallel's gradient buckets in MiB."""
    seed: int = 0


@dataclass(frozen=True)
class SessionPlan:
    """Plan of a session: one model under one setting of the network."""

    model: ModelChoice
    setting: str
    arms: tuple[Arm, ...]
    training: TrainingOptions
    placement: Placement
    comm: tuple[str, ...] = ()
    """Options of backends, as on the command line."""
    quiet: bool = False
    result: Path = field(default=Path("result.json"), metadata=WRITTEN_BY_RANK)
    """File for rank 0's :class:`.SessionResult`."""

    def check(self, ranks: int) -> None:
        """Refuse a session of one rank.

        Raises:
            ConfigError: there is one rank, with no peer to reduce with.
        """
        if ranks < 2:
            raise ConfigError("-r 1: one rank has nobody to sum gradients with; expected 2 or more")

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks of steps of all arms, in the order in which they run."""
        training = self.training
        return schedule_blocks(
            len(self.arms),
            steps=training.steps,
            block=training.block,
            warmup=training.warmup,
            seed=training.seed,
        )


@dataclass(frozen=True)
class ArmPlan:
    """Plan of one process of one arm."""

    arm: int
    """Index of the arm in ``session_plan.arms``."""
    session_plan: SessionPlan
    address: str
    """Address of the store that all processes of the session use."""
    port: int
    log: Path | None = None
    """File for NCCL's debug log."""
