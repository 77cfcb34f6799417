"""Run one action on many hosts in parallel.

Threads suffice: a connection costs this machine a few milliseconds of CPU, so the aim is only
that no host waits for another. The pool is bounded. All failures are collected, so that a user
with three broken hosts out of 64 sees all three at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from flagscale.errors import ConfigError, FlagscaleError, UnreachableError
from flagscale.hosts.connection import (
    CONNECTION_FACTORIES,
    Closeable,
    ConnectionFactory,
    Endpoint,
    HostConnection,
)
from flagscale.hosts.names import compress_names

T = TypeVar("T")

#: Hosts that are reached at the same time. A higher limit gains nothing: one core serves this
# many.
MAX_PARALLEL_HOSTS = 48


class Hosts(Closeable):
    """Pool of connections to the hosts of a run, by index.

    A host is reached at its first action, and its connection is reused by later ones. As a context
    manager it closes the connections, not the programs on the hosts.
    """

    def __init__(
        self, endpoints: Sequence[Endpoint], settings: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """``settings``: options per kind of connection, such as ``{"ssh": {"config": path}}``."""
        self.endpoints = tuple(endpoints)
        self._settings = settings
        self._factories: dict[str, ConnectionFactory] = {}
        self._lock = threading.Lock()

    @property
    def names(self) -> list[str]:
        return [endpoint.name for endpoint in self.endpoints]

    def close(self) -> None:
        for factory in self._factories.values():
            factory.close()

    def run_on_hosts(
        self, action: Callable[[int, HostConnection], T], host_indices: Sequence[int] | None = None
    ) -> tuple[dict[int, T], dict[int, FlagscaleError]]:
        """Run ``action(index, connection)`` on all hosts, or on those with ``host_indices``.

        Returns the results by host index, and the errors by host index of hosts that could not
        be reached or on which the action failed. Each action runs once; only connecting is
        retried. An exception that is no :class:`FlagscaleError` is a bug: it ends the whole
        action and is raised. On Ctrl-C all connections are closed and KeyboardInterrupt is
        raised.
        """
        indices = range(len(self.endpoints)) if host_indices is None else host_indices

        def run_on_host(index: int) -> T | FlagscaleError:
            try:
                return action(index, self._connect(self.endpoints[index]))
            except FlagscaleError as error:
                return error

        if len(indices) == 1 and self.endpoints[indices[0]].via == "local":
            # A thread costs more than the whole action.
            outcomes = [run_on_host(indices[0])]
        else:
            outcomes = self._run_in_threads(run_on_host, indices) if indices else []
        results: dict[int, T] = {}
        errors: dict[int, FlagscaleError] = {}
        for index, outcome in zip(indices, outcomes, strict=True):
            if isinstance(outcome, FlagscaleError):
                errors[index] = outcome
            else:
                results[index] = outcome
        return results, errors

    def _run_in_threads(self, run_on_host: Callable[[int], T], indices: Sequence[int]) -> list[T]:
        from concurrent.futures import ThreadPoolExecutor, as_completed

        pool = ThreadPoolExecutor(
            min(MAX_PARALLEL_HOSTS, len(indices)), thread_name_prefix="fan-out"
        )
        try:
            futures = [pool.submit(run_on_host, index) for index in indices]
            for future in as_completed(futures):
                future.result()
        except BaseException:
            self.close()  # wakes up the threads that wait for a host
            pool.shutdown(wait=True, cancel_futures=True)
            raise
        pool.shutdown(wait=True)
        return [future.result() for future in futures]

    def _connect(self, endpoint: Endpoint) -> HostConnection:
        with self._lock:
            if endpoint.via not in self._factories:
                settings = self._settings.get(endpoint.via, {})
                self._factories[endpoint.via] = CONNECTION_FACTORIES.load(endpoint.via)(settings)
            factory = self._factories[endpoint.via]
        return factory.open(endpoint)


def format_host_errors(errors: Mapping[int, FlagscaleError], names: Sequence[str]) -> str:
    """Format errors of hosts, one line per distinct problem, with the message of the first host."""
    groups: dict[str, list[int]] = {}
    for index, error in errors.items():
        groups.setdefault(str(getattr(error, "summary", type(error).__name__)), []).append(index)
    lines = []
    for indices in groups.values():
        first_error = errors[indices[0]]
        text = first_error.message
        if len(indices) > 1:
            host_names = compress_names(names[index] for index in indices)
            text = f"{host_names}: {getattr(first_error, 'summary', 'failed')}"
            text += f"; for example: {first_error.message}"
        lines.append(text + (f"\n  hint: {first_error.hint}" if first_error.hint else ""))
    return "\n".join(lines)


def raise_host_errors(
    errors: Mapping[int, FlagscaleError], names: Sequence[str], summary: str
) -> None:
    """Raise an error that names every failed host, if there is any.

    Raises:
        UnreachableError: at least one host could not be reached.
        ConfigError: all failures have another cause.
    """
    if not errors:
        return
    text = f"{summary}: {len(errors)} of {len(names)} host(s)\n{format_host_errors(errors, names)}"
    if any(isinstance(error, UnreachableError) for error in errors.values()):
        raise UnreachableError(text)
    raise ConfigError(text)
