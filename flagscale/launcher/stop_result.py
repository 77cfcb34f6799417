"""Result of stopping a run: processes that were killed, hosts that did not answer, lost work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from flagscale.errors import FlagscaleError, RunStateError, UnreachableError
from flagscale.files import read_json
from flagscale.hosts.names import compress_names, list_first
from flagscale.hosts.processes import KilledProcesses
from flagscale.launcher.layout import Layout
from flagscale.launcher.snapshot import EventReader
from flagscale.launcher.state import HostState, RunState


@dataclass(frozen=True)
class StopResult:
    """Result of ending a run.

    ``swept`` has the processes that were ended, for each host on which something was alive.
    ``unreachable`` are the errors of hosts that could not be asked. ``killed`` are the ranks per
    host that had to be killed, where they are known. ``unrecorded`` is the error that prevented the
    stop from being recorded in the run's state.
    """

    ended_processes: Mapping[str, KilledProcesses] = field(default_factory=dict)
    unreachable: Sequence[FlagscaleError] = ()
    killed: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    unrecorded: OSError | None = None


def require_stopped(state: RunState, stopped: StopResult) -> None:
    """Raise an error if the run may still be alive.

    Raises:
        UnreachableError: names the hosts that could not be asked.
        RunStateError: processes belong to another user or survive SIGKILL.
    """
    if stopped.unreachable:
        reached = len(state.hosts) - len(stopped.unreachable)
        lines = "\n".join(str(error) for error in stopped.unreachable)
        raise UnreachableError(
            f"run {state.run_id} may still live on {len(stopped.unreachable)} host(s) that cannot "
            f"be reached; it was stopped on {reached} other(s)\n{lines}",
            hint="stop it again once they answer",
        )
    owners = {host: swept for host, swept in stopped.ended_processes.items() if swept.owner}
    if owners:
        whose = sorted({swept.owner for swept in owners.values()})
        raise RunStateError(
            f"run {state.run_id} of {state.name} lives and is {' and '.join(whose)}'s, whose "
            f"processes this user may not end: {_format_survivors(owners)}",
            hint=f"stop it as {whose[0]}",
        )
    survivors = _format_survivors(stopped.ended_processes)
    if survivors:
        raise RunStateError(f"run {state.run_id}: these processes survive a KILL: {survivors}")


def _format_survivors(ended_processes: Mapping[str, KilledProcesses]) -> str:
    """Format the pids of surviving processes by host."""
    hosts = (
        f"{host}: {', '.join(map(str, s.survivors))}"
        for host, s in ended_processes.items()
        if s.survivors
    )
    return "; ".join(hosts)


def record_stop(state: RunState) -> OSError | None:
    """Record the stop in the run's state, unless another run has replaced it; return the error, if
    any.

    This is done before any signal is sent, so that an observer sees a stop and not a failure. A
    full disk must not keep the run alive, so recording is tried again afterwards.
    """
    path = Layout(state.exp_dir).state
    try:
        record = read_json(path)
        if record is not None and record.get("run_id") == state.run_id:
            state.save(path)
    except OSError as error:
        return error
    return None


def require_recorded(state: RunState, stopped: StopResult) -> None:
    """Raise RunStateError if the run was ended but its state does not record that."""
    error = stopped.unrecorded
    if error is not None:
        raise RunStateError(
            f"run {state.run_id} of {state.name} was stopped, but that could not be recorded: "
            f"{error.filename}: {error.strerror}",
            hint="make room there before the next run; action=query may call this one lost or "
            "failed",
        )


def killed_ranks(host: HostState, processes: KilledProcesses) -> tuple[int, ...]:
    """Return the ranks of a host that were killed, by the agent (which records it) or after it."""
    pids = set(processes.killed)
    record = host.exit_record()
    if record.get("phase") == "job":
        pids.update(record.get("swept", ()))
    return tuple(sorted(rank for rank, pid in processes.ranks.items() if pid in pids))


def describe_lost_work(state: RunState, stopped: StopResult, since: float) -> str:
    """Describe the work lost by a stop requested at ``since`` (Unix seconds).

    Empty if all ranks have ended by themselves.
    """
    ranks = sorted(rank for killed in stopped.killed.values() for rank in killed)
    # On hosts with unknown ranks, count the killed processes.
    unknown_ranks = {
        host: len(swept.killed)
        for host, swept in stopped.ended_processes.items()
        if swept.killed and not stopped.killed.get(host)
    }
    parts = []
    if ranks:
        hosts = compress_names(host for host, killed in stopped.killed.items() if killed)
        parts.append(f"rank{'s' if ranks[1:] else ''} {list_first(ranks)} on {hosts}")
    if unknown_ranks:
        parts.append(
            f"{sum(unknown_ranks.values())} process(es) on {compress_names(unknown_ranks)}"
        )
    if not parts:
        return ""
    were = "was" if len(ranks) == 1 and not unknown_ranks else "were"
    return (
        f"{' and '.join(parts)} did not end within the {state.stop_grace:g} s of runner.stop_grace "
        f"and {were} killed; {_describe_saved_checkpoint(state, since)}"
    )


def _describe_saved_checkpoint(state: RunState, since: float) -> str:
    """Describe the checkpoint that was saved after ``since``, if any."""
    events = EventReader(state.hosts).refresh()
    rows = [row for rows in events.values() for row in rows if row.event == "checkpoint"]
    steps = [row.get("step") for row in rows if row.time >= since]
    if steps:
        return f"the checkpoint of step {steps[-1]} was saved on the way"
    # Only this project's program is known to report every checkpoint.
    return "what was not saved is lost" if state.external else "no checkpoint was saved on the way"
