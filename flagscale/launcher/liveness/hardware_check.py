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
    """A check of several hosts.

    All hosts get an order in each step of the check, and the next step begins when all have replied
    or failed. The caller passes on their replies (:meth:`receive`), calls :meth:`tick` regularly,
    and sends and removes ``orders``, pairs of a host and its order, until there is a ``judgement``.
    """

    def __init__(self, hosts: Collection[int], first_step: int, name: str, now: float) -> None:
        """Begin with the first step, in which the hosts start their workers.

        Args:
            hosts: Numbers of the hosts.
            first_step: Number of the first step, above those of earlier checks.
            name: Name of this check, different from those of earlier ones.
            now: Current time.
        """
        self.orders: list[tuple[int, MeasureHealth]] = []
        self.step = first_step - 1
        """Number of the last step that has begun. Replies have it, too."""
        self.judgement: Judgement | None = None
        """Result, once the check is over."""
        self._name = name
        self._failures: dict[int, str] = {}
        """Reasons why hosts take no further part. :func:`measure_in_passes` reads it in each step.
        """
        self._replies: dict[int, HealthEvent] = {}
        """Replies to the current step."""
        self._awaited: set[int] = set()
        """Hosts whose reply to the current step is missing."""
        self._passes: PassSteps | None = None
        """The steps after the first one; None before the first one is over."""
        # An order without a command starts the worker.
        self._begin_step(dict.fromkeys(hosts), now + READY_SECONDS)

    def receive(self, host: int, reply: HealthReply) -> None:
        """Process a reply of a host. Replies to earlier steps came too late and are ignored."""
        if reply.step != self.step or host not in self._awaited:
            return
        self._awaited.discard(host)
        if reply.event is None:
            self._failures[host] = reply.problem or "the check failed there"
        elif self._passes is None and reply.event.kind != "ready":
            # Only an agent of another version sends it. No host may vanish from the result.
            self._failures[host] = f"unexpected reply to the start: {reply.event.kind}"
        else:
            self._replies[host] = reply.event

    def extend(self, seconds: float) -> None:
        """Move the deadline by the time in which the coordinator itself did not run."""
        self._deadline += seconds

    def tick(self, now: float, is_silent: Callable[[int], bool]) -> None:
        """Begin the next step, or end the check, if no reply is awaited any more.

        Args:
            now: Current time.
            is_silent: Returns whether a host has given no sign of life for too long.
        """
        is_late = now >= self._deadline
        overdue = {host for host in self._awaited if is_late or is_silent(host)}
        self._failures |= dict.fromkeys(overdue, "no answer")
        self._awaited -= overdue
        if self._awaited or self.judgement is not None:
            return
        try:
            if self._passes is None:
                self._passes = measure_in_passes(self._replies, self._failures, self._name)
                batch = next(self._passes)
            else:
                batch = self._passes.send(self._replies)
        except StopIteration as end:
            self.judgement = end.value.judgement
        else:
            self._begin_step(batch.commands, now + batch.timeout)

    def _begin_step(self, commands: Mapping[int, HealthCommand | None], deadline: float) -> None:
        """Add an order for each host that has a command, and await the replies."""
        self.step += 1
        self._deadline = deadline
        self._replies, self._awaited = {}, set(commands)
        self.orders += [
            (host, MeasureHealth(self.step, command)) for host, command in sorted(commands.items())
        ]


def describe_sick_hosts(judgement: Judgement) -> dict[int, str]:
    """Return the reasons why hosts are sick, by host."""
    texts: dict[int, list[str]] = {}
    for finding in judgement.findings:
        if finding.severity is Severity.SICK:
            texts.setdefault(finding.host, []).append(f"{finding.check}: {finding.text}")
    return {host: _summarize_findings(findings) for host, findings in sorted(texts.items())}


def _summarize_findings(texts: Sequence[str]) -> str:
    """Return the first finding, and the number of the others."""
    more = f", and {len(texts) - 1} more" if len(texts) > 1 else ""
    return f"{texts[0]}{more}"
