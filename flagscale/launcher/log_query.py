"""Selection of a run's lines, as a user asks for it: hosts, rank, pattern, level, time."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from flagscale.config.arguments.spec.values import did_you_mean
from flagscale.config.schema import Options
from flagscale.errors import ConfigError
from flagscale.hosts.names import compress_names, expand_list
from flagscale.launcher.log_lines import LEVELS
from flagscale.launcher.state import HostState, RunState

FOLLOWED_LINES = 100
"""Last lines of each host that are shown first when output is followed."""
_AGE = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m(?:in)?)?(?:(\d+)s)?")
_CLOCK = re.compile(r"\d{1,2}:\d\d(?::\d\d)?")
_AGE_UNITS = (86400, 3600, 60, 1)


@dataclass(frozen=True)
class LogQuery:
    """Selection of lines.

    Attributes:
        hosts: Indices of the hosts in the run's state.
        rank: Only this rank's lines.
        pattern: Only lines in which this regular expression is found.
        level: Only messages of this level, or a worse one.
        since: Only lines since this time, in seconds since the epoch.
        count: Only this many last lines of each host.
    """

    hosts: tuple[int, ...]
    rank: int | None = None
    pattern: str | None = None
    level: str | None = None
    since: float | None = None
    count: int | None = None
    names: str | None = None
    """The hosts as the user named them; None for all."""

    @property
    def selects_lines(self) -> bool:
        """True if not every line of the run is requested."""
        parts = (self.names, self.rank, self.pattern, self.level, self.since, self.count)
        return any(value is not None for value in parts)


def parse_query(state: RunState, options: Options) -> LogQuery:
    """Return the query of the options of ``logs``.

    Raises:
        ConfigError: an option has a wrong value for this run.
    """
    if options.grep is not None:
        try:
            re.compile(options.grep)
        except re.error as error:
            raise ConfigError(
                f"grep={options.grep}: not a regular expression: {error}",
                hint="a backslash in front of a special character, as in \\(, takes it literally",
            ) from error
    if options.level is not None and options.level not in LEVELS:
        raise ConfigError(f"level={options.level}: expected one of {', '.join(LEVELS)}")
    since = None if options.since is None else parse_since(options.since)
    hosts = select_hosts(state, options.host, options.rank)
    return LogQuery(
        hosts, options.rank, options.grep, options.level, since, options.lines, options.host
    )


def select_hosts(
    state: RunState, names: str | None = None, rank: int | None = None
) -> tuple[int, ...]:
    """Return the indices of the hosts that have one of these names, and this rank.

    Raises:
        ConfigError: there is no such host or rank, or the rank is on another host.
    """
    if rank is not None and not 0 <= rank < state.world_size:
        ranks = f"ranks 0 to {state.world_size - 1}"
        raise ConfigError(f"rank={rank}: run {state.run_id} has {ranks}")
    indices = list(range(len(state.hosts)))
    if names is not None:
        selected = _expand_names(names)
        known_names = [host.name for host in state.hosts]
        for name in selected:
            if name not in known_names:
                text = f"host={names}: run {state.run_id} has {compress_names(known_names)}"
                raise ConfigError(text + did_you_mean(name, known_names))
        indices = [index for index in indices if state.hosts[index].name in selected]
    hosts = tuple(index for index in indices if rank is None or rank in state.hosts[index].ranks)
    if not hosts:
        raise ConfigError(f"rank={rank} is on host {_host_of_rank(state.hosts, rank).name}")
    return hosts


def _expand_names(text: str) -> list[str]:
    try:
        return expand_list(text)
    except ValueError as error:
        raise ConfigError(f"host={text}: {error}") from error


def _host_of_rank(hosts: Sequence[HostState], rank: int | None) -> HostState:
    return next(host for host in hosts if rank in host.ranks)


def parse_since(text: str, now: float | None = None) -> float:
    """Return the time that a text means, in seconds since the epoch.

    The text is an age (``10m``, ``1h30m``, ``2d``), a time of the last 24 hours (``14:02``), or a
    date with or without a time in ISO format. Times are this machine's.

    Raises:
        ConfigError: the text has none of these forms, or is in the future.
    """
    current_time = time.time() if now is None else now
    age = _AGE.fullmatch(text)
    if text and age is not None:
        parts = zip(age.groups(default="0"), _AGE_UNITS, strict=True)
        return current_time - sum(int(number) * seconds for number, seconds in parts)
    moment = _parse_time(text, datetime.fromtimestamp(current_time))
    if moment is None:
        raise ConfigError(
            f"since={text}: expected an age (10m, 2h, 1d), a time (14:02), or a date and time "
            "(2026-11-26T14:02)"
        )
    if moment.timestamp() > current_time:
        raise ConfigError(f"since={text}: is in the future")
    return moment.timestamp()


def _parse_time(text: str, now: datetime) -> datetime | None:
    try:
        if _CLOCK.fullmatch(text):
            clock = datetime.strptime(text, "%H:%M:%S" if text.count(":") == 2 else "%H:%M").time()
            moment = datetime.combine(now.date(), clock)
            return moment if moment <= now else moment - timedelta(days=1)
        # Python 3.10 does not accept the Z of UTC.
        return datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return None
