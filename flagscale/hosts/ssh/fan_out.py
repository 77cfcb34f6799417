"""One action on many hosts at once.

Threads, not processes: a connection costs this machine a few milliseconds of CPU, so what counts
is that no host waits for another. The pool is bounded; all failures are collected, because a user
with three broken hosts out of sixty-four wants to know of all three.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Generic, TypeVar

from flagscale.errors import FlagscaleError
from flagscale.hosts.ssh.closing import Closing
from flagscale.hosts.ssh.connection import Connection
from flagscale.hosts.ssh.dial import Dialer, DialOptions
from flagscale.hosts.ssh.target import SshTarget

T = TypeVar("T")

#: Connections opened at the same time. More gain nothing: one core serves this many.
LIMIT = 48


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """What became of one host: ``value``, or ``error`` and then ``value`` is None."""

    target: SshTarget
    value: T | None
    error: FlagscaleError | None
    seconds: float

    @property
    def ok(self) -> bool:
        return self.error is None

    def get(self) -> T:
        """The value; raises the error where there is one."""
        if self.error is not None:
            raise self.error
        return self.value  # type: ignore[return-value]


class Fleet(Closing):
    """Hosts whose connections stay open from one action to the next, as for a live table.

    A connection that broke is opened again by the next action. A context manager.
    """

    def __init__(
        self,
        targets: Sequence[SshTarget],
        *,
        limit: int = LIMIT,
        options: DialOptions | None = None,
        keep: bool = True,
    ) -> None:
        self.targets = list(targets)
        self._limit = max(1, limit)
        self._keep = keep
        self._dialer = Dialer(options)
        self._lock = threading.Lock()
        self._connections: dict[SshTarget, Connection] = {}

    def close(self) -> None:
        self._dialer.close()

    def map(
        self,
        action: Callable[[Connection], T],
        *,
        targets: Sequence[SshTarget] | None = None,
        on_done: Callable[[Outcome[T]], object] | None = None,
    ) -> list[Outcome[T]]:
        """Do ``action`` on every host (or on ``targets``) and return the outcomes in their order.

        ``action`` is done once a host: only connecting is tried again. Its own
        :class:`FlagscaleError` becomes the host's outcome; any other exception is a bug, ends the
        whole action and is raised. ``on_done`` is called in this thread as hosts finish. On
        Ctrl-C every connection is closed, and KeyboardInterrupt goes on.
        """
        chosen = self.targets if targets is None else list(targets)
        if not chosen:
            return []
        pool = ThreadPoolExecutor(min(self._limit, len(chosen)), thread_name_prefix="fan-out")
        futures: list[Future[Outcome[T]]] = []
        try:
            futures = [pool.submit(self._one, target, action) for target in chosen]
            for future in as_completed(futures):
                outcome = future.result()
                if on_done is not None:
                    on_done(outcome)
        except BaseException:
            self._dialer.close()  # wakes the threads that wait for a host
            pool.shutdown(wait=True, cancel_futures=True)
            raise
        pool.shutdown(wait=True)
        return [future.result() for future in futures]

    def _one(self, target: SshTarget, action: Callable[[Connection], T]) -> Outcome[T]:
        start = time.monotonic()
        connection: Connection | None = None
        try:
            connection = self._connection(target)
            value = action(connection)
        except FlagscaleError as error:
            return Outcome(target, None, error, time.monotonic() - start)
        finally:
            if connection is not None and not self._keep:
                connection.close()
        return Outcome(target, value, None, time.monotonic() - start)

    def _connection(self, target: SshTarget) -> Connection:
        with self._lock:
            connection = self._connections.get(target)
        if connection is not None and connection.alive:
            return connection
        connection = self._dialer.connect(target)
        if self._keep:
            with self._lock:
                self._connections[target] = connection
        return connection


def fan_out(
    targets: Sequence[SshTarget],
    action: Callable[[Connection], T],
    *,
    limit: int = LIMIT,
    options: DialOptions | None = None,
    on_done: Callable[[Outcome[T]], object] | None = None,
) -> list[Outcome[T]]:
    """Connect to each host, do ``action``, disconnect: see :meth:`Fleet.map`."""
    with Fleet(targets, limit=limit, options=options, keep=False) as fleet:
        return fleet.map(action, on_done=on_done)
