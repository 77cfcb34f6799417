"""Programs that travel to hosts: variables, quoted by construction, and the bash that reads them.

The bash lies in ``.sh`` files beside the modules that fill and read them; all of it begins with
``programs/proc.sh``. It answers with ``name=value`` and NUL, in any order, values as they are. A
value may be followed by raw bytes: ``file=<bytes> <offset> <path>`` and NUL announces so many.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from flagscale.hosts.errors import HostError
from flagscale.hosts.executor import Executor

Value = str | Sequence[str] | Mapping[str, str]

PROGRAMS = Path(__file__).with_name("programs")

#: The last thing that a program says: an answer that lacks it was cut off on its way.
END = "\nsay end yes\ntell\n"
_FILE = "file"


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


@dataclass(frozen=True)
class Piece:
    """Bytes of a file, from ``offset`` on."""

    path: str
    offset: int
    data: bytes


@dataclass(frozen=True)
class Answer:
    """What a host said. Of a name that was said several times, ``values`` has the last."""

    values: dict[str, str] = field(default_factory=dict)
    pieces: tuple[Piece, ...] = ()

    def get(self, name: str, default: str = "") -> str:
        return self.values.get(name, default)

    def number(self, name: str) -> int | None:
        """A value that is a whole number; None if it was not said or is none."""
        text = self.values.get(name, "")
        return int(text) if text.isdigit() else None


class CutOffError(HostError, summary="answered in part"):
    """A host's answer ended too early to be believed."""


def ask(executor: Executor, program: str, timeout: float) -> Answer:
    """Run a program on a host and read its answer. Raises :class:`CutOffError` where the program
    did not come to its end."""
    result = executor.run_script(program, timeout=timeout)
    answer = parse(result.stdout)
    if answer.get("end") != "yes":
        said = result.error_text.strip().splitlines()[-1:] or ["nothing on stderr"]
        what = f"its answer was cut off (exit code {result.exit_status}; {said[0]})"
        raise CutOffError(executor.name, what)
    return answer


def parse(data: bytes) -> Answer:
    """The answer in a program's output. What is cut off at the end is left out."""
    values: dict[str, str] = {}
    pieces: list[Piece] = []
    for name, value, raw in _entries(data):
        if name == _FILE:
            _, offset, path = value.split(" ", 2)
            pieces.append(Piece(path, int(offset), raw))
        else:
            values[name] = value
    return Answer(values, tuple(pieces))


def _entries(data: bytes) -> Iterator[tuple[str, str, bytes]]:
    at = 0
    while (end := data.find(b"\0", at)) >= 0:
        name, _, value = data[at:end].decode("utf-8", "surrogateescape").partition("=")
        at = end + 1
        raw = b""
        if name == _FILE:
            size = int(value.split(" ", 1)[0])
            raw = data[at : at + size]
            at += size
        yield name, value, raw
