"""What a host is like: cores, devices, the interface to the master, its clock, old runs.

Asked of every host before a run is planned, so it is bash without a process more than needed.
Where a preflight is wanted, the same program looks at where the run will write and what it needs,
and tells what the host's Python is like, see :mod:`.world`.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flagscale.config.arguments.paths import CHECKPOINT_NAME
from flagscale.hosts import probe
from flagscale.hosts import python_world as world
from flagscale.hosts.answer import CARRYING, END, SAY, Answer
from flagscale.hosts.answer import ask as ask_host
from flagscale.hosts.place import NOT_A_DIRECTORY, NOT_WRITABLE, Place
from flagscale.hosts.python_world import World
from flagscale.hosts.ssh import Connection
from flagscale.status import RUN_ID_VARIABLE, STATUS_DIR_VARIABLE

_SECONDS = 60.0

_BODY = r"""
say clock "$EPOCHREALTIME"
read -r boot </proc/sys/kernel/random/boot_id
say boot_id "$boot"

# Files are read in one piece: bash takes as long for a line as for a whole file.
all_of() { # $1: file; sets `all`
    all=
    { read -r -N 4194304 all <"$1"; } 2>/dev/null
}
cpus=0
all_of /proc/self/status
if [[ $all =~ Cpus_allowed_list:[[:space:]]*([0-9,-]+) ]]; then
    for part in ${BASH_REMATCH[1]//,/ }; do ((cpus += ${part#*-} - ${part%-*} + 1)); done
fi
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
    # What stands in the table of hosts is found without a process.
    all_of /etc/hosts
    name=${master//./\\.} line=$'(^|\n)[ \t]*([0-9a-fA-F.:]+)[ \t]([^#\n]*[ \t])?'
    [[ $all =~ $line$name([[:space:]]|$) ]] && address=${BASH_REMATCH[2]}
    [[ -n $address ]] || read -r address _ < <(getent ahosts "$master")
fi
# A host often resolves its own name to a loopback address.
if [[ $address == 127.* || $address == ::1 ]]; then
    say loopback yes
    read -r _ _ address _ <<<"${SSH_CONNECTION:-}"
fi
interface=
# The kernel's table of routes, of IPv4: the longest prefix, and of those the smallest metric.
route_to() { # $1: address; sets `interface`, to nothing where there is no route
    local name to flags metric mask bytes target best=-1 cheapest=0
    IFS=. read -ra bytes <<<"$1"
    # Byte by byte the other way round, as the kernel prints them.
    target=$((bytes[3] << 24 | bytes[2] << 16 | bytes[1] << 8 | bytes[0]))
    while read -r name to _ flags _ _ metric mask _; do
        # Up, and no refusal.
        [[ $mask == [0-9A-F]* ]] && ((0x$flags & 1 && ! (0x$flags & 0x200))) || continue
        ((0x$to == (target & 0x$mask))) || continue
        mask=$((0x${mask:6:2}${mask:4:2}${mask:2:2}${mask:0:2}))
        ((mask > best || (mask == best && metric < cheapest))) || continue
        best=$mask cheapest=$metric interface=$name
    done </proc/net/route
}
[[ $address =~ ^[0-9]+\.[0-9]+\.[0-9]+\.[0-9]+$ && -r /proc/net/route ]] && route_to "$address"
if [[ -n $interface || -z $address ]]; then
    :
elif command -v ip >/dev/null; then
    route=$(ip -o route get "$address" 2>/dev/null)
    [[ $route =~ \ dev\ ([^ ]+) ]] && interface=${BASH_REMATCH[1]}
    if [[ $interface == lo ]]; then
        read -r _ interface _ < <(ip -o addr show to "$address" 2>/dev/null)
    fi
else
    interface=$(python_program interface "$address")
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
        ((candidate != agents_port)) && ! listening "$candidate" || continue
        [[ -n $agents_port ]] || ! listening $((candidate + 1)) || continue
        say port "$candidate"
        break
    done
elif [[ -n $port ]] && ! listening "$port"; then
    say port "$port"
fi
for wanted in "$port" "$agents_port"; do
    [[ $wanted == [0-9]* ]] && listening "$wanted" || continue
    holder=
    command -v ss >/dev/null && holder=$(ss -Hltnp "sport = :$wanted" 2>/dev/null)
    [[ $holder =~ \"([^\"]+)\",pid=([0-9]+) ]] &&
        holder="process ${BASH_REMATCH[2]} (${BASH_REMATCH[1]})"
    say busy_port "$wanted"
    say port_holder "${holder:-another process}"
    break
done

# Processes of runs of this very directory carry where they report to.
carrying "$mark"
for pid in "${pids[@]}"; do
    while IFS= read -r -d '' entry; do
        [[ $entry == "$id_variable"=* ]] && say alive "${entry#*=}"
    done <"/proc/$pid/environ" 2>/dev/null
done

if [[ -n ${thorough-} ]]; then
    [[ -e $project/flagscale/launch/agent.py ]] && say project yes
    absent=()
    for number in "${!needed[@]}"; do
        [[ -e ${needed[number]} ]] || absent+=("$number")
    done
    say absent "${absent[*]}"
    # Where this run will write: the nearest directories that exist already.
    nearest() { # $1: path; sets `directory`, and `reason` to why it can't be written
        directory=$1
        while [[ ! -e $directory && ! -L $directory && $directory == /?* ]]; do
            directory=${directory%/*}
        done
        directory=${directory:-/}
        reason=
        [[ -w $directory && -x $directory ]] || reason=$not_writable
        [[ -d $directory ]] || reason=$not_a_directory
    }
    say_place() { # $1: what the names end with
        say "existing$1" "$directory"
        say "unfit$1" "$reason"
        read -r blocks size < <(stat -f -c '%a %S' -- "$directory" 2>/dev/null) &&
            say "free$1" "$((blocks * size))"
    }
    say user "${USER:-${LOGNAME:-$EUID}}"
    for place in "$exp_dir" "$log_root"; do
        nearest "$place"
        [[ -z $reason ]] || break
    done
    say_place ''
    for number in "${!written[@]}"; do
        nearest "${written[number]}"
        say_place "_$number"
    done
    # What it may start from.
    entries=()
    [[ -z $load ]] || entries=("$load"/iter_*/)
    for entry in "${entries[@]}"; do
        entry=${entry%/}
        [[ ${entry##*/} =~ ^$checkpoint_name$ ]] || continue
        say checkpoint yes
        break
    done
    look_at_python
fi
"""


@dataclass(frozen=True)
class Need:
    """What a preflight asks beyond that: the directories of this project and of the experiment
    there, ``paths`` that must exist, others that will be ``written``, the directory to ``load`` a
    checkpoint from, whether code is ``compared``, what its Python is asked about the communication
    ``backend``, and whether that Python is asked although nothing ``fresh`` happened to it."""

    project: str
    exp_dir: str
    paths: Sequence[str] = ()
    written: Sequence[str] = ()
    load: str = ""
    compared: bool = False
    backend: Mapping[str, Any] | None = None
    fresh: bool = False


@dataclass(frozen=True)
class Question:
    """What is asked of one host. ``port``: None for no port, 0 for any free one. ``agents_port``:
    the port at which agents meet, where it is to be free as well; None for one beside ``port``
    where that is any, and for none where it is not."""

    master: str
    log_root: str
    python: str
    setup: str = ""
    port: int | None = None
    agents_port: int | None = None
    need: Need | None = None


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
    python: World | None = None
    python_error: str = ""
    address: str = ""
    loopback: bool = False
    """Whether the master's address means this very host there."""
    project: bool = False
    """Whether this project is where it should be."""
    missing: tuple[str, ...] = ()
    """The needed paths that do not exist."""
    place: Place | None = None
    """The experiment's directory."""
    written: Mapping[str, Place] = field(default_factory=dict)
    """The others that will be written, by path."""
    checkpoint: bool = False
    """Whether there is a checkpoint where one would be loaded from."""


def ask(connection: Connection, question: Question) -> Facts:
    """Ask one host."""
    before = time.time()
    answer = ask_host(connection, text(question), _SECONDS)
    found = read(answer, question, before, time.time())
    if question.need is not None and answer.get("kept") and found.python is None:
        # What was kept there is spoilt in a way that only shows here.
        return ask(connection, replace(question, need=replace(question.need, fresh=True)))
    return found


def text(question: Question) -> str:
    """The program for one host."""
    given = {
        "master": question.master,
        "port": {None: "", 0: "any"}.get(question.port, str(question.port)),
        "agents_port": str(question.agents_port or ""),
        "log_root": question.log_root,
        "mark": f"{STATUS_DIR_VARIABLE}={question.log_root}/",
        "id_variable": RUN_ID_VARIABLE,
        "setup": question.setup,
        "python": question.python,
        "not_writable": NOT_WRITABLE,
        "not_a_directory": NOT_A_DIRECTORY,
        "checkpoint_name": CHECKPOINT_NAME,
    }
    need, more = question.need, list[str]()
    if need is not None:
        given |= {"thorough": "yes", "project": need.project, "exp_dir": need.exp_dir}
        given["load"] = need.load
        more += (
            f"needed=({' '.join(map(shlex.quote, need.paths))})",
            f"written=({' '.join(map(shlex.quote, need.written))})",
            *world.program(
                need.project,
                question.python,
                question.setup,
                compared=need.compared,
                fresh=need.fresh,
                backend=need.backend,
            ),
        )
    lines = [f"{name}={shlex.quote(value)}" for name, value in given.items()]
    return "\n".join([SAY, CARRYING, *lines, *more, world.python_function(), _BODY, END])


def read(answer: Answer, question: Question, before: float, after: float) -> Facts:
    """The facts in an answer to a question that was asked between these two moments."""
    clock = answer.get("clock").replace(",", ".")
    theirs = float(clock) if clock else before
    skew = theirs - before if theirs < before else max(0.0, theirs - after)
    paths, written = (question.need.paths, question.need.written) if question.need else ((), ())
    places = {path: _place(answer, f"_{number}") for number, path in enumerate(written)}
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
        python=world.read(answer.get("python")),
        python_error=answer.get("python_error"),
        address=answer.get("address"),
        loopback=answer.get("loopback") == "yes",
        project=answer.get("project") == "yes",
        missing=tuple(paths[int(number)] for number in answer.get("absent").split()),
        place=_place(answer),
        written={path: place for path, place in places.items() if place is not None},
        checkpoint=answer.get("checkpoint") == "yes",
    )


def _place(answer: Answer, suffix: str = "") -> Place | None:
    existing = answer.get(f"existing{suffix}")
    if not existing:
        return None
    unfit, user = answer.get(f"unfit{suffix}"), answer.get("user")
    return Place(existing, unfit, user, answer.number(f"free{suffix}"))


def packages_of(facts: Sequence[Facts]) -> list[str]:
    """The packages that any of the hosts has, in the order of :data:`.probe.PACKAGES`."""
    there = {name for one in facts if one.python for name in one.python.packages}
    return [name for name in probe.PACKAGES if name in there]
