"""Hosts of the bed by their SSH targets, for tests of what happens to many of them at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar
from unittest.mock import patch

from flagscale.errors import FlagscaleError
from flagscale.hosts.executor import Closing, Endpoint, Executor
from flagscale.hosts.fan_out import LIMIT, Hosts
from flagscale.hosts.ssh.connection import Connection
from flagscale.hosts.ssh.dial import Dialer, DialOptions
from flagscale.hosts.ssh.ssh_config import SshTarget

T = TypeVar("T")


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """What became of one host: ``value``, or ``error`` and then ``value`` is None."""

    number: int
    value: T | None
    error: FlagscaleError | None

    @property
    def ok(self) -> bool:
        return self.error is None

    def get(self) -> T:
        """The value; raises the error where there is one."""
        if self.error is not None:
            raise self.error
        return self.value  # type: ignore[return-value]


def outcomes_of(hosts: Hosts, action: Callable[[int, Executor], T], count: int) -> list[Outcome[T]]:
    """Do ``action`` on every host; what became of each, in their order."""
    values, errors = hosts.each(action)
    assert {*values, *errors} == set(range(count))
    return [Outcome(number, values.get(number), errors.get(number)) for number in range(count)]


class Dialing(Closing):
    """Opens a connection to a target, by its number, each time it is asked."""

    def __init__(self, targets: Sequence[SshTarget], options: DialOptions | None) -> None:
        self._targets = targets
        self._dialer = Dialer(options)

    def open(self, endpoint: Endpoint) -> Connection:
        return self._dialer.connect(self._targets[int(endpoint.name)])

    def close(self) -> None:
        self._dialer.close()


def connect(target: SshTarget, options: DialOptions | None = None) -> Connection:
    """Log in to one host. The connection's ``close`` also closes the jump hosts' on the way."""
    dialer = Dialer(options)
    try:
        connection = dialer.connect(target)
    except BaseException:
        dialer.close()
        raise
    connection.on_close(dialer.close)
    return connection


def fan_out(
    targets: Sequence[SshTarget],
    action: Callable[[Connection], T],
    *,
    limit: int = LIMIT,
    options: DialOptions | None = None,
) -> list[Outcome[T]]:
    """Do ``action`` on every target over a connection of its own."""
    endpoints = [Endpoint(str(number)) for number in range(len(targets))]
    with patch("flagscale.hosts.fan_out.LIMIT", limit), Hosts(endpoints, {}) as hosts:
        hosts._openers["ssh"] = Dialing(targets, options)
        return outcomes_of(hosts, lambda _, connection: action(connection), len(targets))
