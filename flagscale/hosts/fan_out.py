"""One action on many hosts at once.

Threads, not processes: a connection costs this machine a few milliseconds of CPU, so what counts
is that no host waits for another. The pool is bounded; all failures are collected, because a user
with three broken hosts out of sixty-four wants to know of all three.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from flagscale.errors import ConfigError, FlagscaleError, UnreachableError
from flagscale.hosts.executor import EXECUTORS, Closing, Endpoint, Executor, Opener
from flagscale.hosts.names import compress

T = TypeVar("T")

#: Hosts that are reached at the same time. More gain nothing: one core serves this many.
LIMIT = 48


class Hosts(Closing):
    """Hosts by number, reached when they are first asked. What reaches them stays open from one
    action to the next. A context manager: leaving it closes that, and no more."""

    def __init__(
        self, endpoints: Sequence[Endpoint], settings: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """``settings``: of each way to reach hosts, such as ``{"ssh": {"config": path}}``."""
        self.endpoints = tuple(endpoints)
        self._settings = settings
        self._openers: dict[str, Opener] = {}
        self._lock = threading.Lock()

    @property
    def names(self) -> list[str]:
        return [endpoint.name for endpoint in self.endpoints]

    def close(self) -> None:
        for one in self._openers.values():
            one.close()

    def each(
        self, action: Callable[[int, Executor], T], numbers: Sequence[int] | None = None
    ) -> tuple[dict[int, T], dict[int, FlagscaleError]]:
        """Do ``action`` on every host, given with its number, or on those of ``numbers``; by number
        what it returned, and the errors of hosts on which it failed or which could not be reached,
        in their order.

        It is done once a host: only reaching it is tried again. An exception that is no
        :class:`FlagscaleError` is a bug, ends the whole action and is raised. On Ctrl-C everything
        that is held open is closed, and KeyboardInterrupt goes on.
        """
        chosen = range(len(self.endpoints)) if numbers is None else numbers

        def visit(number: int) -> T | FlagscaleError:
            try:
                return action(number, self._reach(self.endpoints[number]))
            except FlagscaleError as error:
                return error

        if len(chosen) == 1 and self.endpoints[chosen[0]].via == "local":
            # A thread costs more than the whole visit.
            outcomes = [visit(chosen[0])]
        else:
            outcomes = self._side_by_side(visit, chosen) if chosen else []
        found = dict(zip(chosen, outcomes, strict=True))
        values = {n: one for n, one in found.items() if not isinstance(one, FlagscaleError)}
        return values, {n: one for n, one in found.items() if isinstance(one, FlagscaleError)}

    def _side_by_side(self, visit: Callable[[int], T], numbers: Sequence[int]) -> list[T]:
        from concurrent.futures import ThreadPoolExecutor, as_completed

        pool = ThreadPoolExecutor(min(LIMIT, len(numbers)), thread_name_prefix="fan-out")
        try:
            futures = [pool.submit(visit, number) for number in numbers]
            for future in as_completed(futures):
                future.result()
        except BaseException:
            self.close()  # wakes the threads that wait for a host
            pool.shutdown(wait=True, cancel_futures=True)
            raise
        pool.shutdown(wait=True)
        return [future.result() for future in futures]

    def _reach(self, endpoint: Endpoint) -> Executor:
        with self._lock:
            if endpoint.via not in self._openers:
                settings = self._settings.get(endpoint.via, {})
                self._openers[endpoint.via] = EXECUTORS.load(endpoint.via)(settings)
            chosen = self._openers[endpoint.via]
        return chosen.open(endpoint)


def describe(errors: Mapping[int, FlagscaleError], names: Sequence[str]) -> str:
    """Errors of hosts, a line for those with the same trouble, with the first one's own words."""
    groups: dict[str, list[int]] = {}
    for number, error in errors.items():
        groups.setdefault(str(getattr(error, "summary", type(error).__name__)), []).append(number)
    lines = []
    for numbers in groups.values():
        first = errors[numbers[0]]
        text = first.message
        if len(numbers) > 1:
            shown = compress(names[number] for number in numbers)
            text = f"{shown}: {getattr(first, 'summary', 'failed')}"
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
