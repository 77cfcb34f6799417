"""Coordinator's record of each host, notices of events, and detection of the slowest rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flagscale.launcher.liveness.diagnosis import Failure, FailureKind, FailureReport, host_failure
from flagscale.launcher.liveness.hang import HangFinding, format_clock
from flagscale.launcher.liveness.messages import HostStatus, RankExit, RankProgress

_MAX_LISTED_RANKS = 4


@dataclass
class JobHost:
    """Status of a host in this attempt; times are seconds of the coordinator's monotonic clock.

    ``status`` to ``overdue_since`` are copied from the host's last
    :class:`~.messages.HostProgress`.
    """

    name: str
    mesh_position: str = ""
    """Position of the host's ranks in the heterogeneous meshes; empty for a homogeneous run."""
    last_message_at: float | None = None
    status: HostStatus = HostStatus.ABSENT
    joined: int = 0
    nproc: int = 0
    progress_count: int = -1
    in_busy_activity: bool = False
    ended_ranks: int = 0
    early_exits: tuple[RankExit, ...] = ()
    overdue_since: float | None = None
    exit_code: int | None = None
    """Exit code of the host's part of the attempt; None while it runs."""
    is_lost: bool = False
    sickness: str = ""
    """Reason for which it has left the job, if a check found its hardware sick."""
    loss: Failure | None = None
    """Reason for which it is lost or sick."""
    returned_at: float | None = None
    """Time at which it has come back after it was lost; None once it is in the job."""
    clock_offset: float | None = None
    """Difference between the coordinator's monotonic time and this host's Unix time, in seconds."""
    rank_stacks: tuple[RankProgress, ...] | None = None
    """Progress and stack of each rank, in reply to the last request; None until it arrives."""

    last_records: tuple[RankProgress, ...] = ()
    """Ranks that wrote their flight record when they failed."""
    finished_ranks: tuple[int, ...] = ()
    """Ranks that ended with exit code 0 in an attempt that failed here, as far as it is known."""

    @property
    def has_left(self) -> bool:
        """True if the job does not use it any more."""
        return self.is_lost or bool(self.sickness)


@dataclass(frozen=True)
class Notice:
    """Event for notifications: ``failed``, ``finished``, ``stopped``, ``stalled`` or
    ``restarted``; or ``early-exit``, ``hang``, ``health`` or ``succession``, which are only logged.

    The first three end the job. ``remark`` is a line for the host's output.
    """

    event: str
    attempt: int
    failure: Failure | None = None
    remark: str = ""


def describe_mesh_position(mesh_position: str) -> str:
    """Return the end of a message about a lost host, with the position of its ranks."""
    return f"; it held {mesh_position}" if mesh_position else ""


def explain_missing_agents(port: int | None) -> str:
    """Return the possible reasons why an agent did not connect to this port. A firewall between
    hosts cannot be detected directly.
    """
    if port is None:
        return ""
    return (
        f" at port {port} of the first host (experiment.runner.liveness_port): an agent did not "
        "start, or a firewall drops the port"
    )


def describe_early_exits(exits: Sequence[RankExit]) -> str:
    """Return ``rank 3 ended with exit code 0 at 14:02:11``, or the same of several ranks."""
    exits = sorted(exits, key=lambda rank_exit: rank_exit.time)
    clock = format_clock(exits[0].time)
    numbers = [str(r) for r in sorted(exit_.rank for exit_ in exits[:_MAX_LISTED_RANKS])]
    if len(exits) == 1:
        return f"rank {numbers[0]} ended with exit code 0 at {clock}"
    if len(exits) > _MAX_LISTED_RANKS:
        numbers.append("others")
    listed = f"{', '.join(numbers[:-1])} and {numbers[-1]}"
    return f"ranks {listed} ended with exit code 0 from {clock} on"


def find_straggler(ranks: Sequence[RankProgress]) -> RankProgress | None:
    """Return the rank that the others wait for; None without ranks.

    Ranks are compared by the lowest step, then a stopped process, then one that does not answer
    although others do, then one whose stack does not wait for another rank.
    """
    if not ranks:
        return None
    min_step = min((rank.step for rank in ranks if rank.step is not None), default=None)
    slowest = [rank for rank in ranks if min_step is None or rank.step == min_step]
    return min(slowest, key=lambda rank: (not rank.stopped, rank.answered, rank.waits, rank.rank))


def stalled_report(
    ranks: Sequence[RankProgress],
    stalled_seconds: float,
    host: str,
    output: Path,
    finding: HangFinding | None = None,
) -> FailureReport:
    """Return the report of a job without progress for ``stalled_seconds``.

    Args:
        host: Host to report if there are no ranks.
        output: Log to report if there are no ranks.
        finding: Cause of the stall, if it is known.

    Returns:
        A report whose time the caller has to set.
    """
    if finding is not None:
        remark = f"stalled: no rank has made progress for {stalled_seconds:.0f} s"
        return explained_report(finding, ranks, remark, output)
    straggler = find_straggler(ranks)
    if straggler is None:
        reason = f"stalled: no rank has made progress for {stalled_seconds:.0f} s"
        return FailureReport(
            host_failure(host, reason, output),
            0.0,
            FailureKind.PROCESS_KILLED,
        )
    reason = (
        f"stalled: no rank has made progress for {stalled_seconds:.0f} s, and this one is behind"
    )
    if straggler.doing:
        reason += f" {straggler.doing}"
    if straggler.step is not None:
        reason += f" at step {straggler.step}"
    if straggler.stopped:
        reason += "; its process is stopped (SIGSTOP)"
    elif not straggler.answered:
        reason += "; it did not report its stack"
    elif straggler.place:
        reason += f"; it is in {straggler.place}"
    failure = Failure(
        straggler.host,
        rank=straggler.rank,
        exit_code=None,
        reason=reason,
        traceback=straggler.stack,
        log=straggler.log,
    )
    return FailureReport(failure, 0.0, FailureKind.PROCESS_KILLED)


def explained_report(
    finding: HangFinding, ranks: Sequence[RankProgress], remark: str, output: Path
) -> FailureReport:
    """Return the report of a hang whose cause is known from the flight records. The caller has to
    set its time.
    """
    progress = next((rank for rank in ranks if rank.rank == finding.rank), None)
    failure = Failure(
        finding.host,
        rank=finding.rank,
        exit_code=None,
        reason=f"{finding.reason} ({remark})",
        traceback=progress.stack if progress is not None else "",
        log=progress.log if progress is not None else output,
    )
    return FailureReport(failure, 0.0, FailureKind.PROCESS_KILLED)
