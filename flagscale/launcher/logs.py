"""Output of a run, with ``host:rank`` in front of every line.

Used by ``action=logs`` and by foreground runs.
"""

from __future__ import annotations

import codecs
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from flagscale.errors import ConfigError
from flagscale.hosts.processes import POLL_SECONDS
from flagscale.launcher.liveness.diagnosis import rank_logs
from flagscale.launcher.state import RunState

_READ_BYTES = 1 << 16


class Output:
    """Output file of a host's script or of a rank, read in whole lines.

    ``label`` adds the origin in front of a line, or returns None to leave the line out.
    """

    def __init__(self, path: Path, label: Callable[[str], str | None]) -> None:
        self.path = path
        self._add_label = label
        self._offset = 0
        self._unfinished = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def read(self, *, final: bool = False) -> Iterator[str]:
        """Yield the lines since the last call; with ``final``, also an unfinished one."""
        return self._labelled(self._read_forwards(final))

    def last_lines(self, count: int, *, final: bool = False) -> list[str]:
        """Return the last ``count`` lines so far; with ``final``, an unfinished one counts."""
        lines = list(islice(self._labelled(self._read_backwards()), count))[::-1]
        lines += self.read(final=final)
        return lines[max(0, len(lines) - count) :]

    def _labelled(self, lines: Iterator[str]) -> Iterator[str]:
        return (labelled for line in lines if (labelled := self._add_label(line)) is not None)

    def _read_forwards(self, final: bool) -> Iterator[str]:
        with suppress(FileNotFoundError), self.path.open("rb") as file:
            file.seek(self._offset)
            while data := file.read(_READ_BYTES):
                self._offset += len(data)
                *lines, self._unfinished = (self._unfinished + self._decoder.decode(data)).split(
                    "\n"
                )
                yield from lines
        if final and self._unfinished:
            yield self._unfinished
            self._unfinished = ""

    def _read_backwards(self) -> Iterator[str]:
        """Yield the whole lines so far, last one first.

        Call it before :meth:`read`, which then continues behind them.
        """
        with suppress(FileNotFoundError), self.path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            lines = _split_backwards(file, end)
            self._offset = end - len(next(lines))
            for line in lines:
                yield line.decode("utf-8", "replace")


def _split_backwards(file: BinaryIO, end: int) -> Iterator[bytes]:
    """Yield the pieces between line ends before ``end``, last one first.

    Reading backwards avoids reading gigabytes to show three lines.
    """
    later_parts: list[bytes] = []
    while end:
        begin = max(0, end - _READ_BYTES)
        file.seek(begin)
        first, *lines = file.read(end - begin).split(b"\n")
        for line in reversed(lines):
            yield b"".join((line, *reversed(later_parts)))
            later_parts = []
        later_parts.append(first)
        end = begin
    yield b"".join(reversed(later_parts))


def host_outputs(state: RunState, rank: int | None = None) -> list[Output]:
    """Return the outputs of the hosts' scripts, which include their ranks', or of one rank.

    Raises:
        ConfigError: there is no such rank.
    """
    if rank is not None and not 0 <= rank < state.world_size:
        ranks = f"ranks 0 to {state.world_size - 1}"
        raise ConfigError(f"rank={rank}: run {state.run_id} has {ranks}")
    hosts = (host for host in state.hosts if rank is None or rank in host.ranks)
    return [Output(host.output, _host_label_function(host.name, rank)) for host in hosts]


def _host_label_function(name: str, rank: int | None) -> Callable[[str], str | None]:
    """Return the function that labels a host's lines.

    torchrun already puts ``host:rank: `` in front of the lines of ranks. Lines of the script, the
    agent and torchrun get ``host: ``.
    """
    ranks = r"\d+" if rank is None else str(rank)
    of_rank = re.compile(rf"{re.escape(name)}:{ranks}: ")

    def label(line: str) -> str | None:
        if of_rank.match(line):
            return line
        return f"{name}: {line}" if rank is None else None

    return label


def _rank_outputs(state: RunState, rank: int | None) -> Iterator[Output]:
    """Yield the files that torchrun writes for each rank."""
    for host in state.hosts:
        for number in host.ranks if rank is None else {rank}.intersection(host.ranks):
            label = f"{host.name}:{number}: {{}}".format
            for name in ("stdout.log", "stderr.log"):
                yield from (Output(path, label) for path in rank_logs(host, number, name))


def read_lines(state: RunState, rank: int | None = None, count: int | None = None) -> Iterator[str]:
    """Yield all lines of a run so far, host by host, or the last ``count`` of each.

    A run without an output file, whose script was started by hand in a terminal, has torchrun's
    files of each rank.
    """
    has_output = False
    for outputs in (host_outputs(state, rank), _rank_outputs(state, rank)):
        for output in () if has_output else outputs:
            lines = (
                output.read(final=True) if count is None else output.last_lines(count, final=True)
            )
            for line in lines:
                has_output = True
                yield line


def follow_lines(outputs: Sequence[Output], ended: Callable[[], bool]) -> Iterator[str]:
    """Yield lines as they come until ``ended`` returns true, then the remaining ones.

    It polls, because a shared file system may not notify of changes.
    """
    finished = False
    while not finished:
        finished = ended()
        for output in outputs:
            yield from output.read(final=finished)
        if not finished:
            time.sleep(POLL_SECONDS)
