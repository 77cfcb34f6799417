"""Hardware checks of many hosts at the same time, from the machine that controls them."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, zip_longest

from flagscale.accelerators.registry import AUTO
from flagscale.health.judgement import Judgement, confirm, judge
from flagscale.health.measurements import HostMeasurement, Measurements
from flagscale.health.messages import (
    HealthCommand,
    HealthEvent,
    PairMeasurement,
    PairRound,
    VariableParts,
    WorkerSettings,
)
from flagscale.health.pairing import pair_hosts
from flagscale.health.worker import ENTRY_POINT
from flagscale.hosts.connection import Closeable, HostConnection
from flagscale.hosts.fan_out import Hosts
from flagscale.hosts.workers.remote import HostPython, RemoteWorker, for_each_worker
from flagscale.hosts.workers.task import WorkerTask

_READY_SECONDS = 90.0
"""Longest start of a worker: torch may be on a slow file system."""
_MEASURE_SECONDS = 240.0
"""Longest measurement of a host, whose worker gives up hung devices earlier."""
_PAIR_SECONDS = 60.0
_NAMES_OF_OTHERS = 4
_LIFETIME_SECONDS = 900.0
_END_SECONDS = 5.0
_QUICK_WINDOW = 0.3
_FULL_WINDOW = 2.0
_PAIR_SHARE = 0.5
"""Window of an exchange between hosts as a fraction of that of a matrix product."""


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
        self._name = secrets.token_hex(4)
        self._passes = 0

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
        self._await(self._workers, lambda worker: worker.ready is not None, _READY_SECONDS)

    def measure(self, window: float) -> Measurements:
        """Measure all hosts, and then their connections in pairs. A further call takes other pairs.

        A host that fails is reported and takes no further part.
        """
        measured = self._command(
            {worker.index: HealthCommand(window) for worker in self._usable()}, _MEASURE_SECONDS
        )
        hosts = {index: HostMeasurement(event.devices) for index, event in measured.items()}
        for index, pairs in self._exchange(window * _PAIR_SHARE).items():
            if index in hosts:
                hosts[index] = replace(hosts[index], pairs=tuple(pairs))
        if len(self._workers) > 1:
            for worker in self._usable():
                if worker.index in hosts and worker.ready and not worker.ready.address:
                    hosts[worker.index] = replace(hosts[worker.index], has_address=False)
        self._passes += 1
        failures = {**self._failures, **{w.index: w.failure for w in self._workers if w.failure}}
        return Measurements(hosts, failures)

    def _exchange(self, window: float) -> dict[int, list[PairMeasurement]]:
        """Let the hosts exchange data in rounds of pairs, and return each host's measurements."""
        # Different kinds of devices have no backend in common.
        by_kind: dict[str, list[_Worker]] = {}
        for worker in self._usable():
            if worker.ready is not None and worker.ready.address:
                by_kind.setdefault(worker.ready.device, []).append(worker)
        rounds_by_kind = [
            [[(workers[first], workers[second]) for first, second in pairs] for pairs in rounds]
            for workers in by_kind.values()
            for rounds in [pair_hosts(len(workers), self._passes)]
        ]
        results: dict[int, list[PairMeasurement]] = {}
        for number, parts in enumerate(zip_longest(*rounds_by_kind, fillvalue=())):
            commands: dict[int, HealthCommand] = {}
            for leader, follower in chain.from_iterable(parts):
                commands |= self._pair(leader, follower, number, window)
            for index, event in self._command(commands, _PAIR_SECONDS).items():
                results.setdefault(index, []).extend(event.pairs)
        return results

    def _pair(
        self, leader: _Worker, follower: _Worker, number: int, window: float
    ) -> dict[int, HealthCommand]:
        if leader.ready is None or follower.ready is None:
            return {}
        if not (leader.is_usable and follower.is_usable):
            return {}
        name = f"{self._name}/{self._passes}/{number}/{leader.index}"
        ranks = min(leader.ready.ranks, follower.ready.ranks)
        address, port = leader.ready.address, leader.ready.port
        commands = {}
        for worker, partner in ((leader, follower), (follower, leader)):
            pair = PairRound(name, partner.index, address, port, worker is leader, ranks)
            commands[worker.index] = HealthCommand(window, pair)
        return commands

    def _usable(self) -> list[_Worker]:
        return [worker for worker in self._workers if worker.is_usable]

    def _command(
        self, commands: Mapping[int, HealthCommand], timeout: float
    ) -> dict[int, HealthEvent]:
        """Send each host its command, and return the replies of those that reply in time."""
        workers = [worker for worker in self._usable() if worker.index in commands]
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
    window = _FULL_WINDOW if full else _QUICK_WINDOW
    with HealthSession(hosts, targets) as session:
        session.start(range(len(targets)) if indices is None else indices)
        passes = [session.measure(window)]
        judgements = [judge(passes[0])]
        if full or judgements[0].has_suspects:
            passes.append(session.measure(window))
            judgements.append(judge(passes[1]))
    names = tuple(target.name for target in targets)
    seconds = time.monotonic() - start
    return HealthResult(names, tuple(passes), confirm(judgements), seconds)
