"""Ending a run on a host: exactly the processes that carry its id.

TERM to the agent, which ends the job in order; then, or where there is no agent, to every process
of the run, a grace period, KILL. Bash alone: it must work where the environment of the
job is broken.
"""

from __future__ import annotations

import shlex

from flagscale.hosts.answer import CARRYING, END, SAY, ask
from flagscale.hosts.processes import Swept
from flagscale.hosts.ssh import Connection
from flagscale.launch.layout import AGENT_FILE
from flagscale.launch.state import HostState, RunState
from flagscale.status import RUN_ID_VARIABLE

# Beyond the job's grace period: the agent's kill, its sweep, and `after_stop`.
_AGENT_SECONDS = 15
_KILL_SECONDS = 5
_MARGIN_SECONDS = 20

_BODY = r"""
read -r boot </proc/sys/kernel/random/boot_id
if [[ -n $wanted_boot && $boot != "$wanted_boot" ]]; then say end yes; tell; exit 0; fi

# What was found, and when each of it was started: that tells a process from a later one of its pid.
found=()
declare -A started=()
look_at() { # $1: pid; sets `ticks` and `parent`, to nothing if it is gone or a zombie
    local stat fields
    ticks='' parent=''
    { read -r stat </proc/$1/stat; } 2>/dev/null || return
    read -ra fields <<<"${stat##*) }"
    [[ ${fields[0]} == [ZXx] ]] || ticks=${fields[19]} parent=${fields[1]}
}
carries() { # $1: pid; whether it is of this run
    local word
    while IFS= read -rd '' word; do
        [[ $word == "$entry" ]] && return
    done </proc/$1/environ
    return 1
} 2>/dev/null
members() {
    found=()
    local pid pids
    carrying "$entry"
    for pid in "${pids[@]}"; do
        # Asked again now that it is known when the process was started.
        look_at "$pid"
        [[ -n $ticks ]] && carries "$pid" && found+=("$pid") && started[$pid]=$ticks
    done
}
lives() { # $1: pid of what was found
    look_at "$1"
    [[ -n $ticks && $ticks == "${started[$1]}" ]]
}
send() { # $1: signal, $2: pid; it gets it at once after the look whether it still is the same
    lives "$2" && kill "-$1" "$2" 2>/dev/null
}
exec {never}<> <(:)
naps=0
pause() { # without a process of its own, and at first only for a moment
    read -rt "0.0$((naps < 5 ? ++naps : 5))" -u "$never"
}
# Those that were found are watched without a process of its own; when they are gone, whatever
# they have started in the meantime is looked for.
gone_within() { # $1: seconds, $2: what is done to the members found
    local deadline=$((SECONDS + $1)) pid left
    while ((${#found[@]})); do
        "$2"
        while :; do
            left=()
            for pid in "${found[@]}"; do lives "$pid" && left+=("$pid"); done
            ((${#left[@]} && SECONDS < deadline)) || break
            pause
        done
        members
        ((SECONDS < deadline)) || break
    done
    ((${#found[@]} == 0))
}
declare -A terminated=() killed=()
nothing() { :; }
terminate() {
    for pid in "${found[@]}"; do
        [[ -z ${terminated[$pid]:-} ]] && send TERM "$pid" && terminated[$pid]=1
    done
}
slay() {
    for pid in "${found[@]}"; do send KILL "$pid" && killed[$pid]=1; done
}
# The script, as long as it lives, and what it has started: found without a process of its own.
tree() { # $1: pid, $2: of its parent
    local pid children=
    look_at "$1"
    [[ -n $ticks && $parent == "$2" ]] || return
    found+=("$1") started[$1]=$ticks
    { read -r children </proc/$1/task/$1/children; } 2>/dev/null
    for pid in $children; do tree "$pid" "$1"; done
}
owner=
closed() { # $1: pid; whether it is not this user's to look into or to end; sets `owner`
    { : <"/proc/$1/environ" && kill -0 "$1"; } 2>/dev/null && return 1
    local name uid
    while read -r name uid _; do
        [[ $name == Uid: ]] && owner=$(id -nu "$uid" 2>/dev/null || echo "user $uid")
    done <"/proc/$1/status"
    lives "$1"
} 2>/dev/null
look_at "$script_pid"
[[ $ticks == "$start_ticks" ]] && tree "$script_pid" "$parent"
((${#found[@]})) || members
said=${#found[@]}
if ((said)) && [[ ${found[0]} == "$script_pid" ]] && closed "$script_pid"; then
    found=("$script_pid")
    say owner "$owner"
elif ((said)); then
    agent='' record=''
    if { read -rd '' record <"$run_dir/$agent_file"; } 2>/dev/null || [[ -n $record ]]; then
        [[ $record == *"$boot"* && $record =~ \"pid\":\ ([0-9]+) ]] && agent=${BASH_REMATCH[1]}
    fi
    # Only a process of this very run is an agent of it.
    if [[ -n $agent && " ${found[*]} " == *" $agent "* ]]; then
        send TERM "$agent" && gone_within $((grace + agent_seconds)) nothing
    fi
    gone_within "$grace" terminate || gone_within "$kill_seconds" slay
    [[ ! -e $pid_file ]] || rm -f -- "$pid_file"
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
    return Swept(terminated, killed, left, answer.get("owner"))


def text(state: RunState, host: HostState) -> str:
    """The program for one host."""
    given = {
        "wanted_boot": host.boot_id or "",
        "script_pid": str(host.pid or 0),
        "start_ticks": str(host.start_ticks or 0),
        "entry": f"{RUN_ID_VARIABLE}={state.run_id}",
        "run_dir": str(host.run_dir),
        "agent_file": AGENT_FILE,
        "pid_file": str(host.pid_file),
        "grace": str(round(state.stop_grace)),
        "agent_seconds": str(_AGENT_SECONDS),
        "kill_seconds": str(_KILL_SECONDS),
    }
    lines = [f"{name}={shlex.quote(value)}" for name, value in given.items()]
    return "\n".join([SAY, CARRYING, *lines, _BODY, END])
