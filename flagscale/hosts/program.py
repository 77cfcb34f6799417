"""Programs that travel to hosts: variables, quoted by construction, and the bash that reads them.

The bash lies in ``.sh`` files beside the modules that fill and read them; all of it begins with
``programs/proc.sh``.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

Value = str | Sequence[str] | Mapping[str, str]

PROGRAMS = Path(__file__).with_name("programs")

#: The last thing that a program says: an answer that lacks it was cut off on its way.
END = "\nsay end yes\ntell\n"


def program(body: Path, given: Mapping[str, Value], *more: str, end: str = END) -> str:
    """A whole program: what is ``given`` as variables (words as arrays, mappings as associative
    ones), ``more`` bash, the file ``body``, and how it ends."""
    variables = [assignment(name, value) for name, value in given.items()]
    return "\n".join([source(PROGRAMS / "proc.sh"), *variables, *more, source(body) + end])


@cache
def source(path: Path) -> str:
    """A file of bash."""
    return path.read_text(encoding="utf-8")


def assignment(name: str, value: Value) -> str:
    """One variable of bash, whatever is in its value."""
    if isinstance(value, str):
        return f"{name}={shlex.quote(value)}"
    if isinstance(value, Mapping):
        pairs = (f"[{shlex.quote(key)}]={shlex.quote(text)}" for key, text in value.items())
        return f"declare -A {name}=({' '.join(pairs)})"
    return f"{name}=({' '.join(map(shlex.quote, value))})"
