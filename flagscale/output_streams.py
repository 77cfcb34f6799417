"""Standard streams of a command: closed ones, other encodings, and writes that fail.

Uses the standard library alone.
"""

from __future__ import annotations

import io
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

STDOUT = "stdout"
"""Name of the output stream in errors."""
# Colors and other attributes of text stay; a carriage return is how progress bars start anew.
_COLORS_OR_CONTROL = re.compile(
    r"(\x1b\[[0-9;:]*m)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]"
)


def escape_controls(text: str) -> str:
    """Return a text of other programs without sequences that control a terminal, other than colors.

    They could rename its window, move the cursor, or hide what was printed before.
    """

    def escape(match: re.Match[str]) -> str:
        return match[1] or match[0].encode("unicode_escape").decode("ascii")

    return _COLORS_OR_CONTROL.sub(escape, text)


def format_for_terminal(text: str) -> str:
    """Return :func:`escape_controls` of a text if stdout is a terminal, otherwise the text itself.

    For output of ranks, which a file or a pipe gets as it is.
    """
    return escape_controls(text) if sys.stdout.isatty() else text


def prepare_standard_streams() -> None:
    """Make the standard streams usable by a command, whatever they were started with.

    A closed one becomes ``/dev/null``: otherwise the next opened file would get its descriptor, and
    with it what child processes print. A character that the encoding lacks is written as
    ``\\xe9`` or ``\\u2500``.
    """
    for descriptor, name in ((0, "stdin"), (1, "stdout"), (2, "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free descriptor, which is this one
        if getattr(sys, name) is None:
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115, PTH123
    if sys.stdout is sys.__stdout__ and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout = _reopen(sys.stdout, STDOUT)


class _NamedFile(io.FileIO):
    """File whose errors of writing carry a name, as those of opened files do."""

    def __init__(self, descriptor: int, stream_name: str) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._stream_name = stream_name

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            error.filename = self._stream_name
            raise


def _reopen(stream: io.TextIOWrapper, name: str) -> io.TextIOWrapper:
    """Return a stream like this one that escapes what its encoding lacks and names itself in
    errors.
    """
    with suppress(OSError):
        stream.flush()
    file = _NamedFile(stream.fileno(), name)
    is_unbuffered = isinstance(stream.buffer, io.RawIOBase)  # `python -u`
    return io.TextIOWrapper(
        file if is_unbuffered else io.BufferedWriter(file),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


class LossyStream:
    """Text stream that leaves out what cannot be written, and reports that once.

    Lines are written whole and at once to the descriptor, so that a failed write leaves no rest
    that a later one would repeat. Other attributes are those of the stream.
    """

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream = stream
        self._name = name
        self._pending = ""
        self._lock = threading.RLock()
        self.other: LossyStream | None = None
        """Stream that reports the first failure of this one."""
        self.failed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._lock:
            self._pending += text
            if text.endswith("\n"):
                self.flush()
        return len(text)

    def flush(self) -> None:
        with self._lock:
            text, self._pending = self._pending, ""
            try:
                self._write_whole(text.encode(self._stream.encoding, "backslashreplace"))
            except (OSError, ValueError) as error:
                self._report(error)

    def _write_whole(self, data: bytes) -> None:
        descriptor = self._stream.fileno()
        while data:
            data = data[os.write(descriptor, data) :]

    def _report(self, error: Exception) -> None:
        if self.failed:
            return
        self.failed = True
        if self.other is not None and not self.other.failed:
            reason = error.strerror if isinstance(error, OSError) else error
            self.other.write(
                f"note: {self._name} cannot be written: {reason}. Lines are left out here; the job "
                "goes on, and its logs have all of its output\n"
            )


@contextmanager
def lossy_standard_streams() -> Iterator[None]:
    """Replace stdout and stderr by streams whose failures end nothing.

    A job does not depend on the terminal or the file that shows its output.
    """
    originals = sys.stdout, sys.stderr
    for stream in originals:
        with suppress(OSError, ValueError):
            stream.flush()
    output, errors = LossyStream(sys.stdout, STDOUT), LossyStream(sys.stderr, "stderr")
    output.other, errors.other = errors, output
    sys.stdout, sys.stderr = output, errors
    try:
        yield
    finally:
        output.flush()
        errors.flush()
        sys.stdout, sys.stderr = originals
