"""End of a run on a host: exactly the processes that have its run id in their environment.

TERM is sent to the agent, which ends the job in order. Then, or if there is no agent, every process
of the run gets TERM and, after a grace period, KILL. The program needs only bash, because it has to
work where the environment of the job is broken.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from flagscale.hosts.connection import HostConnection
from flagscale.hosts.processes import KilledProcesses
from flagscale.hosts.program import build_program, run_program
from flagscale.launcher.layout import AGENT_FILE
from flagscale.launcher.state import HostState, RunState
from flagscale.status import RUN_ID_VARIABLE

# In addition to the job's grace period: the agent's KILL, its sweep, and `after_stop`.
_AGENT_SECONDS = 15
_KILL_SECONDS = 5
_MARGIN_SECONDS = 20

_BODY = Path(__file__).with_name("stop.sh")


def stop_on_host(
    connection: HostConnection, state: RunState, host: HostState, spared: Collection[int] = ()
) -> KilledProcesses | None:
    """End the processes of a run on a host, except the ``spared`` pids; None if there were none."""
    timeout = 2 * state.stop_grace + _AGENT_SECONDS + _KILL_SECONDS + _MARGIN_SECONDS
    output = run_program(connection, render_stop(state, host, spared), timeout)
    if not output.get_int("found"):
        return None
    terminated, killed, survivors = (
        tuple(sorted(int(pid) for pid in output.get(name).split()))
        for name in ("terminated", "killed", "left")
    )
    ranks = (pair.partition(":") for pair in output.get("ranks").split())
    pids = {int(rank): int(pid) for rank, _, pid in ranks}
    return KilledProcesses(terminated, killed, survivors, output.get("owner"), pids)


def render_stop(state: RunState, host: HostState, spared: Collection[int] = ()) -> str:
    """Return the program for one host."""
    return build_program(
        _BODY,
        {
            "expected_boot": host.boot_id or "",
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
