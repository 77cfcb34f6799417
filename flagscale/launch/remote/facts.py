"""What a host is like: cores, devices, the interface to the master, its clock, old runs.

Asked of every host before a run is planned, so it is bash without a process more than needed.
Where a preflight is wanted, the host's Python runs :mod:`.probe` in the same command.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flagscale.launch.remote import probe
from flagscale.launch.remote.answer import END, SAY, Answer
from flagscale.launch.remote.answer import ask as ask_host
from flagscale.launch.transport import Connection
from flagscale.status import RUN_ID_VARIABLE, STATUS_DIR_VARIABLE

_SECONDS = 60.0
_PROBE = Path(probe.__file__)

_BODY = r"""
say clock "$EPOCHREALTIME"
read -r boot </proc/sys/kernel/random/boot_id
say boot_id "$boot"

cpus=0
while IFS=$': \t' read -r key list; do
    [[ $key == Cpus_allowed_list ]] || continue
    for part in ${list//,/ }; do ((cpus += ${part#*-} - ${part%-*} + 1)); done
done </proc/self/status
say cpus "$cpus"

shopt -s nullglob
devices=(/proc/driver/nvidia/gpus/*)
gpus=${#devices[@]}
if ((gpus == 0)) && command -v nvidia-smi >/dev/null; then
    gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ')
fi
say gpus "$gpus"

# The interface over which this host reaches the master, or is the master.
address=
if [[ $master == *:* || $master =~ ^[0-9.]+$ ]]; then
    address=$master
elif [[ -n $master ]]; then
    read -r address _ < <(getent ahosts "$master")
fi
# A host often resolves its own name to a loopback address.
if [[ $address == 127.* || $address == ::1 ]]; then
    read -r _ _ address _ <<<"${SSH_CONNECTION:-}"
fi
interface=
if [[ -n $address ]] && command -v ip >/dev/null; then
    route=$(ip -o route get "$address" 2>/dev/null)
    [[ $route =~ \ dev\ ([^ ]+) ]] && interface=${BASH_REMATCH[1]}
    if [[ $interface == lo ]]; then
        read -r _ interface _ < <(ip -o addr show to "$address" 2>/dev/null)
    fi
elif [[ -n $address ]]; then
    interface=$(python_program interface "$address")
    interface=${interface//\"/}
fi
say address "$address"
say interface "${interface%%@*}"

# Ports at which something listens on this host, of IPv4 and IPv6.
listening() { # $1: port
    local local_address state hex
    printf -v hex '%04X' "$1"
    while read -r _ local_address _ state _; do
        [[ $state == 0A && ${local_address##*:} == "$hex" ]] && return 0
    done < <(cat /proc/net/tcp /proc/net/tcp6 2>/dev/null)
    return 1
}
if [[ $port == any ]]; then
    # Below the ports that the kernel gives to connections, so that none of those takes it first.
    read -r low _ </proc/sys/net/ipv4/ip_local_port_range
    ((low > 21000)) || low=60999
    for _ in {1..100}; do
        candidate=$((20000 + (RANDOM * 32768 + RANDOM) % (low - 20000)))
        # The agents meet at the port beside it, unless the user says where.
        listening "$candidate" || listening $((candidate + 1)) && continue
        say port "$candidate"
        break
    done
elif [[ -n $port ]]; then
    for wanted in "$port" "${beside:-$((port + 1))}"; do
        listening "$wanted" && busy=$wanted && break
    done
    if [[ -n ${busy:-} ]]; then
        holder=
        command -v ss >/dev/null && holder=$(ss -Hltnp "sport = :$busy" 2>/dev/null)
        [[ $holder =~ \"([^\"]+)\",pid=([0-9]+) ]] &&
            holder="process ${BASH_REMATCH[2]} (${BASH_REMATCH[1]})"
        say busy_port "$busy"
        say port_holder "${holder:-another process}"
    else
        say port "$port"
    fi
fi

# Processes of runs of this very directory carry where they report to.
for file in $(grep -lzsF -e "$mark" /proc/[0-9]*/environ); do
    while IFS= read -r -d '' entry; do
        [[ $entry == "$id_variable"=* ]] && say alive "${entry#*=}"
    done <"$file" 2>/dev/null
done

if [[ -n $wish ]]; then
    if [[ -n $setup ]] && ! reason=$( (eval "$setup") 2>&1 >/dev/null); then
        say python_error "${reason:-its environment cannot be activated}"
    elif world=$(python_program look "$wish" 2>&1); then
        say python "$world"
    else
        say python_error "${world##*$'\n'}"
    fi
fi
"""


@dataclass(frozen=True)
class Question:
    """What is asked of one host. ``port``: None for no port, 0 for any free one. ``beside``: the
    port of the agents, where it isn't the next one. ``wish``: what
    its Python is asked for, nothing without a preflight."""

    master: str
    log_root: str
    python: str
    setup: str = ""
    port: int | None = None
    beside: int | None = None
    wish: dict[str, Any] | None = None


@dataclass(frozen=True)
class Facts:
    """What a host answered."""

    cpus: int | None
    gpus: int | None
    interface: str | None
    boot_id: str
    skew: float
    """Seconds by which its clock is ahead of ours, as little as the answer allows."""
    port: int | None = None
    busy_port: int | None = None
    port_holder: str = ""
    alive: str = ""
    """The id of a run of this directory that is alive there."""
    python: dict[str, Any] = field(default_factory=dict)
    python_error: str = ""
    address: str = ""


def ask(connection: Connection, question: Question) -> Facts:
    """Ask one host."""
    before = time.time()
    answer = ask_host(connection, text(question), _SECONDS)
    return read(answer, before, time.time())


def text(question: Question) -> str:
    """The program for one host."""
    port = {None: "", 0: "any"}.get(question.port, str(question.port))
    given = {
        "master": question.master,
        "port": port,
        "beside": str(question.beside or ""),
        "mark": f"{STATUS_DIR_VARIABLE}={question.log_root}/",
        "id_variable": RUN_ID_VARIABLE,
        "setup": question.setup,
        "python": question.python,
        "wish": json.dumps(question.wish) if question.wish is not None else "",
    }
    lines = [f"{name}={shlex.quote(value)}" for name, value in given.items()]
    return "\n".join([SAY, *lines, python_function(), _BODY, END])


def python_function() -> str:
    """``python_program``: the probe, run by ``$python`` after ``$setup``. A program on stdin
    imports from the working directory first: none of the user's modules lies in the root."""
    source = _PROBE.read_text(encoding="utf-8")
    return (
        "python_program() {\n"
        '    (eval "$setup"; cd /; exec "$python" - "$@") <<\'END_OF_PROBE\'\n'
        f"{source}END_OF_PROBE\n}}"
    )


def read(answer: Answer, before: float, after: float) -> Facts:
    """The facts in an answer to a question that was asked between these two moments."""
    clock = answer.get("clock").replace(",", ".")
    theirs = float(clock) if clock else before
    skew = theirs - before if theirs < before else max(0.0, theirs - after)
    try:
        python = json.loads(answer.get("python") or "{}")
    except ValueError:
        python = {}
    return Facts(
        cpus=answer.number("cpus") or None,
        gpus=answer.number("gpus"),
        interface=answer.get("interface") or None,
        boot_id=answer.get("boot_id"),
        skew=skew,
        port=answer.number("port"),
        busy_port=answer.number("busy_port"),
        port_holder=answer.get("port_holder"),
        alive=answer.get("alive"),
        python=python if isinstance(python, dict) else {},
        python_error=answer.get("python_error"),
        address=answer.get("address"),
    )


def packages_of(facts: Sequence[Facts]) -> list[str]:
    """The packages that any of the hosts has, in the order of :data:`.probe.PACKAGES`."""
    there = {name for one in facts for name in one.python.get("packages", {})}
    return [name for name in probe.PACKAGES if name in there]
