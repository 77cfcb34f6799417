"""Looking after a run on a host: does anything of it live, and what have its files got to say.

Where files are not shared, the pieces that are new since the last look come along, and
:func:`keep` puts them at the same path on this machine. A piece is always written at its own
offset, so that two commands may look at the same run at once.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from flagscale.errors import FlagscaleError
from flagscale.files import make_private_directory
from flagscale.hosts.answer import END, SAY, Piece, ask
from flagscale.hosts.ssh import Connection
from flagscale.launch.layout import EXIT_FILE, RANKS_DIRECTORY, STATUS_DIRECTORY
from flagscale.launch.state import HostState, RunState
from flagscale.status import RUN_ID_VARIABLE

_SECONDS = 60.0
# Of one file at one look; the rest comes with the next.
_MOST_BYTES = 16 << 20
_TAIL_BYTES = 256 << 10
# Endings of files that are written over, and so always come whole.
_WHOLE = (".json", ".place")

_ALIVE = r"""
read -r boot </proc/sys/kernel/random/boot_id
alive=
if [[ $boot == "$wanted_boot" ]]; then
    if { read -r stat </proc/$pid/stat; } 2>/dev/null; then
        read -ra fields <<<"${stat##*) }"
        [[ ${fields[19]} == "$start_ticks" && ${fields[0]} != [ZXx] ]] && alive=script
    fi
    # Without its script, something of the run may still live: found by what it carries.
    if [[ -z $alive ]] && grep -qzsFx -e "$entry" /proc/[0-9]*/environ; then alive=orphans; fi
fi
say alive "$alive"
if [[ -n $count_ranks ]]; then
    ranks=0
    for file in $(grep -lzsFx -e "$entry" /proc/[0-9]*/environ); do
        if grep -qzs '^LOCAL_RANK=' "$file"; then ((ranks += 1)); fi
    done
    say ranks "$ranks"
fi
if [[ -n $last_of && -r $last_of ]]; then
    say last_line "$(tail -c 2000 -- "$last_of" | grep -v '^[[:space:]]*$' | tail -n 1)"
fi
"""

_FILES = r"""
shopt -s nullglob
send() { # $1: path, $2: offset, $3: bytes
    printf 'file=%d %d %s\0' "$3" "$2" "$1"
    if (($3)); then tail -c +$(($2 + 1)) -- "$1" | head -c "$3"; fi
}
sizes() { (($# == 0)) || stat -c '%s %n' -- "$@"; }
while read -r size path; do
    offset=${offsets[$path]:-0}
    ((size > offset)) || continue
    count=$((size - offset))
    if ((count > most)); then count=$most; say more yes; fi
    send "$path" "$offset" "$count"
done < <(sizes "${followed[@]}" "$run_dir/$status"*/rank_*.jsonl)
while read -r size path; do
    send "$path" 0 "$size"
done < <(sizes "$run_dir"/*.json "$run_dir/$status"*/rank_*.place)
# What ranks wrote to stderr is asked for when the job has failed, and then its end.
if [[ -e $run_dir/$exit_file ]] && ! grep -q '"code": 0[,}]' "$run_dir/$exit_file"; then
    while read -r size path; do
        offset=$((size > tail_bytes ? size - tail_bytes : 0))
        send "$path" "$offset" $((size - offset))
    done < <(sizes "$run_dir/$ranks_directory"/*/attempt_*/*/stderr.log)
fi
"""


@dataclass(frozen=True)
class Look:
    """What was seen of a run on a host. ``alive`` is ``script``, ``orphans`` (only other
    processes of the run) or empty; ``more``: there is more to fetch; ``error`` says why nothing
    was seen."""

    alive: str = ""
    ranks: int | None = None
    more: bool = False
    last_line: str = ""
    error: FlagscaleError | None = None

    @property
    def trouble(self) -> str:
        if self.error is None:
            return ""
        return str(getattr(self.error, "summary", self.error.message))


@dataclass(frozen=True)
class Wish:
    """What else a look is for. ``fetch``: bring the files of the run here, with ``output`` also
    what the host's script has printed; ``count``: how many ranks there are; ``last_line``: of the
    output."""

    fetch: bool = False
    output: bool = False
    count: bool = False
    last_line: bool = False


def look(connection: Connection, state: RunState, host: HostState, wish: Wish) -> Look:
    """Look at one host, and keep what it sent."""
    answer = ask(connection, text(state, host, wish), _SECONDS)
    keep(answer.pieces, host)
    return Look(
        alive=answer.get("alive"),
        ranks=answer.number("ranks"),
        more=answer.get("more") == "yes",
        last_line=answer.get("last_line"),
    )


def text(state: RunState, host: HostState, wish: Wish) -> str:
    """The program for one host."""
    given = {
        "wanted_boot": host.boot_id or "",
        "pid": str(host.pid or 0),
        "start_ticks": str(host.start_ticks or 0),
        "entry": f"{RUN_ID_VARIABLE}={state.run_id}",
        "count_ranks": "yes" if wish.count else "",
        "last_of": str(host.output) if wish.last_line else "",
        "run_dir": str(host.run_dir),
        "status": STATUS_DIRECTORY,
        "exit_file": EXIT_FILE,
        "ranks_directory": RANKS_DIRECTORY,
        "most": str(_MOST_BYTES),
        "tail_bytes": str(_TAIL_BYTES),
    }
    lines = [SAY, *(f"{name}={shlex.quote(value)}" for name, value in given.items()), _ALIVE]
    if wish.fetch:
        lines.append("declare -A offsets=()")
        for path, size in _have(host):
            lines.append(f"offsets[{shlex.quote(str(path))}]={size}")
        followed = [shlex.quote(str(host.output))] if wish.output else []
        lines += [f"followed=({' '.join(followed)})", _FILES]
    return "\n".join([*lines, END])


def _have(host: HostState) -> Iterable[tuple[Path, int]]:
    """The followed files that are here already, and how far."""
    for path in (host.output, *host.run_dir.glob(f"{STATUS_DIRECTORY}*/rank_*.jsonl")):
        try:
            yield path, path.stat().st_size
        except FileNotFoundError:
            continue


def keep(pieces: Iterable[Piece], host: HostState) -> None:
    """Write fetched pieces where they belong; a path that is not of this run is left alone."""
    for piece in pieces:
        path = Path(piece.path)
        if path != host.output and (not path.is_relative_to(host.run_dir) or ".." in path.parts):
            continue
        make_private_directory(path.parent)
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
        try:
            os.pwrite(descriptor, piece.data, piece.offset)
            if path.suffix in _WHOLE:
                os.ftruncate(descriptor, len(piece.data))
        finally:
            os.close(descriptor)
