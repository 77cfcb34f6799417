"""What the network does while arms train: nothing, or an environment that is played."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from flagscale.errors import ConfigError

NONE = "none"


class Traffic(Protocol):
    """Traffic that is being played."""

    def ratio(self) -> float | None:
        """p99/p50 that its probe finds now; None without traffic."""


class _Silence:
    def ratio(self) -> float | None:
        return None


@dataclass(frozen=True)
class Setting:
    """The network of a session."""

    label: str = NONE
    told: str = "without traffic"
    environment: Any = None

    @contextmanager
    def played(self) -> Iterator[Traffic]:
        """The traffic, from here until this is left."""
        yield _Silence()


def read_settings(files: Sequence[Path], apart: Sequence[str]) -> tuple[Setting, ...]:
    """No traffic, which all others are compared with; then each file's; then the control."""
    if files or apart:
        raise ConfigError("--environment: not yet")
    return (Setting(),)
