"""Ending a run on a host: exactly the processes that carry its id.

TERM to the agent, which ends the job in order; then, or where there is no agent, to every process
of the run, a grace period, KILL. Bash and grep alone: it must work where the environment of the
job is broken.
"""

from __future__ import annotations

import shlex

from flagscale.launch.layout import AGENT_FILE
from flagscale.launch.processes import Swept
from flagscale.launch.remote.answer import END, SAY, ask
from flagscale.launch.state import HostState, RunState
from flagscale.launch.transport import Connection
from flagscale.status import RUN_ID_VARIABLE

# Beyond the job's grace period: the agent's kill, its sweep, and `after_stop`.
_AGENT_SECONDS = 15
_KILL_SECONDS = 5
_MARGIN_SECONDS = 20

_BODY = r"""
read -r boot </proc/sys/kernel/random/boot_id
if [[ -n $wanted_boot && $boot != "$wanted_boot" ]]; then say end yes; exit 0; fi

# Zombies have no environment left, so they are no members.
members() {
    found=()
    local file
    for file in $(grep -lzsFx -e "$entry" /proc/[0-9]*/environ); do
        file=${file#/proc/}
        found+=("${file%/environ}")
    done
}
exec {never}<> <(:)
pause() { read -rt 0.1 -u "$never"; } # without a process of its own
gone_within() { # $1: seconds, $2: what is done to the members each time
    local deadline=$((SECONDS + $1))
    while :; do
        members
        ((${#found[@]})) || return 0
        "$2"
        ((SECONDS < deadline)) || return 1
        pause
    done
}
declare -A terminated=() killed=()
nothing() { :; }
terminate() {
    for pid in "${found[@]}"; do
        [[ -z ${terminated[$pid]:-} ]] && kill -TERM "$pid" 2>/dev/null && terminated[$pid]=1
    done
}
slay() {
    for pid in "${found[@]}"; do kill -KILL "$pid" 2>/dev/null && killed[$pid]=1; done
}
members
said=${#found[@]}
if ((said)); then
    agent=
    if [[ -r $run_dir/$agent_file ]]; then
        record=$(<"$run_dir/$agent_file")
        [[ $record == *"$boot"* && $record =~ \"pid\":\ ([0-9]+) ]] && agent=${BASH_REMATCH[1]}
    fi
    # Only a process of this very run is an agent of it.
    if [[ -n $agent && " ${found[*]} " == *" $agent "* ]]; then
        kill -TERM "$agent" 2>/dev/null
        gone_within $((grace + agent_seconds)) nothing
    fi
    gone_within "$grace" terminate || gone_within "$kill_seconds" slay
    members
    rm -f -- "$pid_file"
fi
say found "$said"
say terminated "${!terminated[*]}"
say killed "${!killed[*]}"
say left "${found[*]}"
"""


def stop(connection: Connection, state: RunState, host: HostState) -> Swept | None:
    """End what lives of a run on a host; None if nothing did."""
    timeout = 2 * state.stop_grace + _AGENT_SECONDS + _KILL_SECONDS + _MARGIN_SECONDS
    answer = ask(connection, text(state, host), timeout)
    if not answer.number("found"):
        return None
    terminated, killed, left = (
        tuple(sorted(int(pid) for pid in answer.get(name).split()))
        for name in ("terminated", "killed", "left")
    )
    return Swept(terminated, killed, left)


def text(state: RunState, host: HostState) -> str:
    """The program for one host."""
    given = {
        "wanted_boot": host.boot_id or "",
        "entry": f"{RUN_ID_VARIABLE}={state.run_id}",
        "run_dir": str(host.run_dir),
        "agent_file": AGENT_FILE,
        "pid_file": str(host.pid_file),
        "grace": str(round(state.stop_grace)),
        "agent_seconds": str(_AGENT_SECONDS),
        "kill_seconds": str(_KILL_SECONDS),
    }
    lines = [f"{name}={shlex.quote(value)}" for name, value in given.items()]
    return "\n".join([SAY, *lines, _BODY, END])
