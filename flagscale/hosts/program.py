"""Bash programs that run on hosts, and the parser of their output.

The bash is in ``.sh`` files next to the modules that use it, and every program begins with
``programs/proc.sh``, which defines functions for reporting results (``report`` adds a record and
``print_results`` prints all of them) and for reading /proc. Python values are passed as shell
variables, which are always quoted. A program prints ``name=value`` records, each terminated by NUL,
in any order. The record ``file=<bytes> <offset> <path>`` is followed by that many raw bytes.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from flagscale.hosts.connection import HostConnection
from flagscale.hosts.errors import HostError

ShellValue = str | Sequence[str] | Mapping[str, str]

PROGRAMS = Path(__file__).with_name("programs")

#: Last record of every program. Output without it was truncated.
END_RECORD = "\nreport end yes\nprint_results\n"
_FILE_RECORD = "file"


def build_program(
    body: Path, variables: Mapping[str, ShellValue], *fragments: str, end: str = END_RECORD
) -> str:
    """Return a complete program.

    It consists of assignments of ``variables`` (sequences as arrays, mappings as associative
    arrays), the bash ``fragments``, the file ``body``, and ``end``.
    """
    assignments = [shell_assignment(name, value) for name, value in variables.items()]
    return "\n".join(
        [read_source(PROGRAMS / "proc.sh"), *assignments, *fragments, read_source(body) + end]
    )


@cache
def read_source(path: Path) -> str:
    """Return the text of a bash file."""
    return path.read_text(encoding="utf-8")


def shell_assignment(name: str, value: ShellValue) -> str:
    """Return the bash assignment of one variable, quoted whatever its value contains."""
    if isinstance(value, str):
        return f"{name}={shlex.quote(value)}"
    if isinstance(value, Mapping):
        pairs = (f"[{shlex.quote(key)}]={shlex.quote(text)}" for key, text in value.items())
        return f"declare -A {name}=({' '.join(pairs)})"
    return f"{name}=({' '.join(map(shlex.quote, value))})"


@dataclass(frozen=True)
class FileChunk:
    """Bytes of a file on a host, starting at ``offset``."""

    path: str
    offset: int
    data: bytes


@dataclass(frozen=True)
class ProgramOutput:
    """Parsed output of a program. If a name was reported several times, ``values`` has the last
    value.
    """

    values: dict[str, str] = field(default_factory=dict)
    chunks: tuple[FileChunk, ...] = ()

    def get(self, name: str, default: str = "") -> str:
        return self.values.get(name, default)

    def get_int(self, name: str) -> int | None:
        """Return a non-negative integer value; None if the name is missing or the value is no
        number.
        """
        text = self.values.get(name, "")
        return int(text) if text.isdigit() else None


class CutOffError(HostError, summary="answered in part"):
    """A program's output ended before its last record, so none of it is used."""


def run_program(connection: HostConnection, program: str, timeout: float) -> ProgramOutput:
    """Run a program on a host and parse its output.

    ``timeout`` is in seconds. Raises :class:`CutOffError` if the program did not run to its end.
    """
    result = connection.run_script(program, timeout=timeout)
    output = parse_output(result.stdout)
    if output.get("end") != "yes":
        last_error_line = result.error_text.strip().splitlines()[-1:] or ["nothing on stderr"]
        message = f"its answer was cut off (exit code {result.exit_status}; {last_error_line[0]})"
        raise CutOffError(connection.name, message)
    return output


def parse_output(data: bytes) -> ProgramOutput:
    """Parse a program's output. An incomplete record at the end is dropped."""
    values: dict[str, str] = {}
    chunks: list[FileChunk] = []
    for name, value, file_data in _iter_records(data):
        if name == _FILE_RECORD:
            _, offset, path = value.split(" ", 2)
            chunks.append(FileChunk(path, int(offset), file_data))
        else:
            values[name] = value
    return ProgramOutput(values, tuple(chunks))


def _iter_records(data: bytes) -> Iterator[tuple[str, str, bytes]]:
    position = 0
    while (end := data.find(b"\0", position)) >= 0:
        name, _, value = data[position:end].decode("utf-8", "surrogateescape").partition("=")
        position = end + 1
        file_data = b""
        if name == _FILE_RECORD:
            size = int(value.split(" ", 1)[0])
            file_data = data[position : position + size]
            position += size
        yield name, value, file_data
