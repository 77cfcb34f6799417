"""Hardware check of a job's hosts after a failure, from the replies of their agents. No I/O.

Times named ``now`` are seconds of the coordinator's monotonic clock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from flagscale.health.judgement import Judgement, Severity
from flagscale.health.messages import HealthCommand, HealthEvent
from flagscale.health.passes import READY_SECONDS, PassSteps, measure_in_passes
from flagscale.launcher.liveness.messages import HealthReply, MeasureHealth


class HardwareCheck:
    """A check of several hosts, which the caller drives by :meth:`receive` and :meth:`tick`.

    The caller sends and removes ``orders`` (pairs of a host's number and the order).
    """

    def __init__(self, hosts: Collection[int], first_step: int, name: str, now: float) -> None:
        """Order the hosts to start their workers.

        Args:
            hosts: Numbers of the hosts.
            first_step: Number of the first order, above those of earlier checks.
            name: Name of this check, different from those of earlier ones.
            now: Current time.
        """
        self.orders: list[tuple[int, MeasureHealth]] = []
        self.step = first_step - 1
        """Number of the last orders."""
        self.judgement: Judgement | None = None
        """Result, once the check is over."""
        self._name = name
        self._failures: dict[int, str] = {}
        self._replies: dict[int, HealthEvent] = {}
        self._awaited: set[int] = set()
        self._deadline = now
        self._steps: PassSteps | None = None
        self._send(dict.fromkeys(hosts), READY_SECONDS, now)

    def receive(self, host: int, reply: HealthReply) -> None:
        """Process a reply of a host."""
        if reply.step != self.step or host not in self._awaited:
            return
        self._awaited.discard(host)
        if reply.event is None:
            self._failures[host] = reply.problem or "the check failed there"
        else:
            self._replies[host] = reply.event

    def extend(self, seconds: float) -> None:
        """Give the hosts more time: the coordinator did not run."""
        self._deadline += seconds

    def tick(self, now: float, is_silent: Callable[[int], bool]) -> None:
        """Send the next orders if all hosts have replied, or will not any more.

        Args:
            now: Current time.
            is_silent: Returns whether a host has given no sign of life for too long.
        """
        is_late = now >= self._deadline
        overdue = {host for host in self._awaited if is_late or is_silent(host)}
        for host in overdue:
            self._failures[host] = "no answer"
        self._awaited -= overdue
        if self._awaited or self.judgement is not None:
            return
        try:
            if self._steps is None:
                ready = {h: event for h, event in self._replies.items() if event.kind == "ready"}
                self._steps = measure_in_passes(ready, self._failures, self._name)
                batch = next(self._steps)
            else:
                batch = self._steps.send(self._replies)
        except StopIteration as end:
            self.judgement = end.value.judgement
        else:
            self._send(batch.commands, batch.timeout, now)

    def _send(
        self, commands: Mapping[int, HealthCommand | None], timeout: float, now: float
    ) -> None:
        self.step += 1
        self._replies, self._awaited, self._deadline = {}, set(commands), now + timeout
        orders = ((host, MeasureHealth(self.step, c)) for host, c in sorted(commands.items()))
        self.orders.extend(orders)


def describe_sick_hosts(judgement: Judgement) -> dict[int, str]:
    """Return what is wrong with each sick host."""
    texts: dict[int, list[str]] = {}
    for finding in judgement.findings:
        if finding.severity is Severity.SICK:
            texts.setdefault(finding.host, []).append(f"{finding.check}: {finding.text}")
    return {host: _join_findings(findings) for host, findings in sorted(texts.items())}


def _join_findings(texts: Sequence[str]) -> str:
    more = f", and {len(texts) - 1} more" if len(texts) > 1 else ""
    return f"{texts[0]}{more}"
