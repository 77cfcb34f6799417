"""What starts the ranks of a command on one host, in the place of torchrun: standard library alone.

``python -c … --nproc_per_node N … -- COMMAND …`` starts the command N times, each with the
environment that torchrun would give it, and stays until all have ended. Its options, the files of
the ranks' output and the table of those that failed are torchrun's, so that whoever looks at a run
need not know which of the two it was.

One rank that fails ends the others: TERM, and KILL after ``TORCH_ELASTIC_SHUTDOWN_TIMEOUT``
seconds. The exit code is that of the rank that failed first, 128+n where a signal ended it.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

PREFIX = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
SHUTDOWN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
STREAMS = {1: ("stdout",), 2: ("stderr",), 3: ("stdout", "stderr")}
_OPTIONS: dict[type, str] = {
    int: "nnodes node_rank nproc_per_node first_rank world_size",
    str: "rdzv_id master_addr master_port log_dir redirects tee",
    float: "stop_grace",
}
_POLL_SECONDS = 0.05
_READ_BYTES = 1 << 16
_NOT_FOUND = 127
_TERMINATED = (-signal.SIGTERM, 128 + signal.SIGTERM)


class Stream:
    """A stream of a rank that goes to a file; ``label`` stands before each line that is shown."""

    def __init__(self, path: Path, label: bytes | None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.file = path.open("wb", buffering=0)
        self._label, self._rest = label, b""
        self._reader: BinaryIO | None = path.open("rb") if label is not None else None

    def show(self, *, final: bool = False) -> None:
        """Show the lines that are new; the unfinished one too if ``final``."""
        shown: list[bytes] = []
        while self._reader is not None and (data := self._reader.read(_READ_BYTES)):
            *lines, self._rest = (self._rest + data).split(b"\n")
            shown += (b"%s%s\n" % (self._label, line) for line in lines)
        # A bar of progress may never end its line.
        if self._rest and (final or len(self._rest) >= _READ_BYTES):
            shown.append(b"%s%s\n" % (self._label, self._rest))
            self._rest = b""
        # A disk that is full must not end the ranks: their own files are the same disk's.
        with suppress(OSError):
            os.write(sys.stdout.fileno(), b"".join(shown))


class Rank:
    """One of the host's ranks. ``code`` is negative for a signal, None as long as it lives."""

    def __init__(self, number: int, local: int, streams: Mapping[str, Stream]) -> None:
        self.number, self.local, self.streams = number, local, streams
        self.code: int | None = None
        self.ended, self.pid = 0.0, 0
        self.told = False
        """Whether it was to end because another one had failed, or a signal asked for it."""
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start its process. A program that is not there is a failure of the rank's own."""
        outputs = {name: stream.file for name, stream in self.streams.items()}
        try:
            self._process = subprocess.Popen(
                command, env=environment, stdout=outputs.get("stdout"), stderr=outputs.get("stderr")
            )
            self.pid = self._process.pid
        except OSError as error:
            text = f"flagscale: cannot start {command[0]}: {error.strerror}\n".encode()
            os.write(outputs["stderr"].fileno() if "stderr" in outputs else 2, text)
            self.code, self.ended = _NOT_FOUND, time.time()

    def look(self) -> None:
        """See whether it has ended."""
        if self.code is None and self._process is not None:
            self.code, self.ended = self._process.poll(), time.time()

    def send(self, number: int) -> None:
        if self.code is None and self._process is not None:
            self._process.send_signal(number)


class Ranks:
    """All of them, from their start to their end."""

    def __init__(self, ranks: Sequence[Rank], shutdown: float, grace: float) -> None:
        self._ranks, self._shutdown, self._grace = ranks, shutdown, grace
        self._asked = False
        self._end_at = self._kill_at = float("inf")
        self.failed: list[Rank] = []
        """Those that failed by themselves, in this order."""

    def ask(self, *_signal: object) -> None:
        """Take a signal that asks for the end."""
        self._asked = True

    def wait(self) -> int:
        """Stay until all have ended; the exit code."""
        while any(rank.code is None for rank in self._ranks):
            time.sleep(_POLL_SECONDS)
            self._turn(time.monotonic())
        self._turn(time.monotonic())
        for stream in (stream for rank in self._ranks for stream in rank.streams.values()):
            stream.show(final=True)
        codes = [rank.code or 0 for rank in (*self.failed, *self._ranks)]
        code = next((code for code in codes if code), 0)
        return code if code >= 0 else 128 - code

    def _turn(self, now: float) -> None:
        for rank in self._ranks:
            rank.look()
            for stream in rank.streams.values():
                stream.show()
            if rank.code and not rank.told and rank not in self.failed:
                self.failed.append(rank)
                # One that TERM has ended is the first of those that a stop was told to: the others
                # may be saving what they have.
                wait = self._grace if rank.code in _TERMINATED else 0.0
                self._end_at = min(self._end_at, now + wait)
        if self._asked or now >= self._end_at:
            self._end(now)

    def _end(self, now: float) -> None:
        for rank in self._ranks:
            if rank.code is None and not rank.told:
                rank.told = True
                rank.send(signal.SIGTERM)
                self._kill_at = now + self._shutdown
            elif now >= self._kill_at:
                rank.send(signal.SIGKILL)


def table(failed: Sequence[Rank], host: str) -> str:
    """The ranks that failed, as torchrun tells it: :func:`.liveness.diagnosis.parse_table`."""
    entries = (
        f"[{number}]:\n"
        f"  time      : {datetime.fromtimestamp(rank.ended).isoformat()}\n"
        f"  host      : {host}\n"
        f"  rank      : {rank.number} (local_rank: {rank.local})\n"
        f"  exitcode  : {rank.code} (pid: {rank.pid})\n"
        for number, rank in enumerate(failed)
    )
    return f"flagscale: {len(failed)} rank(s) of this host failed\nFailures:\n{''.join(entries)}"


def streams_of(text: str, local: int) -> tuple[str, ...]:
    """The streams that ``--tee`` or ``--redirects`` names for a local rank: 0 none, 1 stdout, 2
    stderr, 3 both; or ``local rank:number``, with commas, for some ranks alone. Raises
    :class:`ValueError` for anything else."""
    pairs = [pair.rpartition(":") for pair in text.split(",")]
    numbers = {int(rank) if colon else None: int(number) for rank, colon, number in pairs}
    if not set(numbers.values()) <= {0, *STREAMS} or (None in numbers and len(pairs) > 1):
        raise ValueError(text)
    return STREAMS.get(numbers.get(local, numbers.get(None, 0)), ())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="flagscale.launcher.rank_processes", description=__doc__)
    for kind, names in _OPTIONS.items():
        for name in names.split():
            parser.add_argument(f"--{name}", type=kind, required=True)
    return parser


def _environment(options: argparse.Namespace, local: int) -> dict[str, str]:
    """What a rank finds in its environment, as torchrun says it."""
    rank = options.first_rank + local
    told = {
        "RANK": rank,
        "LOCAL_RANK": local,
        "WORLD_SIZE": options.world_size,
        "LOCAL_WORLD_SIZE": options.nproc_per_node,
        "GROUP_RANK": options.node_rank,
        "GROUP_WORLD_SIZE": options.nnodes,
        "MASTER_ADDR": options.master_addr,
        "MASTER_PORT": options.master_port,
    }
    inherited = {name: value for name, value in os.environ.items() if name != PREFIX}
    return {**inherited, **{name: str(value) for name, value in told.items()}}


def _rank(options: argparse.Namespace, local: int, directory: Path) -> Rank:
    number = options.first_rank + local
    label = os.environ.get(PREFIX, "${rank}: ").replace("${rank}", str(number)).encode()
    shown = streams_of(options.tee, local)
    streams = {
        name: Stream(directory / f"{local}/{name}.log", label if name in shown else None)
        for name in {*shown, *streams_of(options.redirects, local)}
    }
    return Rank(number, local, streams)


def main(arguments: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if arguments is None else arguments)
    at = argv.index("--")
    options, command = _parser().parse_args(argv[:at]), argv[at + 1 :]
    directory = Path(options.log_dir, f"{options.rdzv_id}_{os.getpid()}", "attempt_0")
    made = [_rank(options, local, directory) for local in range(options.nproc_per_node)]
    ranks = Ranks(made, float(os.environ.get(SHUTDOWN) or 30), options.stop_grace)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, ranks.ask)
    for rank in made:
        rank.start(command, _environment(options, rank.local))
    code = ranks.wait()
    if ranks.failed:
        host = os.environ.get(PREFIX, "").partition(":")[0] or os.uname().nodename
        with suppress(OSError):
            print(table(ranks.failed, host), file=sys.stderr, flush=True)
    return code
