"""What every way of starting a plan's hosts can do.

``dryrun`` needs none of this: the plan that it prints is the one ``submit`` takes. Everything else
works on the run's state alone, from any terminal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from flagscale.errors import FlagscaleError, RunStateError, UnreachableError
from flagscale.launch.files import make_private_directory, write_atomic, write_json
from flagscale.launch.planning.plan import LaunchPlan
from flagscale.launch.processes import Swept
from flagscale.launch.snapshot import Snapshot
from flagscale.launch.state import RunState


@dataclass(frozen=True)
class Stopped:
    """What ending a run took: for each host on which something lived, what was ended there, and
    the hosts that could not be asked."""

    swept: Mapping[str, Swept] = field(default_factory=dict)
    unreachable: Sequence[FlagscaleError] = ()

    @property
    def left(self) -> dict[str, tuple[int, ...]]:
        """Processes that survive a KILL, by host."""
        return {host: swept.left for host, swept in self.swept.items() if swept.left}


class Runner(Protocol):
    """The verbs of a runner."""

    def submit(self, plan: LaunchPlan, *, foreground: bool) -> RunState:
        """Write the scripts, start one on every host, and return the state that was saved."""

    def query(self, state: RunState, *, with_lines: bool = False) -> Snapshot:
        """What the run is doing now; ``with_lines``: with each host's last line of output."""

    def logs(self, state: RunState, rank: int | None = None) -> list[str]:
        """Every line so far, merged or of one rank."""

    def bring_output(self, state: RunState) -> None:
        """See to it that what the hosts have printed can be read on this machine."""

    def is_alive(self, state: RunState) -> bool:
        """Whether a process of the run lives, or may live on a host that does not answer."""

    def ended(self, state: RunState, *, any_host: bool = False) -> bool:
        """Whether the scripts of all hosts have ended, or of any."""

    def rank_count(self, state: RunState) -> int:
        """How many processes of the run torchrun has started as ranks."""

    def wait(self, state: RunState) -> int:
        """Wait for the run's scripts and return the job's exit code."""

    def stop(self, state: RunState) -> Stopped:
        """End every process of the run and nothing else. Idempotent."""

    def close(self) -> None:
        """Give up what the runner holds open; the run goes on."""


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
        left = [f"{host}: {', '.join(map(str, swept.left))}" for host, swept in owners.items()]
        raise RunStateError(
            f"run {state.run_id} of {state.name} lives and is {' and '.join(whose)}'s, whose "
            f"processes this user may not end: {'; '.join(left)}",
            hint=f"stop it as {whose[0]}",
        )
    if stopped.left:
        left = [f"{host}: {', '.join(map(str, pids))}" for host, pids in stopped.left.items()]
        raise RunStateError(
            f"run {state.run_id}: these processes survive a KILL: {'; '.join(left)}"
        )


def keep_plan(plan: LaunchPlan, config_text: str, overrides_text: str) -> None:
    """Write what the launching machine keeps beside the scripts: plan, configuration, overrides."""
    layout = plan.layout
    for directory in (layout.scripts, layout.logs / "pids"):
        make_private_directory(directory)
    write_json(layout.plan, plan.to_json(), durable=False)
    write_atomic(layout.config, config_text, durable=False)
    write_atomic(layout.overrides, overrides_text, durable=False)
