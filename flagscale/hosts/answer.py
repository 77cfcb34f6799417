"""How the bash programs answer: ``name=value`` and NUL, in any order, values as they are.

A value may be followed by raw bytes: ``file=<bytes> <offset> <path>`` and NUL announces so many.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from flagscale.hosts.errors import HostError
from flagscale.hosts.executor import Executor

_FILE = "file"


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


class CutOffError(HostError):
    """A host's answer ended too early to be believed."""

    summary = "answered in part"


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
