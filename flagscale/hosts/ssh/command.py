"""The one line of text a host's login shell gets to see, and what comes back from it.

The line is built by :mod:`shlex` and nothing else. It starts ``sh``, which starts the command, so
that a command that a signal ends has the status 128+n that every shell reports; scripts have a
line of their own, see :mod:`.shell`. A marker on both output streams says that the login shell's
own start-up files are done: what they printed before it is not the command's output, and without
it the command never ran.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

#: Login shells get the line as one argument, which Linux limits to 128 KiB.
LONGEST = 128 * 1024 - 1

MARKER = b"\x02flagscale\x03"

#: Shell commands that print the marker, given as ``$0``, on both streams.
MARK = r"""printf '\002%s\003' "$0"; printf '\002%s\003' "$0" >&2;"""
_WRAPPER = f'{MARK} "$@"; exit $?'


def command_line(argv: Sequence[str]) -> str:
    """The line for the login shell that runs ``argv``.

    Raises :class:`ValueError` for what no process can be given: an empty command, a NUL, or more
    than Linux takes. Long and secret things belong on stdin.
    """
    if not argv:
        raise ValueError("a command needs at least its name")
    if any("\0" in argument for argument in argv):
        raise ValueError("an argument cannot contain NUL")
    line = shlex.join(["exec", "sh", "-c", _WRAPPER, "flagscale", *argv])
    size = len(line.encode("utf-8", "surrogateescape"))
    if size > LONGEST:
        raise ValueError(f"a command line of {size} bytes is too long; use stdin")
    return line


class AfterMarker:
    """Collects a stream's bytes and gives out only those after the marker."""

    def __init__(self) -> None:
        self.before = bytearray()
        self.seen = False

    def feed(self, data: bytes) -> bytes:
        if self.seen:
            return data
        self.before += data
        noise, found, rest = bytes(self.before).partition(MARKER)
        if not found:
            return b""
        self.seen = True
        self.before = bytearray(noise)
        return rest
