"""Hardware checks of many hosts at the same time, from the machine that controls them."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from flagscale.accelerators.registry import AUTO
from flagscale.health.judgement import Judgement
from flagscale.health.measurements import Measurements
from flagscale.health.messages import (
    HealthCommand,
    HealthEvent,
    VariableParts,
    WorkerSettings,
)
from flagscale.health.passes import READY_SECONDS, Passes, measure_in_passes
from flagscale.health.worker import ENTRY_POINT
from flagscale.hosts.connection import Closeable, HostConnection
from flagscale.hosts.fan_out import Hosts
from flagscale.hosts.workers.remote import HostPython, RemoteWorker, for_each_worker
from flagscale.hosts.workers.task import WorkerTask

_NAMES_OF_OTHERS = 4
_LIFETIME_SECONDS = 900.0
_END_SECONDS = 5.0


@dataclass(frozen=True)
class HealthTarget:
    """A host to check."""

    name: str
    device: str = AUTO
    """Kind of its devices, as ``device`` in a YAML."""
    address: str = ""
    """Its address in the network of the ranks, if it is not that of its name."""
    environment: Mapping[str, VariableParts] = field(default_factory=dict)
    python: HostPython | None = None
    """Its Python; None: this process's is at the same path there."""


@dataclass(frozen=True)
class HealthResult:
    """Measurements of all passes, and what they mean. Hosts are numbered as the targets."""

    names: tuple[str, ...]
    passes: tuple[Measurements, ...]
    judgement: Judgement
    seconds: float


class _Worker(RemoteWorker[HealthEvent]):
    """The worker of one host, with what it has sent."""

    def __init__(
        self,
        index: int,
        host: HostConnection,
        target: HealthTarget,
        others: tuple[str, ...],
        listener: HealthSession,
    ) -> None:
        settings = WorkerSettings(
            target.device, dict(target.environment), target.address, others, _LIFETIME_SECONDS
        )
        task = WorkerTask.create(ENTRY_POINT, settings)
        super().__init__(
            target.name, "hardware check", host, task, HealthEvent, listener, target.python
        )
        self.index = index
        self.ready: HealthEvent | None = None
        self.reply: HealthEvent | None = None
        self.failure = ""

    @property
    def is_usable(self) -> bool:
        return not self.failure and not self.ended.is_set()


class HealthSession(Closeable):
    """Workers on all hosts; receives their events."""

    def __init__(self, hosts: Hosts, targets: Sequence[HealthTarget]) -> None:
        """``targets`` are the hosts in their order."""
        self._hosts, self._targets = hosts, targets
        self._state = threading.Condition()
        self._workers: list[_Worker] = []
        self._failures: dict[int, str] = {}

    def start(self, indices: Sequence[int]) -> None:
        """Start the workers of these hosts, and wait until they are ready."""
        connections, errors = self._hosts.run_on_hosts(lambda _, host: host, indices)
        self._failures = {
            index: error.message.removeprefix(f"{self._targets[index].name}: ")
            for index, error in errors.items()
        }
        for index, connection in sorted(connections.items()):
            others = [i for i in connections if i != index][:_NAMES_OF_OTHERS]
            names = tuple(self._targets[i].address or self._targets[i].name for i in others)
            target = self._targets[index]
            self._workers.append(_Worker(index, connection, target, names, self))
        for worker in self._workers:
            worker.start()
        self._await(self._workers, lambda worker: worker.ready is not None, READY_SECONDS)

    def measure(self, *, full: bool) -> Passes:
        """Measure all hosts, and again if something is suspicious.

        A host that fails is reported and takes no further part.
        """
        ready = {w.index: w.ready for w in self._workers if w.ready is not None}
        name = secrets.token_hex(4)
        steps = measure_in_passes(ready, self._failures, name, full=full)
        batch = next(steps)
        while True:
            replies = self._command(batch.commands, batch.timeout)
            try:
                batch = steps.send(replies)
            except StopIteration as end:
                return cast(Passes, end.value)

    def _command(
        self, commands: Mapping[int, HealthCommand], timeout: float
    ) -> dict[int, HealthEvent]:
        """Send each host its command, and return the replies of those that reply in time."""
        workers = [worker for worker in self._workers if worker.index in commands]
        for worker in workers:
            worker.reply = None
        for_each_worker(workers, lambda worker: worker.send(commands[worker.index]))
        self._await(workers, lambda worker: worker.reply is not None, timeout)
        return {worker.index: worker.reply for worker in workers if worker.reply is not None}

    def _await(
        self, workers: Sequence[_Worker], is_done: Callable[[_Worker], bool], timeout: float
    ) -> None:
        """Wait for workers. One that does not get there in time has failed."""
        with self._state:
            self._state.wait_for(
                lambda: all(is_done(worker) or not worker.is_usable for worker in workers), timeout
            )
            for worker in workers:
                if not is_done(worker) and not worker.failure:
                    ended = worker.ended.is_set()
                    worker.failure = (
                        "the check was ended there" if ended else f"no answer within {timeout:g} s"
                    )
            self._failures |= {w.index: w.failure for w in self._workers if w.failure}

    def close(self) -> None:
        """End the workers and wait a moment for their end."""
        running = [worker for worker in self._workers if not worker.ended.is_set()]
        for_each_worker(running, lambda worker: worker.request_exit())
        deadline = time.monotonic() + _END_SECONDS
        for worker in running:
            worker.ended.wait(max(0.0, deadline - time.monotonic()))

    # -- events of workers --------------------------------------------------------------------

    def on_event(self, worker: RemoteWorker[HealthEvent], event: HealthEvent) -> None:
        assert isinstance(worker, _Worker)  # this session has started no other
        with self._state:
            if event.kind == "ready":
                worker.ready = event
            else:
                worker.reply = event
            self._state.notify_all()

    def on_failure(self, worker: RemoteWorker[HealthEvent], reason: str) -> None:
        assert isinstance(worker, _Worker)  # as above
        with self._state:
            worker.failure = worker.failure or reason
            self._state.notify_all()

    def on_exit(self, worker: RemoteWorker[HealthEvent]) -> None:
        with self._state:
            self._state.notify_all()


def check_health(
    hosts: Hosts,
    targets: Sequence[HealthTarget],
    *,
    full: bool = False,
    indices: Sequence[int] | None = None,
) -> HealthResult:
    """Measure hosts, and again if something is suspicious, and judge them.

    Args:
        hosts: their connections, which stay open.
        targets: the hosts in the same order.
        full: measure longer, and always twice.
        indices: hosts to check; None: all.
    """
    start = time.monotonic()
    with HealthSession(hosts, targets) as session:
        session.start(range(len(targets)) if indices is None else indices)
        passes = session.measure(full=full)
    names = tuple(target.name for target in targets)
    seconds = time.monotonic() - start
    return HealthResult(names, passes.measurements, passes.judgement, seconds)
