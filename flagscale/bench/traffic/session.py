"""Playing an environment: flows run from here until the session is left.

with play(environment, seconds=600) as traffic:
    ...                      # measure something beside them
    found = traffic.probe()  # is the tail still what it was?
    traffic.pause()          # the same without traffic
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from flagscale.bench.traffic.environment import check
from flagscale.bench.traffic.messages import Order, Peer, Said, Word
from flagscale.bench.traffic.remote_workers import Station, tell_all
from flagscale.bench.traffic.spec import Environment, Flow, Found, Pattern
from flagscale.errors import ConfigError, UnreachableError
from flagscale.hosts.executor import Closing, Endpoint, Executor
from flagscale.hosts.fan_out import Hosts, require_all

LEASE_SECONDS = 20.0
"""After so long without a word from here, a process on a host ends."""
MOST_SECONDS = 7 * 86400.0
PROBE_SAMPLES = 300
_RENEW_SECONDS = 5.0
_READY_SECONDS = 60.0
_JOIN_SECONDS = 30.0
_END_SECONDS = 5.0
_RATE_SECONDS = 3.0


@dataclass(frozen=True)
class Rate:
    """What one flow has done. Bytes since the session began; bit/s over the last three seconds."""

    flow: Flow
    sent: int
    received: int
    rate: float


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
    """Start the flows of an environment; they run until the context manager is left.

    Args:
        environment: what to play.
        hosts: the environment's hosts in their order, reached already; they stay open. Without
            them, they are reached as the environment says.
        seconds: the most that anything runs, whatever becomes of this process.
        paused: send nothing before :meth:`Traffic.resume`.
        ssh_config: in place of ``~/.ssh/config``.
        interface: what flows and probe leave the hosts by; None: as the hosts route.
        port: where flows are received on each host; 0: a free one.

    Raises:
        ConfigError: the environment cannot be played.
        UnreachableError: a host cannot be reached, or an address does not answer the hello:
            nothing was sent there.
    """
    if not 0 < seconds <= MOST_SECONDS:
        raise ConfigError(f"{seconds:g} seconds of traffic; expected more than 0, at most 7 days")
    check(environment, "traffic")
    own = hosts is None
    reached = hosts or reach(environment, ssh_config)
    traffic = Traffic(environment, reached, seconds, own=own)
    try:
        traffic.start(interface, port, paused=paused)
    except BaseException:
        traffic.close()
        raise
    return traffic


def reach(environment: Environment, ssh_config: Path | None = None) -> Hosts:
    """The hosts of an environment, by their numbers; reached when they are first asked."""
    ends = [Endpoint(s.name, s.via, s.user, s.port, s.proxy) for s in environment.hosts]
    return Hosts(ends, {"ssh": {"config": ssh_config}})


class Traffic(Closing):
    """Flows at work. Thread-safe but for :meth:`probe`, of which one runs at a time."""

    def __init__(
        self, environment: Environment, hosts: Hosts, seconds: float, *, own: bool
    ) -> None:
        self.environment = environment
        self._hosts, self._own, self._seconds = hosts, own, seconds
        self._key = secrets.token_hex(32)
        self._state = threading.Condition()
        self._stations: list[Station] = []
        self._joined: set[int] = set()
        self._failures: list[str] = []
        self._samples: list[float] = []
        self._probed = True
        self._sent: dict[int, int] = {}
        self._received: dict[int, int] = {}
        self._late: dict[int, float] = {}
        self._marks: dict[int, list[tuple[float, int]]] = {}
        self._closing = threading.Event()
        self._begin = time.monotonic()

    # -- life ---------------------------------------------------------------------------------

    def start(self, interface: str | None, port: int, *, paused: bool) -> None:
        """Start every process, and have them greet each other; see :func:`play`."""
        executors, errors = self._hosts.each(lambda _, host: host)
        require_all(errors, self._hosts.names, "nothing was sent")
        sources = {flow.source for flow in self.environment.flows}
        flowing = sorted(sources | {flow.target for flow in self.environment.flows})
        probing = range(len(self.environment.hosts) if self._is_ring else 2)
        flows = [self._station(executors, n, "flows", interface, port) for n in flowing]
        probe = [self._station(executors, n, "probe", interface, 0) for n in probing]
        self._stations = [*flows, *probe]
        for station in self._stations:
            station.start()
        self._wait(lambda: all(s.ready for s in self._stations), _READY_SECONDS, "started")
        threading.Thread(target=self._renew, name="traffic renewal", daemon=True).start()
        environment = self.environment
        tell_all(
            flows,
            Word(
                "go",
                peers=self._peers(flows, by_flow=True),
                flows=environment.flows,
                pattern=environment.pattern,
                held=paused,
            ),
        )
        tell_all(probe, Word("go", peers=self._peers(probe), probe=environment.probe))
        every = {id(station) for station in self._stations}
        self._wait(lambda: self._joined == every, _JOIN_SECONDS, "met the others")
        ready = [station.ready for station in probe if station.ready]
        told = zip(self._names, (one.congestion for one in ready), strict=False)
        self.environment = replace(environment, congestion=tuple(told))

    def close(self) -> None:
        """End every flow and the probe, and wait until they have ended."""
        if self._closing.is_set():
            return
        self._closing.set()
        deadline = time.monotonic() + _END_SECONDS
        told: set[int] = set()
        # One that has only just been started cannot hear yet.
        while time.monotonic() < deadline:
            left = [one for one in self._stations if not one.ended.is_set()]
            if not left:
                break
            hearing = [one for one in left if one.ready and id(one) not in told]
            told |= {id(one) for one in hearing}
            tell_all(hearing, Word("end"))
            left[0].ended.wait(0.05)
        if self._own:
            self._hosts.close()

    @property
    def _names(self) -> list[str]:
        return [site.name for site in self.environment.hosts]

    @property
    def _is_ring(self) -> bool:
        return self.environment.probe.kind == "ring"

    def _station(
        self,
        executors: dict[int, Executor],
        number: int,
        role: Literal["flows", "probe"],
        interface: str | None,
        port: int,
    ) -> Station:
        site = self.environment.hosts[number]
        order = Order(
            role,
            number,
            self._key,
            self._seconds,
            LEASE_SECONDS,
            port,
            interface,
            site.flow_addr or site.addr,
        )
        return Station(site.name, executors[number], order, self._hear)

    def _peers(self, stations: Sequence[Station], *, by_flow: bool = False) -> tuple[Peer, ...]:
        ports = {one.order.number: one.ready.port for one in stations if one.ready}
        sites = self.environment.hosts[: None if by_flow or self._is_ring else 2]
        addresses = [(s.flow_addr or s.addr) if by_flow else s.addr for s in sites]
        return tuple(Peer(a, ports.get(number, 0)) for number, a in enumerate(addresses))

    def _renew(self) -> None:
        while not self._closing.wait(_RENEW_SECONDS):
            tell_all(self._stations, Word("renew"))

    def _wait(self, done: Callable[[], bool], seconds: float, what: str) -> None:
        """Wait for something, and raise UnreachableError where it does not come or all is over."""
        with self._state:
            self._state.wait_for(lambda: bool(self._failures) or done(), seconds)
            self.check()
            if not done():
                late = [s.name for s in self._stations if not s.ready or id(s) not in self._joined]
                text = ", ".join(dict.fromkeys(late)) or "the probe"
                raise UnreachableError(f"{text}: not {what} within {seconds:g} s")

    def check(self) -> None:
        """Raise :class:`UnreachableError` where a host or a flow was lost."""
        if self._failures:
            raise UnreachableError("\n".join(dict.fromkeys(self._failures)))

    # -- what hosts say -----------------------------------------------------------------------

    def _hear(self, station: Station, said: Said | None) -> None:
        with self._state:
            over = time.monotonic() > self._begin + self._seconds
            if said is None or (said.event == "failed" and over):
                # At its end a host's process loses those that have ended before it.
                if not self._closing.is_set() and not self._failures:
                    why = f"its {self._seconds:g} s are over" if over else "it was ended there"
                    self._failures.append(f"{station.name}: no more traffic: {why}")
            elif said.event == "failed":
                if not self._closing.is_set():
                    self._failures.append(f"{station.name}: {said.text}")
            elif said.event == "joined":
                self._joined.add(id(station))
            elif said.event == "counts":
                self._sent.update(said.sent)
                self._received.update(said.received)
                self._mark(said.received)
                self._late[station.order.number] = said.late
            elif said.event == "samples":
                self._samples.extend(said.samples)
            elif said.event == "probed":
                self._probed = True
            self._state.notify_all()

    def _mark(self, received: Sequence[tuple[int, int]]) -> None:
        """Keep when counts came, for rates."""
        now = time.monotonic()
        for flow, count in received:
            marks = self._marks.setdefault(flow, [])
            marks.append((now, count))
            while now - marks[0][0] > _RATE_SECONDS:
                del marks[0]

    # -- steering -----------------------------------------------------------------------------

    def change(self, pattern: Pattern) -> None:
        """Other bursts, from now on: ``burst``, ``load`` and ``peak`` may differ."""
        check(replace(self.environment, pattern=pattern), "traffic")
        self.environment = replace(self.environment, pattern=pattern, found=None)
        tell_all(self._flows, Word("burst", pattern=pattern))
        self.check()

    def pause(self) -> None:
        """Send nothing until :meth:`resume`."""
        tell_all(self._flows, Word("pause"))

    def resume(self) -> None:
        """Go on sending."""
        tell_all(self._flows, Word("resume"))

    @property
    def _flows(self) -> list[Station]:
        return [station for station in self._stations if station.order.role == "flows"]

    # -- looking ------------------------------------------------------------------------------

    def sample(
        self,
        count: int,
        seconds: float = 60.0,
        watch: Callable[[Sequence[float]], object] | None = None,
    ) -> list[float]:
        """Times of so many operations of the probe, or of as many as ``seconds`` hold (one at
        least). ``watch`` is called some times a second with those that have come.

        Raises:
            UnreachableError: a host was lost.
        """
        with self._state:
            self._samples, self._probed = [], False
        leader = next(s for s in self._stations if s.order.role == "probe" and not s.order.number)
        leader.tell(Word("probe", samples=count, seconds=seconds))
        deadline = time.monotonic() + seconds + 90
        while True:
            with self._state:
                self._state.wait_for(lambda: self._probed or bool(self._failures), 0.25)
                self.check()
                taken, done = list(self._samples), self._probed
            if watch is not None:
                watch(taken)
            if done:
                return taken
            if time.monotonic() > deadline:
                raise UnreachableError(f"{leader.name}: the probe does not come to its end")

    def probe(self, samples: int = PROBE_SAMPLES, seconds: float = 60.0) -> Found:
        """What the probe feels now: its percentiles, and the interval of their ratio. It loads the
        path while it runs, so nothing else is measured meanwhile.

        Raises:
            UnreachableError: a host was lost.
        """
        from flagscale.bench.traffic.statistics import found

        return found(self.sample(samples, seconds), self.environment.pattern.seed)

    def rates(self) -> list[Rate]:
        """What each flow has done until now. Counts come twice a second."""
        with self._state:
            sent, received = dict(self._sent), dict(self._received)
            rates = {flow: _rate(marks) for flow, marks in self._marks.items()}
        return [
            Rate(flow, sent.get(n, 0), received.get(n, 0), rates.get(n, 0.0))
            for n, flow in enumerate(self.environment.flows)
        ]

    @property
    def late(self) -> float:
        """Seconds of bursts that were given up, the path being too slow for the load."""
        return sum(self._late.values())


def _rate(marks: Sequence[tuple[float, int]]) -> float:
    """Bit/s between the first and the last of some counts."""
    (begin, first), (end, last) = marks[0], marks[-1]
    return 8 * (last - first) / (end - begin) if end > begin else 0.0
