"""Ending a run on a host: exactly the processes that carry its id.

TERM to the agent, which ends the job in order; then, or where there is no agent, to every process
of the run, a grace period, KILL. Bash alone: it must work where the environment of the
job is broken.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from flagscale.hosts.executor import Executor
from flagscale.hosts.processes import Swept
from flagscale.hosts.program import ask, program
from flagscale.launcher.layout import AGENT_FILE
from flagscale.launcher.state import HostState, RunState
from flagscale.status import RUN_ID_VARIABLE

# Beyond the job's grace period: the agent's kill, its sweep, and `after_stop`.
_AGENT_SECONDS = 15
_KILL_SECONDS = 5
_MARGIN_SECONDS = 20

_BODY = Path(__file__).with_name("stop.sh")


def stop(
    executor: Executor, state: RunState, host: HostState, spared: Collection[int] = ()
) -> Swept | None:
    """End what lives of a run on a host, but for the ``spared`` pids; None if nothing did."""
    timeout = 2 * state.stop_grace + _AGENT_SECONDS + _KILL_SECONDS + _MARGIN_SECONDS
    answer = ask(executor, text(state, host, spared), timeout)
    if not answer.number("found"):
        return None
    terminated, killed, left = (
        tuple(sorted(int(pid) for pid in answer.get(name).split()))
        for name in ("terminated", "killed", "left")
    )
    ranks = (pair.partition(":") for pair in answer.get("ranks").split())
    pids = {int(rank): int(pid) for rank, _, pid in ranks}
    return Swept(terminated, killed, left, answer.get("owner"), pids)


def text(state: RunState, host: HostState, spared: Collection[int] = ()) -> str:
    """The program for one host."""
    return program(
        _BODY,
        {
            "wanted_boot": host.boot_id or "",
            "script_pid": str(host.pid or 0),
            "start_ticks": str(host.start_ticks or 0),
            "entry": f"{RUN_ID_VARIABLE}={state.run_id}",
            "spared": " ".join(map(str, spared)),
            "run_dir": str(host.run_dir),
            "agent_file": AGENT_FILE,
            "pid_file": str(host.pid_file),
            "grace": str(round(state.stop_grace)),
            "agent_seconds": str(_AGENT_SECONDS),
            "kill_seconds": str(_KILL_SECONDS),
        },
    )
