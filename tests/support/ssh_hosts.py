"""Hosts of the bed as SSH targets, for tests with many of them at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar
from unittest.mock import patch

from flagscale.errors import FlagscaleError
from flagscale.hosts.connection import Closeable, Endpoint, HostConnection
from flagscale.hosts.fan_out import MAX_PARALLEL_HOSTS, Hosts
from flagscale.hosts.ssh.connection import SshConnection
from flagscale.hosts.ssh.dial import Dialer, DialOptions
from flagscale.hosts.ssh.ssh_config import SshTarget

T = TypeVar("T")


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """Result of one host: ``value``, or ``error``, in which case ``value`` is None."""

    number: int
    value: T | None
    error: FlagscaleError | None

    @property
    def ok(self) -> bool:
        return self.error is None

    def get(self) -> T:
        """Return the value, or raise the error."""
        if self.error is not None:
            raise self.error
        return self.value  # type: ignore[return-value]


def run_on_all_hosts(
    hosts: Hosts, action: Callable[[int, HostConnection], T], count: int
) -> list[Outcome[T]]:
    """Run ``action`` on every host, and return the outcomes in the order of the hosts."""
    values, errors = hosts.run_on_hosts(action)
    assert {*values, *errors} == set(range(count))
    return [Outcome(number, values.get(number), errors.get(number)) for number in range(count)]


class DialingFactory(Closeable):
    """Connection factory that opens a connection to a target, by its index, on each call."""

    def __init__(self, targets: Sequence[SshTarget], options: DialOptions | None) -> None:
        self._targets = targets
        self._dialer = Dialer(options)

    def open(self, endpoint: Endpoint) -> SshConnection:
        return self._dialer.connect(self._targets[int(endpoint.name)])

    def close(self) -> None:
        self._dialer.close()


def connect(target: SshTarget, options: DialOptions | None = None) -> SshConnection:
    """Log in to one host. The connection's ``close`` also closes those of the jump hosts."""
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
    action: Callable[[SshConnection], T],
    *,
    max_parallel_hosts: int = MAX_PARALLEL_HOSTS,
    options: DialOptions | None = None,
) -> list[Outcome[T]]:
    """Run ``action`` on every target over a separate connection."""
    endpoints = [Endpoint(str(number)) for number in range(len(targets))]
    with (
        patch("flagscale.hosts.fan_out.MAX_PARALLEL_HOSTS", max_parallel_hosts),
        Hosts(endpoints, {}) as hosts,
    ):
        hosts._factories["ssh"] = DialingFactory(targets, options)
        return run_on_all_hosts(hosts, lambda _, connection: action(connection), len(targets))
