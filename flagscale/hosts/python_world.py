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
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flagscale.hosts import probe
from flagscale.hosts.program import Value, source

_PROBE = Path(probe.__file__)


@dataclass(frozen=True)
class World:
    """What a host's Python answered. ``code`` is the digest of the code there, empty where it was
    not compared; ``answers`` what modules of this project said there, by the question's name."""

    version: str
    executable: str
    packages: Mapping[str, str] = field(default_factory=dict)
    code: str = ""
    answers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def read(text: str) -> World | None:
    """The world in what Python printed, among which may be what an activation printed; None where
    it is not there."""
    values: dict[str, str] = {}
    packages: dict[str, str] = {}
    answers: dict[str, Mapping[str, Any]] = {}
    for line in text.splitlines():
        mark, _, rest = line.partition(" ")
        name, _, value = rest.partition(" ")
        value = value.replace("%0A", "\n").replace("%25", "%")
        if mark == "=" and name == "package":
            package, _, version = value.partition(" ")
            packages[package] = version
        elif mark == "=" and name == "answer":
            asked, told = json.loads(value)
            answers[asked] = told
        elif mark == "=":
            values[name] = value
    if not values.get("version"):
        return None
    executable = values.get("executable", "")
    return World(values["version"], executable, packages, values.get("code", ""), answers)


def given(
    project: str, python: str, setup: str, *, compared: bool, fresh: bool
) -> dict[str, Value]:
    """What ``python_world.sh`` is given: where this ``project`` is on the host, the commands that
    make its ``python`` the right one, whether its code is told. ``fresh``: nothing that is kept is
    believed."""
    question = [project, python, setup, compared]
    return {
        "question": _digest(json.dumps([source(_PROBE), *question])),
        "kept_name": _digest(json.dumps([python, setup]))[:16],
        "compared": "yes" if compared else "",
        "fresh": "yes" if fresh else "",
        "code_roots": [f"{project}/{root}" for root in probe.CODE_ROOTS],
    }


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def python_function() -> str:
    """``python_program``: the probe, run by ``$python`` after ``$setup``. A program on stdin
    imports from the working directory first: none of the user's modules lies in the root. Its
    packages are not imported, so Python need not prepare for them (``-S``)."""
    return (
        "python_program() {\n"
        '    (eval "$setup" >/dev/null || exit; cd /; exec "$python" -S - "$@")'
        " <<'END_OF_PROBE'\n"
        f"{source(_PROBE)}END_OF_PROBE\n}}"
    )
