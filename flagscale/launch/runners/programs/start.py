"""Starting a host's script, detached from the connection that brought it.

The script's text comes with the program and is written on the host itself: where files are
shared, a host may otherwise still see an older script of the same name. Secrets come with the
program too and go into the environment of the script, never into a file or a command line.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flagscale.errors import RunStateError
from flagscale.hosts.answer import SAY, parse
from flagscale.hosts.ssh import Connection
from flagscale.launch.layout import OLD_OUTPUT_FILE
from flagscale.launch.planning.model import HostPlan
from flagscale.launch.state import HostState
from flagscale.status import RUN_ID_VARIABLE

_SECONDS = 60.0
_BESIDE = 75

_BODY = r"""
umask 077
read -r boot </proc/sys/kernel/random/boot_id
ticks_of() { # $1: pid; when the process was started, in `ticks`
    local stat
    ticks=
    { read -r stat </proc/$1/stat; } 2>/dev/null || return
    read -ra fields <<<"${stat##*) }"
    [[ ${fields[0]} == [ZXx] ]] || ticks=${fields[19]}
}
if [[ $boot == "$old_boot" ]] && ticks_of "$old_pid" && [[ $ticks == "$old_ticks" ]]; then
    printf '%s\n' "the run before is alive there (script pid $old_pid)" >&2
    exit 75
fi
fail() { printf '%s\n' "$1" >&2; exit 73; }
for directory in "${script%/*}" "${output%/*}"; do
    [[ -d $directory ]] || mkdir -p -- "$directory" || fail "cannot make $directory"
done
if [[ -n $old_output && -e $output ]]; then
    [[ -d ${old_output%/*} ]] || mkdir -p -- "${old_output%/*}"
    mv -- "$output" "$old_output" || fail "cannot keep $output"
fi
for ((i = 0; i < ${#paths[@]}; i++)); do
    printf '%s' "${texts[i]}" >"${paths[i]}" || fail "cannot write ${paths[i]}"
done
[[ -x $script ]] || chmod 700 -- "$script" || fail "cannot make $script executable"
# The command of the script is in no list of jobs of ours, leads its own session and holds none
# of our files: it lives on when the connection closes.
setsid bash "$script" </dev/null >>"$output" 2>&1 &
pid=$!
ticks_of "$pid"
[[ -n $ticks ]] || fail "setsid bash does not start"
say pid "$pid"
say start_ticks "$ticks"
say boot_id "$boot"
tell
"""


@dataclass(frozen=True)
class Started:
    """The script's process on its host, as it cannot be confused with another."""

    pid: int
    start_ticks: int
    boot_id: str


class StartError(RunStateError):
    """A host was reached, but its script could not be written or started. ``beside``: because the
    run before is alive there."""

    def __init__(self, host: str, reason: str, *, beside: bool = False) -> None:
        super().__init__(f"{host}: the script could not be started: {reason}")
        self.host = host
        self.beside = beside


def start(connection: Connection, program: str) -> Started:
    """Run the program of :func:`text` on a host. Raises :class:`StartError` with the reason; a
    run of the same directory that is alive there is one."""
    result = connection.run_script(program, timeout=_SECONDS)
    answer = parse(result.stdout)
    pid, ticks = answer.number("pid"), answer.number("start_ticks")
    if not result.ok or pid is None or ticks is None:
        lines = result.error_text.strip().splitlines()
        reason = "; ".join(lines[-2:]) or f"exit code {result.exit_status}"
        raise StartError(connection.target.name, reason, beside=result.exit_status == _BESIDE)
    return Started(pid, ticks, answer.get("boot_id"))


def text(
    host: HostPlan,
    run_id: str,
    files: Mapping[Path, str],
    *,
    previous: HostState | None = None,
) -> str:
    """The program that writes ``files``, the script among them, and starts the script.

    ``previous`` is this host in the run before, if it was one: its output is kept, and while its
    script lives nothing starts.
    """
    kept = previous is not None and previous.output == host.output
    old_output = str(previous.run_dir / OLD_OUTPUT_FILE) if previous and kept else ""
    given = {
        "run_dir": str(host.run_dir),
        "script": str(host.script),
        "output": str(host.output),
        "pid_file": str(host.pid_file),
        "old_output": old_output,
        "old_pid": str(previous.pid or 0) if previous else "0",
        "old_ticks": str(previous.start_ticks or "none") if previous else "none",
        "old_boot": (previous.boot_id or "") if previous else "",
    }
    lines = [f"{name}={shlex.quote(value)}" for name, value in given.items()]
    lines.append(_array("paths", [str(path) for path in files]))
    lines.append(_array("texts", list(files.values())))
    secrets = {value.name: value.value for value in host.environment if value.secret}
    for name, value in {**secrets, RUN_ID_VARIABLE: run_id}.items():
        lines.append(f"export {name}={shlex.quote(value)}")
    return "\n".join([SAY, *lines, _BODY])


def _array(name: str, words: Sequence[str]) -> str:
    return f"{name}=({' '.join(map(shlex.quote, words))})"
