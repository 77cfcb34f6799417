"""A simulated job for tests of the coordinator, second by second, without processes or sockets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flagscale.launcher.liveness.coordinator import Coordinator
from flagscale.launcher.liveness.diagnosis import Failure, FailureKind, FailureReport
from flagscale.launcher.liveness.messages import (
    AttemptEnded,
    DumpStacks,
    Heartbeat,
    HostMessage,
    HostProgress,
    HostStatus,
    JobState,
    JobStateAccepted,
    KeepAlive,
    Order,
    RankFailed,
    RankProgress,
    RankStacks,
    ShareJobState,
)
from flagscale.launcher.liveness.options import Policy

PROGRESS = HostProgress(
    status=HostStatus.RUNNING,
    joined=1,
    nproc=1,
    progress_count=0,
    in_busy_activity=False,
    has_run_long=False,
    exit_code=None,
    failure_report=None,
)
NOTIFIED_EVENTS = ("failed", "stalled", "restarted", "finished", "stopped")
SPARE = {"joined": 0, "nproc": 0, "status": HostStatus.SPARE}


class Job:
    """Simulated job: hosts that send heartbeats, and messages of the test."""

    def __init__(
        self, hosts: int = 2, *, mesh_positions: Sequence[str] = (), **policy: Any
    ) -> None:
        defaults: dict[str, Any] = {"max_restarts": 0, "on_failure": "stop"}
        defaults |= {
            "lost_host_timeout": 10.0,
            "start_timeout": 100.0,
            "hang_detection_timeout": 50.0,
        }
        self.names = [f"h{n}" for n in range(hosts)]
        self.now = 1000.0
        saves_when_stopped = policy.pop("saves_when_stopped", False)
        job_policy = Policy(**{**defaults, **policy})
        self.coordinator = Coordinator(
            job_policy,
            self.names,
            self.now,
            Path("out"),
            mesh_positions=mesh_positions,
            saves_when_stopped=saves_when_stopped,
        )
        self.silent: set[int] = set()
        self.moving = True
        self.fields: dict[int, dict[str, Any]] = {n: {} for n in range(hosts)}
        self.progress_count = 0
        self.orders: list[tuple[int | None, Order]] = []
        self.job_state: JobState | None = None
        self.notified_events: list[str] = []
        self.remarks: list[str] = []
        self.clock = {n: 5_000_000.0 * n for n in range(hosts)}

    def send(self, kind: type[HostMessage], host: int, *content: Any, attempt: int = -1) -> None:
        """Send a message of the current attempt, or of another one."""
        number = self.coordinator.attempt if attempt < 0 else attempt
        self.coordinator.receive(
            host, kind(host, number, self.clock[host] + self.now, *content), self.now
        )

    def progress(self, host: int, **fields: Any) -> HostProgress:
        changes = {"progress_count": self.progress_count, **self.fields[host], **fields}
        return replace(PROGRESS, **changes)

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds)):
            self.now += 1
            self.progress_count += self.moving
            for host in range(len(self.names)):
                if host not in self.silent:
                    self.send(Heartbeat, host, self.progress(host))
            self.coordinator.tick(self.now)
            self.collect()

    def collect(self) -> None:
        orders = list(self.coordinator.orders)
        self.coordinator.orders.clear()
        for receiver, order in orders:
            if isinstance(order, ShareJobState):
                self._accept_state(receiver, order.job_state)
            elif not isinstance(order, KeepAlive):
                self.orders.append((receiver, order))
        notices = self.coordinator.notices
        self.notified_events += [n.event for n in notices if n.event in NOTIFIED_EVENTS]
        self.remarks += [notice.remark for notice in notices if notice.remark]
        self.coordinator.notices.clear()

    def _accept_state(self, receiver: int | None, state: JobState) -> None:
        self.job_state = state
        for host in range(len(self.names)):
            if host not in self.silent and receiver in (None, host):
                self.send(JobStateAccepted, host, *state.version)

    def send_failure(
        self, host: int, rank: int, kind: FailureKind = FailureKind.RANK_FAILED, after: float = 0.0
    ) -> None:
        failure = Failure(self.names[host], rank, 1, "failed", "", Path("log"))
        report = FailureReport(failure, self.clock[host] + self.now + after, kind)
        self.send(RankFailed, host, report)

    def send_end(self, host: int, code: int = 1, **fields: Any) -> None:
        progress = self.progress(host, **{"joined": 1, "exit_code": code, **fields})
        self.send(AttemptEnded, host, progress)

    def send_stacks(self, host: int, *ranks: RankProgress) -> None:
        """Reply to the last order for stacks of this attempt."""
        requests = [order.request for _, order in self.orders if isinstance(order, DumpStacks)]
        self.send(RankStacks, host, ranks, requests[-1])

    def order_types(self) -> list[type[Order]]:
        return [type(order) for _, order in self.orders]

    @property
    def first_failed_rank(self) -> tuple[str, int | None]:
        assert self.coordinator.failure is not None
        return self.coordinator.failure.host, self.coordinator.failure.rank


def lose(job: Job, host: int, survivors: Sequence[int]) -> None:
    """Lose a host: the ranks of the others fail, and its agent is silent."""
    job.silent.add(host)
    job.send_failure(survivors[0], survivors[0])
    job.run(2)
    for number in survivors:
        job.send_end(number)
    job.run(14)
