"""The output of a run, every line with its ``host:rank`` in front."""

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
    """A file that a host's script or a rank prints to, read in whole lines. ``label`` puts in front
    of a line whose it is; None for lines that are not wanted."""

    def __init__(self, path: Path, label: Callable[[str], str | None]) -> None:
        self.path = path
        self._label = label
        self._offset = 0
        self._rest = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def read(self, *, final: bool = False) -> Iterator[str]:
        """The lines that have come since the last call; the unfinished one too if ``final``."""
        return self._labelled(self._forwards(final))

    def last(self, count: int, *, final: bool = False) -> list[str]:
        """The last so many lines so far, of which an unfinished one is one if ``final``."""
        lines = list(islice(self._labelled(self._backwards()), count))[::-1]
        lines += self.read(final=final)
        return lines[max(0, len(lines) - count) :]

    def _labelled(self, lines: Iterator[str]) -> Iterator[str]:
        return (found for line in lines if (found := self._label(line)) is not None)

    def _forwards(self, final: bool) -> Iterator[str]:
        with suppress(FileNotFoundError), self.path.open("rb") as file:
            file.seek(self._offset)
            while data := file.read(_READ_BYTES):
                self._offset += len(data)
                *lines, self._rest = (self._rest + self._decoder.decode(data)).split("\n")
                yield from lines
        if final and self._rest:
            yield self._rest
            self._rest = ""

    def _backwards(self) -> Iterator[str]:
        """The whole lines so far, the last one first. To be called before :meth:`read`, which then
        gives what comes after them."""
        with suppress(FileNotFoundError), self.path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            lines = _backwards(file, end)
            self._offset = end - len(next(lines))
            for line in lines:
                yield line.decode("utf-8", "replace")


def _backwards(file: BinaryIO, end: int) -> Iterator[bytes]:
    """What the line ends before ``end`` part, the last piece first: nobody reads gigabytes to see
    three lines."""
    later: list[bytes] = []
    while end:
        begin = max(0, end - _READ_BYTES)
        file.seek(begin)
        first, *others = file.read(end - begin).split(b"\n")
        for line in reversed(others):
            yield b"".join((line, *reversed(later)))
            later = []
        later.append(first)
        end = begin
    yield b"".join(reversed(later))


def of_hosts(state: RunState, rank: int | None = None) -> list[Output]:
    """What the hosts' scripts and their ranks print, or only that rank. Raises
    :class:`ConfigError` where there is no such rank."""
    if rank is not None and not 0 <= rank < state.world_size:
        ranks = f"ranks 0 to {state.world_size - 1}"
        raise ConfigError(f"rank={rank}: run {state.run_id} has {ranks}")
    hosts = (host for host in state.hosts if rank is None or rank in host.ranks)
    return [Output(host.output, _of_host(host.name, rank)) for host in hosts]


def _of_host(name: str, rank: int | None) -> Callable[[str], str | None]:
    """torchrun already puts ``host:rank: `` in front of the lines of ranks; what the script, the
    agent and torchrun say themselves gets ``host: ``."""
    ranks = r"\d+" if rank is None else str(rank)
    of_rank = re.compile(rf"{re.escape(name)}:{ranks}: ")

    def label(line: str) -> str | None:
        if of_rank.match(line):
            return line
        return f"{name}: {line}" if rank is None else None

    return label


def _of_ranks(state: RunState, rank: int | None) -> Iterator[Output]:
    """The files that torchrun writes for each rank."""
    for host in state.hosts:
        for number in host.ranks if rank is None else {rank}.intersection(host.ranks):
            label = f"{host.name}:{number}: {{}}".format
            for name in ("stdout.log", "stderr.log"):
                yield from (Output(path, label) for path in rank_logs(host, number, name))


def lines_of(state: RunState, rank: int | None = None, count: int | None = None) -> Iterator[str]:
    """Every line of a run so far, one host after the other, or the last ``count`` of each. A run
    without an output file, whose script was started by hand in a terminal, has the files that
    torchrun writes for each rank."""
    found = False
    for outputs in (of_hosts(state, rank), _of_ranks(state, rank)):
        for output in () if found else outputs:
            read = output.read(final=True) if count is None else output.last(count, final=True)
            for line in read:
                found = True
                yield line


def follow(outputs: Sequence[Output], ended: Callable[[], bool]) -> Iterator[str]:
    """Lines as they come until ``ended``, then the rest. Polls: a run's files may lie on a file
    system that tells nobody of changes."""
    over = False
    while not over:
        over = ended()
        for output in outputs:
            yield from output.read(final=over)
        if not over:
            time.sleep(POLL_SECONDS)
