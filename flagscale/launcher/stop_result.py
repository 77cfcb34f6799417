"""Result of stopping a run: processes that were killed, hosts that did not answer, lost work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from flagscale.config.command_hints import action_command
from flagscale.errors import FlagscaleError, RunStateError, UnreachableError
from flagscale.files import read_json
from flagscale.hosts.names import compress_names, list_first
from flagscale.hosts.processes import KilledProcesses
from flagscale.launcher.job_hosts import find_job_hosts
from flagscale.launcher.layout import Layout
from flagscale.launcher.snapshot import EventReader
from flagscale.launcher.state import HostState, RunState


@dataclass(frozen=True)
class StopResult:
    """Result of ending a run.

    Attributes:
        ended_processes: Processes that were ended, for each host on which something was alive.
        unreachable: Errors of the hosts that did not answer.
        killed: Ranks that had to be killed, by host, as far as they are known.
        unrecorded: Error that prevented recording the stop in the run's state.
    """

    ended_processes: Mapping[str, KilledProcesses] = field(default_factory=dict)
    unreachable: Sequence[FlagscaleError] = ()
    killed: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    unrecorded: OSError | None = None


def require_stopped(state: RunState, result: StopResult) -> None:
    """Raise an error if the run may still be alive.

    Raises:
        UnreachableError: Some hosts did not answer; the message names them.
        RunStateError: Processes belong to another user or survive SIGKILL.
    """
    if result.unreachable:
        reached_count = len(state.hosts) - len(result.unreachable)
        lines = "\n".join(str(error) for error in result.unreachable)
        raise UnreachableError(
            f"run {state.run_id} may still live on {len(result.unreachable)} host(s) that cannot "
            f"be reached; it was stopped on {reached_count} other(s)\n{lines}",
            hint="stop it again once they answer",
        )
    owners = {
        host: processes for host, processes in result.ended_processes.items() if processes.owner
    }
    if owners:
        owner_names = sorted({processes.owner for processes in owners.values()})
        raise RunStateError(
            f"run {state.run_id} of {state.name} is alive and belongs to "
            f"{' and '.join(owner_names)}, whose processes this user may not end: "
            f"{_format_survivors(owners)}",
            hint=f"stop it as {owner_names[0]}",
        )
    survivors = _format_survivors(result.ended_processes)
    if survivors:
        raise RunStateError(f"run {state.run_id}: these processes survive SIGKILL: {survivors}")


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


def require_recorded(state: RunState, result: StopResult) -> None:
    """Raise RunStateError if the run was ended but its state does not record that."""
    error = result.unrecorded
    if error is not None:
        raise RunStateError(
            f"run {state.run_id} of {state.name} was stopped, but that could not be recorded: "
            f"{error.filename}: {error.strerror}",
            hint=f"free space there before the next run; {action_command('query')} may report this "
            "run as lost or failed",
        )


def killed_ranks(host: HostState, processes: KilledProcesses) -> tuple[int, ...]:
    """Return the ranks of a host that were killed, by the agent (which records it) or after it."""
    pids = set(processes.killed)
    record = host.exit_record()
    if record.get("phase") == "job":
        pids.update(record.get("swept", ()))
    return tuple(sorted(rank for rank, pid in processes.ranks.items() if pid in pids))


def describe_lost_work(state: RunState, result: StopResult, stop_time: float) -> str:
    """Describe the work lost by a stop requested at ``stop_time`` (Unix seconds).

    Empty if all ranks have ended by themselves.
    """
    ranks = sorted(rank for killed in result.killed.values() for rank in killed)
    # On hosts with unknown ranks, count the killed processes.
    unknown_ranks = {
        host: len(processes.killed)
        for host, processes in result.ended_processes.items()
        if processes.killed and not result.killed.get(host)
    }
    parts = []
    if ranks:
        hosts = compress_names(host for host, killed in result.killed.items() if killed)
        parts.append(f"rank{'s' if ranks[1:] else ''} {list_first(ranks)} on {hosts}")
    if unknown_ranks:
        parts.append(
            f"{sum(unknown_ranks.values())} process(es) on {compress_names(unknown_ranks)}"
        )
    if not parts:
        return ""
    verb = "was" if len(ranks) == 1 and not unknown_ranks else "were"
    return (
        f"{' and '.join(parts)} did not end within the {state.stop_grace:g} s of runner.stop_grace "
        f"and {verb} killed; {_describe_saved_checkpoint(state, stop_time)}"
    )


def _describe_saved_checkpoint(state: RunState, stop_time: float) -> str:
    """Describe the checkpoint that was saved after ``stop_time``, if any."""
    events = EventReader(find_job_hosts(state).members).refresh()
    rows = [row for rows in events.values() for row in rows if row.event == "checkpoint"]
    steps = [row.get("step") for row in rows if row.time >= stop_time]
    if steps:
        return f"the checkpoint of step {steps[-1]} was saved on the way"
    # Only this project's program is known to report every checkpoint.
    return "what was not saved is lost" if state.external else "no checkpoint was saved on the way"
