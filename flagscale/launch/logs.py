"""The output of a run, every line with its ``host:rank`` in front."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from flagscale.launch.liveness.diagnosis import rank_logs
from flagscale.launch.state import HostState, RunState

_READ_BYTES = 1 << 16


class Tail:
    """Reads what is appended to a file, in whole lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._rest = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def read(self, *, final: bool = False) -> Iterator[str]:
        """The lines that have come since the last call; the unfinished one too if ``final``."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return
        with file:
            file.seek(self._offset)
            while data := file.read(_READ_BYTES):
                self._offset += len(data)
                *lines, self._rest = (self._rest + self._decoder.decode(data)).split("\n")
                yield from lines
        if final and self._rest:
            yield self._rest
            self._rest = ""


class HostOutput:
    """What one host's script and its ranks have printed, labelled.

    torchrun already puts ``host:rank: `` in front of the lines of ranks; what the script, the
    agent and torchrun say themselves gets ``host: ``.
    """

    def __init__(self, host: HostState, rank: int | None = None) -> None:
        self._host = host.name
        self._tail = Tail(host.output)
        ranks = r"\d+" if rank is None else str(rank)
        self._of_rank = re.compile(rf"{re.escape(host.name)}:{ranks}: ")
        self._only_ranks = rank is not None

    def read(self, *, final: bool = False) -> Iterator[str]:
        for line in self._tail.read(final=final):
            if self._of_rank.match(line):
                yield line
            elif not self._only_ranks:
                yield f"{self._host}: {line}"


class RunOutput:
    """The lines of all hosts of a run, in the order in which they are read."""

    def __init__(self, state: RunState, rank: int | None = None) -> None:
        hosts = [host for host in state.hosts if rank is None or rank in host.ranks]
        self._outputs = [HostOutput(host, rank) for host in hosts]

    def read(self, *, final: bool = False) -> Iterator[str]:
        for output in self._outputs:
            yield from output.read(final=final)


def lines_of(state: RunState, rank: int | None = None) -> list[str]:
    """Every line of a run so far. A run without an output file, whose script was started by hand
    in a terminal, has the files that torchrun writes for each rank."""
    found = list(RunOutput(state, rank).read(final=True))
    return found or list(_from_rank_files(state, rank))


def _from_rank_files(state: RunState, rank: int | None) -> Iterator[str]:
    for host in state.hosts:
        for number in host.ranks if rank is None else [r for r in host.ranks if r == rank]:
            for name in ("stdout.log", "stderr.log"):
                for path in rank_logs(host, number, name):
                    for line in Tail(path).read(final=True):
                        yield f"{host.name}:{number}: {line}"


def follow(output: RunOutput, ended: Callable[[], bool], show: Callable[[str], None]) -> None:
    """Show lines as they come until ``ended``, then the rest. Polls: a run's files may lie on a
    file system that tells nobody of changes."""
    from flagscale.hosts.processes import wait_until

    def step() -> bool:
        over = ended()
        for line in output.read(final=over):
            show(line)
        return over

    while not wait_until(step, 3600.0):
        pass
