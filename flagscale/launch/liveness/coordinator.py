"""What the job as a whole does: the one place that sees every host.

Pure: messages and the time come in, orders and notices come out, and nothing here waits. A host's
messages are hints from a program of ours, so an odd one is passed over, never an error.

An attempt runs until its first failure. Then every host is told to end it (or, with
``on_failure: leave``, is left alone), and when each has ended, or is lost, the cause is chosen from
all reports and the job starts once more, everywhere, or is over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

from flagscale.launch.liveness.diagnosis import Failure, Report, Severity, first_of
from flagscale.launch.liveness.policy import Policy
from flagscale.launch.liveness.protocol import Message
from flagscale.launch.liveness.stall import Place, stalled_report

BACK_OFF_SECONDS = 1.0
MAX_BACK_OFF_SECONDS = 60.0
# How long ranks have to write their stacks before the one that is behind is named without them.
STACK_SECONDS = 6.0


class Phase(str, Enum):
    """What the job is doing."""

    RUNNING = "running"
    ENDING = "ending"
    WAITING = "waiting"
    STOPPING = "stopping"
    OVER = "over"


@dataclass
class Host:
    """What is known of a host in this attempt. Times are the coordinator's monotonic clock."""

    name: str
    heard: float | None = None
    state: str = "absent"
    joined: int = 0
    nproc: int = 0
    moves: int = -1
    busy: bool = False
    ended: int | None = None
    lost: bool = False
    offset: float | None = None
    """What to add to this host's Unix time to get the coordinator's monotonic time."""
    places: list[Place] | None = None

    @property
    def over(self) -> bool:
        return self.lost or self.ended is not None


@dataclass(frozen=True)
class Notice:
    """Something that people want to be told of."""

    event: str
    attempt: int
    failure: Failure | None = None


@dataclass
class Orders:
    """What is to be sent: ``(host, message)``, host None for all."""

    out: list[tuple[int | None, Message]] = field(default_factory=list)

    def add(self, kind: str, host: int | None = None, **fields: Any) -> None:
        self.out.append((host, {"kind": kind, **fields}))

    def take(self) -> list[tuple[int | None, Message]]:
        taken, self.out = self.out, []
        return taken


def unreached(port: int | None) -> str:
    """Why agents may not have met: nobody can look at a firewall between them."""
    if port is None:
        return ""
    return (
        f" at port {port} of the first host (experiment.runner.liveness_port): an agent did not "
        "start, or a firewall drops the port"
    )


class Coordinator:
    """The state of a job. ``verdict`` is set when it is over. ``port`` is where hosts report;
    ``output`` is host 0's, for failures that have no log of their own."""

    def __init__(
        self,
        policy: Policy,
        names: Sequence[str],
        now: float,
        output: Path,
        port: int | None = None,
    ) -> None:
        self.policy = policy
        self._output = output
        self._port = port
        self.hosts = [Host(name) for name in names]
        self.phase = Phase.RUNNING
        self.attempt = 0
        self.orders = Orders()
        self.notices: list[Notice] = []
        self.failure: Failure | None = None
        self._cause: dict[str, Any] | None = None
        self.restarts: list[dict[str, Any]] = []
        self._reports: list[Report] = []
        self._began = now
        self._expected: float | None = None
        self._ticked = now
        self._moved = now
        self._beat_at = now
        self._restart_at = 0.0
        self._dumped_at: float | None = None
        self._fruitful = False
        self._reports_status = False
        self._never_joined = 0

    # -- messages ---------------------------------------------------------------------------

    def receive(self, number: int, message: Mapping[str, Any], now: float) -> None:
        """A message of a host."""
        if not 0 <= number < len(self.hosts):
            return
        host = self.hosts[number]
        if host.lost:
            # Back too late: the job has been ended without it.
            self.orders.add("finish", number, failure=self._record())
            return
        host.heard = now
        sent = message.get("sent")
        if isinstance(sent, int | float):
            offset = now - sent
            host.offset = offset if host.offset is None else min(host.offset, offset)
        kind = message.get("kind")
        if kind == "stopping":
            cause = Failure.from_record(message.get("failure"))
            self._stop(_whole(message.get("signal"), 15), cause)
        if message.get("attempt") != self.attempt:
            if kind == "hello":
                self._catch_up(number)
            return
        if kind in ("hello", "beat", "ended"):
            self._update(host, message, now)
        report = Report.from_record(message.get("report"))
        if report is not None:
            self._add(host, report, now)
        if kind == "stacks" and isinstance(message.get("ranks"), list):
            host.places = [p for r in message["ranks"] if (p := Place.from_record(host.name, r))]
        if isinstance(message.get("ended"), int) and host.ended is None:
            host.ended = message["ended"]
            if host.ended and report is None and self.phase is Phase.RUNNING:
                self._fail()
        if kind == "hello":
            self._catch_up(number)

    def _update(self, host: Host, message: Mapping[str, Any], now: float) -> None:
        host.state = str(message.get("state", host.state))
        host.joined = _whole(message.get("joined"))
        host.nproc = _whole(message.get("nproc"))
        host.busy = bool(message.get("busy"))
        moves = _whole(message.get("moves"))
        if moves != host.moves:
            host.moves, self._moved, self._dumped_at = moves, now, None
        self._reports_status |= host.joined > 0
        self._fruitful |= host.joined > 0 or bool(message.get("lived"))

    def _add(self, host: Host, report: Report, now: float) -> None:
        if self.phase is Phase.STOPPING:
            return
        moment = report.time + host.offset if host.offset is not None else now
        shifted = replace(report, time=min(moment, now))
        # What a host reports later of the same rank knows more: the exit code, say.
        same = (report.failure.host, report.failure.rank)
        kept = [r for r in self._reports if (r.failure.host, r.failure.rank) != same]
        self._reports = [*kept, shifted]
        self._choose()
        self._fail()

    def _choose(self) -> None:
        first = first_of(self._reports)
        self.failure = first.failure if first else None

    def _catch_up(self, number: int) -> None:
        """Tell a host that was away what it has missed."""
        if self.phase is Phase.STOPPING:
            self.orders.add("stop", number, signal=15, failure=self._cause)
        elif self.phase is Phase.ENDING and not self.hosts[number].over:
            self.orders.add("end", number, attempt=self.attempt, failure=self._record())
        elif self.phase is Phase.RUNNING and self.attempt:
            self.orders.add("start", number, attempt=self.attempt)
        elif self.phase is Phase.OVER:
            self.orders.add("finish", number, failure=self._record())

    # -- time -------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Look at the clock. To be called several times a second."""
        self._forgive(now)
        if now - self._beat_at >= self.policy.beat_seconds:
            self._beat_at = now
            self.orders.add("beat")
        if self.phase is Phase.OVER:
            return
        self._look_for_lost(now)
        if self.phase is Phase.RUNNING:
            self._look_for_stall(now)
        if self.phase is Phase.WAITING:
            if now >= self._restart_at:
                self._start(now)
        elif all(host.over for host in self.hosts):
            self._conclude(now)

    def _forgive(self, now: float) -> None:
        """Time in which this process itself did not run counts against nobody."""
        gap = now - self._ticked
        self._ticked = now
        if gap > self.policy.beat_seconds * 2:
            self._moved += gap
            for host in self.hosts:
                if host.heard is not None:
                    host.heard += gap

    def _look_for_lost(self, now: float) -> None:
        # Once ranks have joined, the agents of all hosts have been there; and an end waits for
        # nobody who takes his time to start.
        if self._expected is None and (self._reports_status or self.phase is not Phase.RUNNING):
            self._expected = now
        for number, host in enumerate(self.hosts):
            if number == 0 or host.over:
                continue
            if host.heard is None:
                self._look_for_absent(host, now)
            elif now - host.heard > self.policy.lost_host_timeout:
                seconds = self.policy.lost_host_timeout
                reason = f"was lost: no word from its agent for {seconds:g} s"
                self._lose(host, reason, host.heard)

    def _look_for_absent(self, host: Host, now: float) -> None:
        start, silence = self.policy.start_timeout, self.policy.lost_host_timeout
        if now - self._began > start:
            reason = f"did not report within {start:g} s of the start{unreached(self._port)}"
            self._lose(host, reason, now)
        elif self._expected is not None and now - self._expected > silence:
            reason = f"was lost: no word from its agent for {silence:g} s"
            self._lose(host, reason, self._expected)

    def _lose(self, host: Host, reason: str, moment: float) -> None:
        host.lost, host.state = True, "lost"
        if self.phase is Phase.STOPPING:
            return
        failure = Failure(host.name, None, None, reason, "", self._output)
        self._reports.append(Report(failure, moment, Severity.LOST))
        self._choose()
        self._fail()

    def _look_for_stall(self, now: float) -> None:
        alive = [host for host in self.hosts if not host.over]
        if not alive or any(not host.nproc or host.joined < host.nproc for host in alive):
            self._look_for_late_start(alive, now)
            return
        limit = self.policy.stall_limit(busy=any(host.busy for host in alive))
        if limit is None or now - self._moved <= limit:
            return
        if self._dumped_at is None:
            self._dumped_at = now
            for host in alive:
                host.places = None
            self.orders.add("dump", attempt=self.attempt)
            return
        if all(host.places is not None for host in alive) or (
            now - self._dumped_at > STACK_SECONDS
        ):
            places = [place for host in alive for place in host.places or ()]
            report = stalled_report(places, now - self._moved, alive[0].name, self._output)
            self._dumped_at = None
            self._reports.append(replace(report, time=now))
            self._choose()
            self.notices.append(Notice("stalled", self.attempt, report.failure))
            self._fail()

    def _look_for_late_start(self, alive: Sequence[Host], now: float) -> None:
        """Nobody waits at a launcher for the ranks of a restart to join."""
        late = now - self._moved > self.policy.start_timeout
        if not self.attempt or not self._reports_status or not late:
            return
        host = min(alive, key=lambda host: host.joined - host.nproc)
        reason = f"has ranks that did not join within {self.policy.start_timeout:g} s of a restart"
        failure = Failure(host.name, None, None, reason, "", self._output)
        self._reports.append(Report(failure, now, Severity.UNNAMED))
        self._choose()
        self._fail()

    # -- decisions --------------------------------------------------------------------------

    def _fail(self) -> None:
        if self.phase is Phase.RUNNING and self.policy.on_failure == "stop":
            self.phase = Phase.ENDING
            self.orders.add("end", attempt=self.attempt, failure=self._record())

    def _stop(self, number: int, cause: Failure | None) -> None:
        """A host was told to stop: the whole job stops, and is not started again. ``cause``: what
        failed there, where nobody asked for the stop."""
        if self.phase in (Phase.STOPPING, Phase.OVER):
            return
        self.phase = Phase.STOPPING
        if cause is not None:
            self.failure = cause
            self._cause = cause.to_record()
        self.orders.add("stop", signal=number, failure=self._cause)

    def _conclude(self, now: float) -> None:
        """Every host has ended this attempt, or is lost."""
        failed = any(host.lost or host.ended for host in self.hosts)
        if self.phase is Phase.STOPPING:
            failed_by = Notice("failed", self.attempt, self.failure)
            self._finish(failed_by if self._cause is not None else None)
        elif not failed and not self._reports:
            self._finish(Notice("finished", self.attempt))
        elif self._may_restart():
            self.phase = Phase.WAITING
            wait = min(BACK_OFF_SECONDS * 2 ** len(self.restarts), MAX_BACK_OFF_SECONDS)
            self._restart_at = now + wait
            self.restarts.append({"attempt": self.attempt, "failure": self._record()})
            self.notices.append(Notice("restarted", self.attempt + 1, self.failure))
        else:
            self._finish(Notice("failed", self.attempt, self.failure))

    def _may_restart(self) -> bool:
        """Whether another attempt is left and makes sense: not where a host is lost, and not
        where the job has never got as far as joining, or twice in a row not."""
        self._never_joined = 0 if self._fruitful else self._never_joined + 1
        first_never_joined = self._never_joined > 0 and self._never_joined == self.attempt + 1
        return (
            self.attempt + 1 < self.policy.attempts
            and not any(host.lost for host in self.hosts)
            and not first_never_joined
            and self._never_joined < 2
        )

    def _start(self, now: float) -> None:
        self.attempt += 1
        self.phase = Phase.RUNNING
        self._reports, self.failure, self._fruitful = [], None, False
        self._dumped_at, self._moved = None, now
        for host in self.hosts:
            host.ended, host.joined, host.busy, host.moves = None, 0, False, -1
            host.state = "starting"
        self.orders.add("start", attempt=self.attempt)

    def _finish(self, notice: Notice | None) -> None:
        self.phase = Phase.OVER
        if notice is not None:
            self.notices.append(notice)
        self.orders.add("finish", failure=self._record())

    def _record(self) -> dict[str, Any] | None:
        return self.failure.to_record() if self.failure is not None else None

    def summary(self) -> dict[str, Any]:
        """What ``query`` shows of the job: small, and equal while nothing has happened."""
        return {
            "phase": self.phase.value,
            "attempt": self.attempt + 1,
            "attempts": self.policy.attempts,
            "failure": self._record(),
            "hosts": {str(n): host.state for n, host in enumerate(self.hosts)},
            "restarts": list(self.restarts),
        }


def _whole(value: object, otherwise: int = 0) -> int:
    return value if isinstance(value, int) else otherwise
