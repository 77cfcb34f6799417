"""Background traffic as a context manager: flows run until its ``with`` block ends.

Starts a worker (:mod:`.worker`) on every host, sends it commands, and collects its events
(:mod:`.messages`). Used by ``flagscale bench traffic`` (:mod:`.cli`) and from Python::

    with play(environment, seconds=600) as traffic:
        ...                       # measure something under the traffic
        result = traffic.probe()  # is the tail ratio unchanged?
        traffic.pause()           # the same without traffic

This is a traffic session. It has a random key, with which its workers authenticate to each other
(:mod:`.handshake`).
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from flagscale.bench.traffic.environment import check_environment
from flagscale.bench.traffic.messages import Peer, TrafficCommand, TrafficEvent, WorkerSettings
from flagscale.bench.traffic.spec import Environment, Flow, Pattern, ProbeResult
from flagscale.errors import ConfigError, UnreachableError
from flagscale.hosts.connection import Closeable, Endpoint, HostConnection
from flagscale.hosts.fan_out import Hosts, raise_host_errors
from flagscale.hosts.workers.remote import RemoteWorker, for_each_worker
from flagscale.hosts.workers.task import WorkerTask

LEASE_SECONDS = 20.0
"""Time without a command or renewal from this process after which a worker ends."""
MAX_SESSION_SECONDS = 7 * 86400.0
PROBE_SAMPLES = 300
_RENEW_SECONDS = 5.0
_READY_TIMEOUT_SECONDS = 60.0
_JOIN_TIMEOUT_SECONDS = 30.0
_END_TIMEOUT_SECONDS = 5.0
_RATE_WINDOW_SECONDS = 3.0
_WORKER = "flagscale.bench.traffic.worker:run"


@dataclass(frozen=True)
class FlowRate:
    """Bytes of a flow since the session began, and its rate over the last three seconds."""

    flow: Flow
    sent: int
    received: int
    rate: float
    """Rate in bit/s."""


class TrafficWorker(RemoteWorker[TrafficEvent]):
    """A remote worker of a traffic session, with its settings and state."""

    def __init__(
        self, name: str, host: HostConnection, settings: WorkerSettings, listener: Traffic
    ) -> None:
        task = WorkerTask.create(_WORKER, settings)
        super().__init__(name, "traffic", host, task, TrafficEvent, listener)
        self.settings = settings
        self.ready: TrafficEvent | None = None
        """The ``ready`` event; None before it has arrived."""
        self.joined = False
        """True once the ``joined`` event has arrived."""


def play(
    environment: Environment,
    hosts: Hosts | None = None,
    *,
    seconds: float,
    paused: bool = False,
    ssh_config: Path | None = None,
    interface: str | None = None,
    port: int = 0,
) -> Traffic:
    """Start the flows of an environment. They run until the returned session is closed.

    Args:
        environment: hosts, flows and their pattern.
        hosts: the environment's hosts in their order, already connected; they stay open. None:
            they are connected as the environment describes.
        seconds: time after which the workers end, even if this process is killed; at most
            :data:`MAX_SESSION_SECONDS`.
        paused: send nothing before :meth:`Traffic.resume`.
        ssh_config: file to use instead of ``~/.ssh/config``.
        interface: network interface for outgoing packets of flows and probe; None: by the hosts'
            routes.
        port: port at which each host receives flows; 0: a free one.

    Raises:
        ConfigError: the environment cannot be played.
        UnreachableError: a host cannot be reached, or an address does not acknowledge the hello
            (:mod:`.handshake`). Nothing but the hello is sent to such an address.
    """
    if not 0 < seconds <= MAX_SESSION_SECONDS:
        raise ConfigError(f"{seconds:g} seconds of traffic; expected more than 0, at most 7 days")
    check_environment(environment, "traffic")
    traffic = Traffic(
        environment,
        hosts or connect_hosts(environment, ssh_config),
        seconds,
        owns_hosts=hosts is None,
    )
    try:
        traffic.start(interface, port, paused=paused)
    except BaseException:
        traffic.close()
        raise
    return traffic


def connect_hosts(environment: Environment, ssh_config: Path | None = None) -> Hosts:
    """Return the hosts of an environment in their order. Each is connected on first use."""
    endpoints = [Endpoint(s.name, s.via, s.user, s.port, s.proxy) for s in environment.hosts]
    return Hosts(endpoints, {"ssh": {"config": ssh_config}})


class Traffic(Closeable):
    """A running traffic session; the :class:`.WorkerListener` of its workers.

    Thread-safe except for :meth:`sample` and :meth:`probe`, of which one may run at a time.
    """

    def __init__(
        self, environment: Environment, hosts: Hosts, seconds: float, *, owns_hosts: bool
    ) -> None:
        self.environment = environment
        self._hosts = hosts
        self._owns_hosts = owns_hosts
        self._seconds = seconds
        self._key = secrets.token_hex(32)
        self._state = threading.Condition()
        self._workers: list[TrafficWorker] = []
        self._failures: list[str] = []
        self._samples: list[float] = []
        self._probe_finished = True
        self._sent: dict[int, int] = {}
        self._received: dict[int, int] = {}
        self._dropped_seconds_by_host: dict[int, float] = {}
        self._recent_counts: dict[int, list[tuple[float, int]]] = {}
        self._closing = threading.Event()
        self._begin = time.monotonic()

    # -- start and end ------------------------------------------------------------------------

    def start(self, interface: str | None, port: int, *, paused: bool) -> None:
        """Start every worker and connect them to each other; arguments as for :func:`play`."""
        connections, errors = self._hosts.run_on_hosts(lambda _, host: host)
        raise_host_errors(errors, self._hosts.names, "nothing was sent")
        environment = self.environment
        sources = {flow.source for flow in environment.flows}
        flow_hosts = sorted(sources | {flow.target for flow in environment.flows})
        probe_hosts = range(len(environment.hosts) if self._is_ring else 2)
        flows = [self._new_worker(connections[n], n, "flows", interface, port) for n in flow_hosts]
        probe = [self._new_worker(connections[n], n, "probe", interface, 0) for n in probe_hosts]
        self._workers = [*flows, *probe]
        for worker in self._workers:
            worker.start()
        self._wait_for_workers(
            lambda worker: worker.ready is not None, _READY_TIMEOUT_SECONDS, "started"
        )
        threading.Thread(target=self._renew_leases, name="traffic renewal", daemon=True).start()
        start_flows = TrafficCommand(
            "start",
            peers=self._list_peers(flows, by_flow=True),
            flows=environment.flows,
            pattern=environment.pattern,
            paused=paused,
        )
        start_probe = TrafficCommand(
            "start", peers=self._list_peers(probe), probe=environment.probe
        )
        _send_all(flows, start_flows)
        _send_all(probe, start_probe)
        self._wait_for_workers(
            lambda worker: worker.joined, _JOIN_TIMEOUT_SECONDS, "connected to the others"
        )
        congestion = [
            (worker.name, worker.ready.congestion) for worker in probe if worker.ready is not None
        ]
        self.environment = replace(environment, congestion=tuple(congestion))

    def close(self) -> None:
        """End every worker and wait until all have ended."""
        if self._closing.is_set():
            return
        self._closing.set()
        deadline = time.monotonic() + _END_TIMEOUT_SECONDS
        requested: set[int] = set()
        # A worker that has only just been started does not read commands yet.
        while time.monotonic() < deadline:
            running = [worker for worker in self._workers if not worker.ended.is_set()]
            if not running:
                break
            pending = [w for w in running if w.endpoint is not None and id(w) not in requested]
            requested |= {id(worker) for worker in pending}
            for_each_worker(pending, lambda worker: worker.request_exit())
            running[0].ended.wait(0.05)
        if self._owns_hosts:
            self._hosts.close()

    @property
    def _is_ring(self) -> bool:
        return self.environment.probe.kind == "ring"

    def _new_worker(
        self,
        host: HostConnection,
        host_index: int,
        role: Literal["flows", "probe"],
        interface: str | None,
        port: int,
    ) -> TrafficWorker:
        host_spec = self.environment.hosts[host_index]
        settings = WorkerSettings(
            role=role,
            host_index=host_index,
            session_key=self._key,
            seconds=self._seconds,
            lease=LEASE_SECONDS,
            port=port,
            interface=interface,
            address=host_spec.flow_addr or host_spec.addr,
        )
        return TrafficWorker(host_spec.name, host, settings, self)

    def _list_peers(
        self, workers: Sequence[TrafficWorker], *, by_flow: bool = False
    ) -> tuple[Peer, ...]:
        ports = {w.settings.host_index: w.ready.port for w in workers if w.ready is not None}
        hosts = self.environment.hosts[: None if by_flow or self._is_ring else 2]
        addresses = [(s.flow_addr or s.addr) if by_flow else s.addr for s in hosts]
        return tuple(Peer(address, ports.get(index, 0)) for index, address in enumerate(addresses))

    def _renew_leases(self) -> None:
        while not self._closing.wait(_RENEW_SECONDS):
            for_each_worker(self._workers, lambda worker: worker.renew_lease())

    def _wait_for_workers(
        self, is_done: Callable[[TrafficWorker], bool], timeout_seconds: float, stage: str
    ) -> None:
        """Wait until ``is_done`` is true of all workers. ``stage`` describes that state in the
        message of a timeout.

        Raises:
            UnreachableError: on a failure of a worker, or after ``timeout_seconds``.
        """
        with self._state:
            self._state.wait_for(
                lambda: bool(self._failures) or all(map(is_done, self._workers)), timeout_seconds
            )
            self.check()
            if pending := [worker.name for worker in self._workers if not is_done(worker)]:
                names = ", ".join(dict.fromkeys(pending))
                raise UnreachableError(f"{names}: not {stage} within {timeout_seconds:g} s")

    def check(self) -> None:
        """Raise :class:`UnreachableError` if a host or a flow was lost."""
        if self._failures:
            raise UnreachableError("\n".join(dict.fromkeys(self._failures)))

    # -- events of workers --------------------------------------------------------------------

    def on_event(self, worker: RemoteWorker[TrafficEvent], event: TrafficEvent) -> None:
        assert isinstance(worker, TrafficWorker)  # this session has started no other
        with self._state:
            if event.event == "ready":
                worker.ready = event
            elif event.event == "joined":
                worker.joined = True
            elif event.event == "counts":
                self._sent.update(event.sent)
                self._received.update(event.received)
                self._record_counts(event.received)
                self._dropped_seconds_by_host[worker.settings.host_index] = event.dropped_seconds
            elif event.event == "samples":
                self._samples.extend(event.samples)
            elif event.event == "sampled":
                self._probe_finished = True
            self._state.notify_all()

    def on_failure(self, worker: RemoteWorker[TrafficEvent], reason: str) -> None:
        if time.monotonic() > self._begin + self._seconds:
            # The session is over. A worker may lose peers that end shortly before it.
            self.on_exit(worker)
            return
        with self._state:
            if not self._closing.is_set():
                self._failures.append(f"{worker.name}: {reason}")
            self._state.notify_all()

    def on_exit(self, worker: RemoteWorker[TrafficEvent]) -> None:
        with self._state:
            if not self._closing.is_set() and not self._failures:
                is_over = time.monotonic() > self._begin + self._seconds
                reason = f"its {self._seconds:g} s are over" if is_over else "it was ended there"
                self._failures.append(f"{worker.name}: no more traffic: {reason}")
            self._state.notify_all()

    def _record_counts(self, received: Sequence[tuple[int, int]]) -> None:
        """Record received bytes by flow with the time, from which rates are calculated."""
        now = time.monotonic()
        for flow, count in received:
            counts = self._recent_counts.setdefault(flow, [])
            counts.append((now, count))
            while now - counts[0][0] > _RATE_WINDOW_SECONDS:
                del counts[0]

    # -- commands -----------------------------------------------------------------------------

    def change(self, pattern: Pattern) -> None:
        """Send bursts of another pattern from now on. Only its ``burst``, ``load`` and ``peak`` may
        differ from the current pattern's.
        """
        check_environment(replace(self.environment, pattern=pattern), "traffic")
        self.environment = replace(self.environment, pattern=pattern, found=None)
        _send_all(self._flow_workers, TrafficCommand("burst", pattern=pattern))
        self.check()

    def pause(self) -> None:
        """Send nothing until :meth:`resume`."""
        _send_all(self._flow_workers, TrafficCommand("pause"))

    def resume(self) -> None:
        """Continue sending."""
        _send_all(self._flow_workers, TrafficCommand("resume"))

    @property
    def _flow_workers(self) -> list[TrafficWorker]:
        return [worker for worker in self._workers if worker.settings.role == "flows"]

    # -- measurements -------------------------------------------------------------------------

    def sample(
        self,
        count: int,
        seconds: float = 60.0,
        on_samples: Callable[[Sequence[float]], object] | None = None,
    ) -> list[float]:
        """Return the times of ``count`` operations of the probe, in seconds.

        Args:
            count: number of operations.
            seconds: time after which fewer are returned (at least one).
            on_samples: called several times a second with the times so far.

        Raises:
            UnreachableError: a host was lost.
        """
        with self._state:
            self._samples, self._probe_finished = [], False
        leader = next(
            w for w in self._workers if w.settings.role == "probe" and not w.settings.host_index
        )
        leader.send(TrafficCommand("sample", samples=count, seconds=seconds))
        deadline = time.monotonic() + seconds + 90
        while True:
            with self._state:
                self._state.wait_for(lambda: self._probe_finished or bool(self._failures), 0.25)
                self.check()
                samples, is_finished = list(self._samples), self._probe_finished
            if on_samples is not None:
                on_samples(samples)
            if is_finished:
                return samples
            if time.monotonic() > deadline:
                raise UnreachableError(
                    f"{leader.name}: the probe has not finished within {seconds + 90:g} s"
                )

    def probe(self, samples: int = PROBE_SAMPLES, seconds: float = 60.0) -> ProbeResult:
        """Measure the tail ratio (p99 ÷ p50 of ``samples`` operations) with its 95 % interval.

        The probe loads the path while it runs, so nothing else should be measured at that time.

        Raises:
            UnreachableError: a host was lost.
        """
        # Imported late: it needs numpy, and a session without a probe does not.
        from flagscale.bench.traffic.summary import summarize

        return summarize(self.sample(samples, seconds), self.environment.pattern.seed)

    def rates(self) -> list[FlowRate]:
        """Return bytes and rate of each flow. Counts arrive twice a second."""
        with self._state:
            sent, received = dict(self._sent), dict(self._received)
            rates = {flow: _rate(counts) for flow, counts in self._recent_counts.items()}
        return [
            FlowRate(flow, sent.get(n, 0), received.get(n, 0), rates.get(n, 0.0))
            for n, flow in enumerate(self.environment.flows)
        ]

    @property
    def dropped_seconds(self) -> float:
        """Time of the flows' schedules whose bursts were dropped because the path is too slow for
        the load, summed over all flows.
        """
        return sum(self._dropped_seconds_by_host.values())


def _send_all(workers: Sequence[TrafficWorker], command: TrafficCommand) -> None:
    for_each_worker(workers, lambda worker: worker.send(command))


def _rate(counts: Sequence[tuple[float, int]]) -> float:
    """Return the rate in bit/s between the first and the last of some (time, bytes)."""
    (begin, first), (end, last) = counts[0], counts[-1]
    return 8 * (last - first) / (end - begin) if end > begin else 0.0
