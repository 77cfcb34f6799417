"""What ending a run took, what it has cost, and what there is to say where it did not end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from flagscale.errors import FlagscaleError, RunStateError, UnreachableError
from flagscale.files import read_json
from flagscale.hosts.names import compress, some
from flagscale.hosts.processes import Swept
from flagscale.launcher.layout import Layout
from flagscale.launcher.snapshot import EventReader
from flagscale.launcher.state import HostState, RunState


@dataclass(frozen=True)
class Stopped:
    """What ending a run took: for each host on which something lived, what was ended there, and
    the hosts that could not be asked. ``killed``: the ranks, by host, that had to be killed, where
    they are known; ``unrecorded``: why the run's state does not tell of the stop."""

    swept: Mapping[str, Swept] = field(default_factory=dict)
    unreachable: Sequence[FlagscaleError] = ()
    killed: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    unrecorded: OSError | None = None


def require_stopped(state: RunState, stopped: Stopped) -> None:
    """Raise where a run may still live: :class:`UnreachableError` naming the hosts that could not
    be asked, :class:`RunStateError` the processes that are another user's or survive a KILL."""
    if stopped.unreachable:
        asked = len(state.hosts) - len(stopped.unreachable)
        lines = "\n".join(str(error) for error in stopped.unreachable)
        raise UnreachableError(
            f"run {state.run_id} may still live on {len(stopped.unreachable)} host(s) that cannot "
            f"be reached; it was stopped on {asked} other(s)\n{lines}",
            hint="stop it again once they answer",
        )
    owners = {host: swept for host, swept in stopped.swept.items() if swept.owner}
    if owners:
        whose = sorted({swept.owner for swept in owners.values()})
        raise RunStateError(
            f"run {state.run_id} of {state.name} lives and is {' and '.join(whose)}'s, whose "
            f"processes this user may not end: {_left(owners)}",
            hint=f"stop it as {whose[0]}",
        )
    survivors = _left(stopped.swept)
    if survivors:
        raise RunStateError(f"run {state.run_id}: these processes survive a KILL: {survivors}")


def _left(swept: Mapping[str, Swept]) -> str:
    """The pids of what is left, by host."""
    hosts = (f"{host}: {', '.join(map(str, s.left))}" for host, s in swept.items() if s.left)
    return "; ".join(hosts)


def record_stop(state: RunState) -> OSError | None:
    """Save a state that tells of a stop, unless another run has taken its place; why that failed.

    Done before any signal is sent: whoever looks meanwhile takes the end for a stop and not for a
    failure. A disk that is full must not keep the run alive, so it is tried again afterwards."""
    path = Layout(state.exp_dir).state
    try:
        record = read_json(path)
        if record is not None and record.get("run_id") == state.run_id:
            state.save(path)
    except OSError as error:
        return error
    return None


def require_recorded(state: RunState, stopped: Stopped) -> None:
    """Raise :class:`RunStateError` where the run was ended, but its state does not tell so."""
    error = stopped.unrecorded
    if error is not None:
        raise RunStateError(
            f"run {state.run_id} of {state.name} was stopped, but that could not be recorded: "
            f"{error.filename}: {error.strerror}",
            hint="make room there before the next run; action=query may call this one lost or "
            "failed",
        )


def killed_ranks(host: HostState, swept: Swept) -> tuple[int, ...]:
    """Which of a host's ranks were killed: by the agent, which has written down what it ended
    itself, or after it."""
    pids = set(swept.killed)
    record = host.exit_record()
    if record.get("phase") == "job":
        pids.update(record.get("swept", ()))
    return tuple(sorted(rank for rank, pid in swept.ranks.items() if pid in pids))


def cost(state: RunState, stopped: Stopped, since: float) -> str:
    """What was lost by a stop that was asked for at ``since``, in Unix seconds; empty where all
    ranks have ended by themselves."""
    ranks = sorted(rank for killed in stopped.killed.values() for rank in killed)
    # Of hosts whose ranks are not known: whatever had to be killed there.
    others = {
        host: len(swept.killed)
        for host, swept in stopped.swept.items()
        if swept.killed and not stopped.killed.get(host)
    }
    who = []
    if ranks:
        hosts = compress(host for host, killed in stopped.killed.items() if killed)
        who.append(f"rank{'s' if ranks[1:] else ''} {some(ranks)} on {hosts}")
    if others:
        who.append(f"{sum(others.values())} process(es) on {compress(others)}")
    if not who:
        return ""
    were = "was" if len(ranks) == 1 and not others else "were"
    return (
        f"{' and '.join(who)} did not end within the {state.stop_grace:g} s of runner.stop_grace "
        f"and {were} killed; {_saved(state, since)}"
    )


def _saved(state: RunState, since: float) -> str:
    """What there is to say of a checkpoint that was saved after this time."""
    events = EventReader(state.hosts).refresh()
    rows = [row for rows in events.values() for row in rows if row.event == "checkpoint"]
    steps = [row.get("step") for row in rows if row.time >= since]
    if steps:
        return f"the checkpoint of step {steps[-1]} was saved on the way"
    # Only the project's own program is known to tell of every checkpoint.
    return "what was not saved is lost" if state.external else "no checkpoint was saved on the way"
