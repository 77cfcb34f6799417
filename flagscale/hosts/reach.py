"""The hosts of a plan or of a run, by rank, with the connections that stay open to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from flagscale.errors import ConfigError, FlagscaleError, UnreachableError
from flagscale.hosts.names import compress
from flagscale.hosts.ssh import Connection, DialOptions, Fleet, Outcome, SshConfig
from flagscale.hosts.ssh.closing import Closing

T = TypeVar("T")


@dataclass(frozen=True)
class Endpoint:
    """How SSH reaches a host where that differs from the user's SSH configuration."""

    user: str | None = None
    port: int | None = None
    proxy: str | None = None


class Hosts(Closing):
    """Hosts by rank. A context manager: leaving it closes the connections, and no more."""

    def __init__(
        self,
        places: Sequence[tuple[str, Endpoint]],
        ssh_config: Path | None,
        options: DialOptions | None = None,
    ) -> None:
        config = SshConfig.load(ssh_config)
        self.names = [name for name, _ in places]
        self._targets = [
            config.target(name, user=place.user, port=place.port, proxy=place.proxy)
            for name, place in places
        ]
        self._ranks = {target: rank for rank, target in enumerate(self._targets)}
        self._fleet = Fleet(self._targets, options=options)

    def close(self) -> None:
        self._fleet.close()

    def each(
        self,
        action: Callable[[int, Connection], T],
        ranks: Sequence[int] | None = None,
    ) -> tuple[dict[int, T], dict[int, FlagscaleError]]:
        """Do ``action`` on every host, or on those of ``ranks``: what it returned, and the errors
        of hosts on which it failed or which could not be reached."""
        chosen = self._targets if ranks is None else [self._targets[rank] for rank in ranks]
        outcomes: list[Outcome[T]] = self._fleet.map(
            lambda connection: action(self._ranks[connection.target], connection), targets=chosen
        )
        values: dict[int, T] = {}
        errors: dict[int, FlagscaleError] = {}
        for outcome in outcomes:
            rank = self._ranks[outcome.target]
            if outcome.error is not None:
                errors[rank] = outcome.error
            else:
                values[rank] = outcome.get()
        return values, errors


def describe(errors: Mapping[int, FlagscaleError], names: Sequence[str]) -> str:
    """Errors of hosts, a line for those with the same trouble, with the first one's own words."""
    groups: dict[str, list[int]] = {}
    for rank, error in errors.items():
        groups.setdefault(str(getattr(error, "summary", type(error).__name__)), []).append(rank)
    lines = []
    for ranks in groups.values():
        first = errors[ranks[0]]
        text = first.message
        if len(ranks) > 1:
            text = (
                f"{compress(names[rank] for rank in ranks)}: {getattr(first, 'summary', 'failed')}"
            )
            text += f"; for example: {first.message}"
        lines.append(text + (f"\n  hint: {first.hint}" if first.hint else ""))
    return "\n".join(lines)


def require_all(errors: Mapping[int, FlagscaleError], names: Sequence[str], what: str) -> None:
    """Raise naming every host that failed, where any did: :class:`UnreachableError` if one could
    not be reached, else :class:`ConfigError`."""
    if not errors:
        return
    text = f"{what}: {len(errors)} of {len(names)} host(s)\n{describe(errors, names)}"
    if any(isinstance(error, UnreachableError) for error in errors.values()):
        raise UnreachableError(text)
    raise ConfigError(text)
