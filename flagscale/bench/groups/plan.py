"""What a measurement of the creation of groups consists of."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from flagscale.bench.codec import WRITTEN
from flagscale.bench.placement import Placement
from flagscale.errors import ConfigError

Variant = Literal["bound", "cold", "warm", "split"]
VARIANTS: tuple[Variant, ...] = ("bound", "cold", "warm", "split")
ON_ACCELERATORS: tuple[Variant, ...] = ("bound", "split")
"""Those that have a meaning on accelerators alone: only these can be bound."""


@dataclass(frozen=True)
class GroupsPlan:
    """What is measured."""

    variants: tuple[Variant, ...]
    counts: tuple[int, ...]
    repeats: int
    members: int | None
    placement: Placement
    comm: tuple[str, ...] = ()
    """The backend's options, as they were given."""
    json: Path | None = field(default=None, metadata=WRITTEN)

    def check(self, ranks: int) -> None:
        """Refuse groups of more ranks than there are.

        Raises:
            ConfigError: they are.
        """
        if self.members is not None and not 1 <= self.members <= ranks:
            raise ConfigError(f"--members {self.members}; expected 1 to {ranks}")


@dataclass(frozen=True)
class TrialPlan:
    """One measurement, in fresh processes."""

    variant: Variant
    count: int
    """Groups."""
    of: GroupsPlan
    result: Path
    """Where rank 0 leaves its sample."""


@dataclass(frozen=True)
class Sample:
    """One measurement: seconds, of each the most over the ranks."""

    world: float
    """Creating the default group."""
    create: float
    """Creating all further groups."""
    first: float
    """The first all_reduce on each of them."""
    second: float
    """The second."""
    memory: float
    """MiB of device memory that all of it holds, on the rank that holds most; 0 on a CPU."""
    splits: int
    """How many communicators the backend says it split off; -1 where it does not tell."""

    @property
    def usable(self) -> float:
        """Seconds until the further groups can be used: created, and run once."""
        return self.create + self.first
