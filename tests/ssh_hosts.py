"""Hosts of the bed by their SSH targets, for tests of what happens to many of them at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from flagscale.hosts.closing import Closing
from flagscale.hosts.executor import Endpoint
from flagscale.hosts.fan_out import LIMIT, Hosts, Outcome
from flagscale.hosts.ssh import Connection, Dialer, DialOptions, SshTarget

T = TypeVar("T")


class Dialing(Closing):
    """Opens a connection to a target, by its number, each time it is asked."""

    def __init__(self, targets: Sequence[SshTarget], options: DialOptions | None) -> None:
        self._targets = targets
        self._dialer = Dialer(options)

    def open(self, endpoint: Endpoint) -> Connection:
        return self._dialer.connect(self._targets[int(endpoint.name)])

    def close(self) -> None:
        self._dialer.close()


def fan_out(
    targets: Sequence[SshTarget],
    action: Callable[[Connection], T],
    *,
    limit: int = LIMIT,
    options: DialOptions | None = None,
    on_done: Callable[[Outcome[T]], object] | None = None,
) -> list[Outcome[T]]:
    """Do ``action`` on every target over a connection of its own."""
    endpoints = [Endpoint(str(number)) for number in range(len(targets))]
    opener = Dialing(targets, options)
    with Hosts(endpoints, openers={"ssh": opener}, limit=limit) as hosts:
        return hosts.map(lambda _, connection: action(connection), on_done=on_done)
