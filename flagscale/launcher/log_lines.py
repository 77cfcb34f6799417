"""Lines of a host's output: reading, labels, and filters. Standard library alone.

The launcher imports it for files that it can read. For others it sends the source to the host,
which runs it with its own Python (``runners/programs/filter_output.py``), so that only the lines
that pass the filter travel. Hence it imports nothing of this project.
"""

from __future__ import annotations

import json
import os
import re
import sys
from bisect import bisect_right
from collections import deque
from contextlib import suppress
from itertools import islice
from pathlib import Path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from typing import Any, BinaryIO

_READ_BYTES = 1 << 16
# Longest line of which the beginning is found for a position within it.
_MAX_LINE_BYTES = 1 << 20

WARNING, ERROR = 1, 2
LEVELS = {"warning": WARNING, "error": ERROR}
"""Levels that can be selected, with the least one that is shown."""

_WORDS = (
    *("WARN", "ERR", "FATAL", "CRIT", "arning: ", "rror", "atal ", "Exception", "Traceback"),
    *("first failure", "terminate called", "Segmentation", "Aborted", "Killed", "core dumped"),
)
"""Parts of words of which every warning and error has one, except torch's C++ lines. Most lines
have none, which is decided fast."""
_TORCH_PREFIX = re.compile(r"\[rank\d+\]:(?: |$)")
"""Prefix that torch adds to each line of an uncaught exception."""
_TRACEBACK = re.compile(r"\s*(?:\+ )?(?:Exception Group )?Traceback \(most recent call last\):")
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_GLOG = re.compile(r"(?:\[rank\d+\]:)?\[?([IWEF])\d{4} \d\d:\d\d:\d\d")
"""torch's C++ lines and its loggers of torchrun: ``[rank0]:[W1126 23:19:48.752 …``."""
_NCCL = re.compile(r"\bNCCL (INFO|TRACE|WARN|ERROR)\b")
_LOGGING = re.compile(
    r".{0,80}?(?:^|[\s\[(|:-])(DEBUG|INFO|NOTICE|WARNING|WARN|ERROR|CRITICAL|FATAL)(?=[\s\])|:-]|$)"
)
"""Level names of Python's logging and of similar loggers, near the beginning of a line."""
_PLAIN = re.compile(r"(?:flagscale: )?(warning|error|fatal error|first failure): ", re.I)
_PYTHON_WARNING = re.compile(r"(?:\S+:\d+: )?\w*Warning: ")
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception)(?::|$)")
_CRASH = re.compile(
    r"terminate called|Fatal Python error|Segmentation fault|Aborted|Killed$|.*\(core dumped\)"
)
_LEVELS_BY_WORD = {
    **dict.fromkeys(("I", "INFO", "TRACE", "DEBUG", "NOTICE"), 0),
    **dict.fromkeys(("W", "WARN", "WARNING"), WARNING),
    **dict.fromkeys(
        ("E", "F", "ERROR", "CRITICAL", "FATAL", "FATAL ERROR", "FIRST FAILURE"), ERROR
    ),
}


def level_of(text: str) -> int:
    """Return the level of a line without its label: 0 for lines that are neither warning nor error.

    Levels are those of Python's logging, NCCL, torch, Python's warnings, and this launcher.
    """
    if not _may_have_level(text):
        return 0
    for pattern in (_GLOG, _NCCL, _PLAIN, _LOGGING):
        match = pattern.match(text) if pattern is not _NCCL else pattern.search(text)
        if match is not None:
            return _LEVELS_BY_WORD[match.group(1).upper()]
    if _PYTHON_WARNING.match(text):
        return WARNING
    if _TRACEBACK.match(text) or _EXCEPTION.match(text) or _CRASH.match(text):
        return ERROR
    return 0


def _may_have_level(text: str) -> bool:
    return any(word in text for word in _WORDS) or _GLOG.match(text) is not None


class _Message:
    """A message of several lines, as far as it has been read."""

    def __init__(self, level: int, prefix: str, stage: str) -> None:
        self.level = level
        self.prefix = prefix
        self.stage = stage
        """``frames`` of a traceback, ``end`` after its last line, or ``text`` of other messages."""

    @classmethod
    def begin(cls, text: str) -> _Message:
        """Return the message that a line begins."""
        prefix, body = _split_prefix(text)
        stage = "frames" if _TRACEBACK.match(body) else "text"
        return cls(max(level_of(text), level_of(body)), prefix, stage)

    def takes(self, text: str) -> bool:
        """Return True if a line continues this message, and add it."""
        prefix, body = _split_prefix(text)
        if prefix != self.prefix:
            return False
        if _TRACEBACK.match(body):
            is_chained = self.stage != "text"
            self.stage = "frames" if is_chained else self.stage
            return is_chained
        if self.stage == "text":
            return body.startswith(("  ", "\t"))
        if self.stage == "frames":
            if body and not body[0].isspace():
                self.stage = "end"  # the exception itself
            return True
        # torch's prefix marks all lines of an exception; others end with its message.
        return bool(prefix) or not body or body[0].isspace() or body.startswith(_CHAINED)


def _split_prefix(text: str) -> tuple[str, str]:
    match = _TORCH_PREFIX.match(text)
    return (match.group(0).rstrip(), text[match.end() :]) if match else ("", text)


class LineFilter:
    """Selection of a host's labelled lines by a pattern and a level.

    With a level, a message of several lines, such as a traceback, is one unit: it has one level,
    and it is shown whole if the pattern is found in any of its lines. The lines of each rank are
    followed separately, because the ranks' lines are mixed.
    """

    def __init__(self, host: str, pattern: str | None = None, level: str | None = None) -> None:
        self._label = re.compile(re.escape(host) + r"(?::\d+)?: ")
        self._pattern = re.compile(pattern) if pattern is not None else None
        self._level = LEVELS[level] if level is not None else 0
        self._messages: dict[str, _Message] = {}
        self._held: dict[str, list[str]] = {}

    def feed(self, line: str) -> list[str]:
        """Return the lines to show after reading another one."""
        if not self._level:
            return [line] if self._matches(line) else []
        match = self._label.match(line)
        label, text = (match.group(0), line[match.end() :]) if match else ("", line)
        message = self._messages.get(label)
        if message is not None and message.takes(text):
            if self._pattern is None:
                return [line] if message.level >= self._level else []
            self._held[label].append(line)
            return []
        ended_lines = self._end_message(label) if message is not None else []
        if not _may_have_level(text):
            return ended_lines
        message = self._messages[label] = _Message.begin(text)
        self._held[label] = [line]
        if self._pattern is not None or message.level < self._level:
            return ended_lines
        return [*ended_lines, line]

    def flush(self) -> list[str]:
        """Return the lines to show at the end."""
        return [line for label in list(self._messages) for line in self._end_message(label)]

    def _end_message(self, label: str) -> list[str]:
        message, lines = self._messages.pop(label, None), self._held.pop(label, [])
        if message is None or self._pattern is None or message.level < self._level:
            return []
        return lines if any(map(self._matches, lines)) else []

    def _matches(self, line: str) -> bool:
        return self._pattern is None or self._pattern.search(line) is not None

    def to_json(self) -> dict[str, Any]:
        """Return the messages that have not ended, for :meth:`restore`."""
        return {
            label: [message.level, message.prefix, message.stage, self._held[label]]
            for label, message in self._messages.items()
        }

    def restore(self, record: dict[str, Any]) -> None:
        """Continue after the lines that another filter has read."""
        for label, (level, prefix, stage, lines) in record.items():
            self._messages[label] = _Message(level, prefix, stage)
            self._held[label] = lines


def host_label_function(name: str, rank: int | None) -> Callable[[str], str | None]:
    """Return the function that labels a host's lines.

    torchrun already puts ``host:rank: `` in front of the lines of ranks. Lines of the script, the
    agent and torchrun get ``host: ``.
    """
    ranks = r"\d+" if rank is None else str(rank)
    of_rank = re.compile(re.escape(name) + ":" + ranks + ": ")

    def label(line: str) -> str | None:
        if of_rank.match(line):
            return line
        return f"{name}: {line}" if rank is None else None

    return label


class Output:
    """Output file of a host's script or of a rank, read in whole lines.

    ``label`` adds the origin in front of a line, or returns None to leave the line out.
    ``line_filter`` selects labelled lines.
    """

    def __init__(
        self,
        path: Path,
        label: Callable[[str], str | None],
        line_filter: LineFilter | None = None,
    ) -> None:
        self.path = path
        self.offset = 0
        """Offset behind the last line that has been read."""
        self._add_label = label
        self._filter = line_filter
        self._unfinished = b""

    def read(self, *, final: bool = False) -> Iterator[str]:
        """Yield the lines since the last call; with ``final``, also an unfinished one."""
        yield from self._selected(self._read_forwards(final))
        if final and self._filter is not None:
            yield from self._filter.flush()

    def last_lines(self, count: int, *, final: bool = False) -> list[str]:
        """Return the last ``count`` lines so far; with ``final``, an unfinished one counts."""
        if self._filter is not None:
            return list(deque(self.read(final=final), maxlen=count))
        lines = list(islice(self._selected(self._read_backwards()), count))[::-1]
        lines += self.read(final=final)
        return lines[max(0, len(lines) - count) :]

    def _selected(self, lines: Iterable[str]) -> Iterator[str]:
        for line in lines:
            labelled = self._add_label(line)
            if labelled is None:
                continue
            if self._filter is None:
                yield labelled
            else:
                yield from self._filter.feed(labelled)

    def _read_forwards(self, final: bool) -> Iterator[str]:
        with suppress(FileNotFoundError), self.path.open("rb") as file:
            file.seek(self.offset + len(self._unfinished))
            data = file.read(_READ_BYTES)
            while data:
                *lines, self._unfinished = (self._unfinished + data).split(b"\n")
                for line in lines:
                    self.offset += len(line) + 1
                    yield line.decode("utf-8", "replace")
                data = file.read(_READ_BYTES)
        if final and self._unfinished:
            line, self._unfinished = self._unfinished, b""
            self.offset += len(line)
            yield line.decode("utf-8", "replace")

    def _read_backwards(self) -> Iterator[str]:
        """Yield the whole lines so far, last one first.

        Call it before :meth:`read`, which then continues behind them.
        """
        with suppress(FileNotFoundError), self.path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            lines = _split_backwards(file, end, self.offset)
            self.offset = end - len(next(lines))
            for line in lines:
                yield line.decode("utf-8", "replace")


def _split_backwards(file: BinaryIO, end: int, start: int = 0) -> Iterator[bytes]:
    """Yield the pieces between line ends from ``start`` to ``end``, last one first.

    Reading backwards avoids reading gigabytes to show three lines.
    """
    later_parts: list[bytes] = []
    while end > start:
        begin = max(start, end - _READ_BYTES)
        file.seek(begin)
        first, *lines = file.read(end - begin).split(b"\n")
        for line in reversed(lines):
            yield b"".join((line, *reversed(later_parts)))
            later_parts = []
        later_parts.append(first)
        end = begin
    yield b"".join(reversed(later_parts))


def offset_since(output: Path, index: Path, since: float) -> int | None:
    """Return the offset of the first line of an output that may be as recent as ``since``.

    The agent's index has lines ``<time> <size>``: at that time, the output had that many bytes.

    Args:
        output: The output's file.
        index: Its index, which may be missing.
        since: Seconds since the epoch.

    Returns:
        None if there is no index, and the output has been written to since.
    """
    try:
        status = output.stat()
    except FileNotFoundError:
        return 0
    if status.st_mtime < since:
        return status.st_size
    times: list[float] = []
    sizes: list[int] = []
    with suppress(FileNotFoundError), index.open("rb") as file:
        for line in file:
            words = line.split()
            # The last line may be incomplete.
            if len(words) == 2 and line.endswith(b"\n"):
                times.append(float(words[0]))
                sizes.append(int(words[1]))
    if not times:
        return None
    position = bisect_right(times, since)
    return _line_start(output, min(sizes[position - 1], status.st_size)) if position else 0


def _line_start(path: Path, offset: int) -> int:
    """Return the offset at which the line begins that an offset is in."""
    with path.open("rb") as file:
        begin = max(0, offset - _MAX_LINE_BYTES)
        file.seek(begin)
        return begin + file.read(offset - begin).rfind(b"\n") + 1


def create_filter(host: str, pattern: str | None, level: str | None) -> LineFilter | None:
    """Return the filter of a host's lines; None if every line passes."""
    return None if pattern is None and level is None else LineFilter(host, pattern, level)


def main(arguments: Sequence[str] | None = None) -> None:
    """Filter a host's output, and print records as the programs of :mod:`flagscale.hosts` do.

    The argument is the JSON of ``runners/programs/filter_output.py: FilterRequest``.
    """
    request = json.loads((sys.argv[1:] if arguments is None else arguments)[0])
    path, set_aside, host = Path(request["path"]), Path(request["set_aside"]), request["host"]
    if set_aside.exists():
        path = set_aside
    line_filter = create_filter(host, request["pattern"], request["level"])
    if line_filter is not None:
        line_filter.restore(request["messages"])
    output = Output(path, host_label_function(host, request["rank"]), line_filter)
    offset, has_times = request["offset"], True
    if offset is None and request["since"] is not None:
        offset = offset_since(path, Path(request["index"]), request["since"])
        has_times = offset is not None
    output.offset = offset or 0
    if request["count"] is not None:
        lines, has_more = output.last_lines(request["count"], final=request["final"]), False
    else:
        lines, has_more = _read_bounded(output, request["final"], request["max_bytes"])
    data = "".join(line + "\n" for line in lines).encode("utf-8", "replace").replace(b"\0", b"")
    messages = {} if line_filter is None else line_filter.to_json()
    flags = {"more": has_more, "times": has_times, "exists": path.exists()}
    records = [f"file={len(data)} {output.offset} lines\0".encode(), data]
    records.append(f"messages={json.dumps(messages)}\0".encode())
    records += [f"{name}={'yes' if value else ''}\0".encode() for name, value in flags.items()]
    sys.stdout.buffer.write(b"".join(records))


def _read_bounded(output: Output, final: bool, max_bytes: int) -> tuple[list[str], bool]:
    """Return the next lines, and True if there are more than that many bytes."""
    lines, size = [], 0
    for line in output.read(final=final):
        lines.append(line)
        size += len(line)
        if size >= max_bytes:
            return lines, True
    return lines, False


if __name__ == "__main__":
    main()
