"""Selection of a run's lines, as a user asks for it: hosts, rank, pattern, level, time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from flagscale.config.arguments.spec.values import did_you_mean
from flagscale.config.schema import Options
from flagscale.errors import ConfigError
from flagscale.hosts.names import compress_names, expand_list
from flagscale.launcher.job_hosts import find_job_hosts
from flagscale.launcher.log_lines import LEVELS
from flagscale.launcher.moments import parse_moment
from flagscale.launcher.state import HostState, RunState

FOLLOWED_LINES = 100
"""Last lines of each host that are shown first when output is followed."""


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
    since = None if options.since is None else parse_moment(options.since)
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
    # A spare may have the rank now; the host before it has its earlier lines.
    members = find_job_hosts(state).members if rank is not None else ()
    on_spare = {host.node_rank for host in members if rank in host.ranks}
    hosts = tuple(
        index
        for index in indices
        if rank is None or rank in state.hosts[index].ranks or index in on_spare
    )
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
