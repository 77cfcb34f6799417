"""Python environment of a host: its version, its packages, and the code that it would run.

Starting Python costs a host more than all other queries together. Therefore :mod:`.probe` leaves
its result in a cache file of the user on the host, and bash reads that file while nothing has
changed that the result depends on:

- the arguments and the source of the probe, and the host (a home directory is often shared);
  ``PATH`` and the variables that set Python's search path;
- the interpreter, ``pyvenv.cfg``, conda's history, every directory that was searched for packages
  and every ``.pth`` file in it. They are compared by owner, mode, device, inode, size, and times of
  change, which differ for two directories that were swapped, however old they are. Directories
  that were absent must still be absent;
- where code is compared: every file of it, by name, inode, size and times.

The directory ``${XDG_CACHE_HOME:-~/.cache}/flagscale/hosts`` and the file must belong to the
user and must not be writable by others. If the file fails any of these checks, Python runs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flagscale.hosts import probe
from flagscale.hosts.program import ShellValue, read_source

_PROBE = Path(probe.__file__)


@dataclass(frozen=True)
class PythonEnvironment:
    """Python environment of a host.

    ``code`` is the digest of the project's code there, empty where code was not compared.
    ``module_replies`` are the JSON replies of modules of this project that the probe has run, by
    the name of the query (:mod:`flagscale.hosts.probe`).
    """

    version: str
    executable: str
    packages: Mapping[str, str] = field(default_factory=dict)
    code: str = ""
    module_replies: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def parse_environment(text: str) -> PythonEnvironment | None:
    """Parse the output of the probe, which may be mixed with output of activation scripts.

    Returns None if the output does not contain a Python version.
    """
    values: dict[str, str] = {}
    packages: dict[str, str] = {}
    module_replies: dict[str, Mapping[str, Any]] = {}
    for line in text.splitlines():
        prefix, _, record = line.partition(" ")
        name, _, value = record.partition(" ")
        value = value.replace("%0A", "\n").replace("%25", "%")
        if prefix == "=" and name == "package":
            package, _, version = value.partition(" ")
            packages[package] = version
        elif prefix == "=" and name == "answer":
            query_name, reply = json.loads(value)
            module_replies[query_name] = reply
        elif prefix == "=":
            values[name] = value
    if not values.get("version"):
        return None
    executable = values.get("executable", "")
    return PythonEnvironment(
        values["version"], executable, packages, values.get("code", ""), module_replies
    )


def shell_variables(
    project: str, python: str, setup: str, *, compare_code: bool, ignore_cache: bool
) -> dict[str, ShellValue]:
    """Return the variables of ``python_environment.sh``.

    ``project`` is the project's directory on the host, ``setup`` the commands that activate the
    environment of ``python``. ``compare_code`` requests a digest of the code; ``ignore_cache``
    runs Python although the cache may be valid.
    """
    cache_key = [project, python, setup, compare_code]
    return {
        "query_digest": _digest(json.dumps([read_source(_PROBE), *cache_key])),
        "cache_name": _digest(json.dumps([python, setup]))[:16],
        "compare_code": "yes" if compare_code else "",
        "ignore_cache": "yes" if ignore_cache else "",
        "code_roots": [f"{project}/{root}" for root in probe.CODE_ROOTS],
    }


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def python_function() -> str:
    """Return the bash function ``python_program``, which runs the probe with ``$python`` after
    ``$setup``.

    The working directory is the root, because a program on stdin imports from the working
    directory first and no module of the user is there. Packages are not imported, so Python
    skips ``site`` (``-S``).
    """
    return (
        "python_program() {\n"
        '    (eval "$setup" >/dev/null || exit; cd /; exec "$python" -S - "$@")'
        " <<'END_OF_PROBE'\n"
        f"{read_source(_PROBE)}END_OF_PROBE\n}}"
    )
