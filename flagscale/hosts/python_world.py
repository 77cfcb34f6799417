"""What the Python of a host is like: its version, its packages, the code that it would run.

Starting a Python costs a host more than all other questions together, so :mod:`.probe` leaves its
answer in a file of the user's there, and bash reads that as long as nothing has changed that the
answer was made from:

- what was asked, by which version of the probe, and on which host (a home directory is often
  shared); ``PATH`` and the variables that tell Python where to look for packages;
- interpreter, ``pyvenv.cfg``, conda's history, every directory that was searched for packages and
  every ``.pth`` file in it, by owner, mode, device, inode, size, and times of change: two
  directories that took each other's place differ in that, however old they are; directories that
  were not there are still absent;
- where code is compared, every file of it, by name, inode, size and times.

``${XDG_CACHE_HOME:-~/.cache}/flagscale/hosts`` and the file must belong to the user and be
writable for nobody else. Whatever is wrong with the file, Python is asked.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flagscale.hosts import probe

_PROBE = Path(probe.__file__)

LOOK = r"""
# What Python said before: one `stat` decides whether it still holds.
kept_world() {
    local line lines=() paths=("${kept%/*}" "$kept") marks=() now=() told=()
    local private="^$EUID,[0-7]*[0145][0145],"
    [[ -f $kept && ! -L $kept && ! -L ${kept%/*} ]] || return
    { mapfile -t lines <"$kept"; } 2>/dev/null
    [[ ${lines[0]-} == "$key" && ${lines[-1]} == end ]] || return
    for line in "${lines[@]:1}"; do
        case $line in
            "made "*)
                line=${line#made }
                marks+=("${line%% *}")
                paths+=("${line#* }")
                ;;
            "gone "*) [[ ! -e ${line#gone } ]] || return ;;
            "= "*) told+=("$line") ;;
        esac
    done
    mapfile -t now < <(LC_ALL=C stat -L -c '%u,%a,%d:%i:%s:%.9Y:%.9Z' -- "${paths[@]}" 2>/dev/null)
    [[ ${now[0]-} =~ $private && ${now[1]-} =~ $private ]] || return
    [[ ${now[*]:2} == "${marks[*]}" ]] || return
    printf -v world '%s\n' "${told[@]}"
}
look_at_python() {
    local tree='' key kept='' world='' cache=${XDG_CACHE_HOME:-${HOME:+$HOME/.cache}}
    if [[ -n $compared ]]; then
        # The files of its code as they are before Python reads them.
        tree=$(find -L "${code_roots[@]}" \( -name __pycache__ -o -name .git \) -prune -o \
            -printf '%p %D:%i %s %T@ %C@\n' 2>/dev/null | sha256sum)
    fi
    key="flagscale $question $tree $HOSTNAME $PATH"
    key+=" ${PYTHONPATH-} ${PYTHONHOME-} ${PYTHONNOUSERSITE-}"
    [[ $cache == /* && $key$cache != *$'\n'* ]] && kept=$cache/flagscale/hosts/$HOSTNAME-$kept_name
    if [[ -n $kept && -z $fresh && -z $backend ]] && kept_world; then
        say kept yes
        say python "$world"
    elif world=$(python_program look "$project" "$compared" "$backend" "$python" \
        "$kept" "$key" 2>&1); then
        say python "$world"
    else
        world=${world##*$'\n'}
        say python_error "${world:-its environment cannot be activated}"
    fi
}
"""


@dataclass(frozen=True)
class World:
    """What a host's Python answered. ``code`` is the digest of the code there, empty where it was
    not compared; ``backend`` what it said of the communication backend, where it was asked."""

    version: str
    executable: str
    packages: Mapping[str, str] = field(default_factory=dict)
    code: str = ""
    backend: Mapping[str, Any] | None = None


def read(text: str) -> World | None:
    """The world in what Python printed, among which may be what an activation printed; None where
    it is not there."""
    values: dict[str, str] = {}
    packages: dict[str, str] = {}
    for line in text.splitlines():
        mark, _, rest = line.partition(" ")
        name, _, value = rest.partition(" ")
        value = value.replace("%0A", "\n").replace("%25", "%")
        if mark == "=" and name == "package":
            package, _, version = value.partition(" ")
            packages[package] = version
        elif mark == "=":
            values[name] = value
    if not values.get("version"):
        return None
    backend = json.loads(values["backend"]) if "backend" in values else None
    executable = values.get("executable", "")
    return World(values["version"], executable, packages, values.get("code", ""), backend)


def program(
    project: str, python: str, setup: str, *, compared: bool, fresh: bool, backend: Any
) -> Iterator[str]:
    """The parts of a bash program that give it ``look_at_python``."""
    asked = json.dumps([probe_text(), project, python, setup, compared])
    yield from (
        f"question={_digest(asked)}",
        f"kept_name={_digest(json.dumps([python, setup]))[:16]}",
        f"compared={'yes' if compared else ''}",
        f"fresh={'yes' if fresh else ''}",
        f"backend={shlex.quote(json.dumps(backend) if backend is not None else '')}",
        f"code_roots=({' '.join(shlex.quote(f'{project}/{root}') for root in probe.CODE_ROOTS)})",
        LOOK,
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def probe_text() -> str:
    return _PROBE.read_text(encoding="utf-8")


def python_function() -> str:
    """``python_program``: the probe, run by ``$python`` after ``$setup``. A program on stdin
    imports from the working directory first: none of the user's modules lies in the root. Its
    packages are not imported, so Python need not prepare for them (``-S``)."""
    return (
        "python_program() {\n"
        '    (eval "$setup" >/dev/null || exit; cd /; exec "$python" -S - "$@")'
        " <<'END_OF_PROBE'\n"
        f"{probe_text()}END_OF_PROBE\n}}"
    )
