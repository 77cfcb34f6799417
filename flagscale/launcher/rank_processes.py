"""Launcher of the ranks of a command on one host, in place of torchrun. Standard library only.

``… rank_processes --nproc_per_node N … -- COMMAND …`` starts the command N times, each with the
environment that torchrun would set, and waits until all have ended. Options, output files of the
ranks and the table of failed ranks are those of torchrun, so that other code need not distinguish
the two.

If one rank fails, the others are ended: TERM, and KILL after ``TORCH_ELASTIC_SHUTDOWN_TIMEOUT``
seconds. The exit code is that of the rank that failed first, 128+n for a signal n.
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

from flagscale.hosts.kernel import handle_hangup
from flagscale.status import write_exit_code

LINE_PREFIX_VARIABLE = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
SHUTDOWN_TIMEOUT_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
STREAMS = {1: ("stdout",), 2: ("stderr",), 3: ("stdout", "stderr")}
_OPTIONS: dict[type, str] = {
    int: "nnodes node_rank nproc_per_node first_rank world_size",
    str: "rdzv_id master_addr master_port log_dir redirects tee",
    float: "stop_grace",
}
_POLL_SECONDS = 0.05
_READ_BYTES = 1 << 16
_COMMAND_NOT_FOUND_CODE = 127
_TERMINATED_CODES = (-signal.SIGTERM, 128 + signal.SIGTERM)


class RankStream:
    """An output stream of a rank, which goes to a file.

    If ``label`` is not None, its lines are printed as well, each with the label in front.
    """

    def __init__(self, path: Path, label: bytes | None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.file = path.open("wb", buffering=0)
        self._label, self._incomplete = label, b""
        self._reader: BinaryIO | None = path.open("rb") if label is not None else None

    def print_lines(self, *, final: bool = False) -> None:
        """Print the new lines; with ``final``, an incomplete last line too."""
        output: list[bytes] = []
        while self._reader is not None and (data := self._reader.read(_READ_BYTES)):
            *lines, self._incomplete = (self._incomplete + data).split(b"\n")
            output += (b"%s%s\n" % (self._label, line) for line in lines)
        # A progress bar may never end its line.
        if self._incomplete and (final or len(self._incomplete) >= _READ_BYTES):
            output.append(b"%s%s\n" % (self._label, self._incomplete))
            self._incomplete = b""
        # A full disk must not end the ranks: their own files are on the same disk.
        with suppress(OSError):
            os.write(sys.stdout.fileno(), b"".join(output))


class RankProcess:
    """One of the host's ranks. ``exit_code`` is negative for a signal, None while it is running."""

    def __init__(self, rank: int, local_rank: int, streams: Mapping[str, RankStream]) -> None:
        self.rank = rank
        self.local_rank = local_rank
        self.streams = streams
        self.exit_code: int | None = None
        self.ended, self.pid = 0.0, 0
        self.terminated = False
        """True if it was terminated because another rank had failed, or because of a signal."""
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the process. A missing program is a failure of the rank."""
        outputs = {name: stream.file for name, stream in self.streams.items()}
        try:
            self._process = subprocess.Popen(
                command, env=environment, stdout=outputs.get("stdout"), stderr=outputs.get("stderr")
            )
            self.pid = self._process.pid
        except OSError as error:
            text = f"flagscale: cannot start {command[0]}: {error.strerror}\n".encode()
            os.write(outputs["stderr"].fileno() if "stderr" in outputs else 2, text)
            self.exit_code, self.ended = _COMMAND_NOT_FOUND_CODE, time.time()

    def poll(self) -> None:
        """Update ``exit_code`` if the process has ended, and record it for the agent."""
        if self.exit_code is None and self._process is not None:
            self.exit_code, self.ended = self._process.poll(), time.time()
            if self.exit_code is not None:
                write_exit_code(self.rank, self.exit_code)

    def send_signal(self, number: int) -> None:
        if self.exit_code is None and self._process is not None:
            self._process.send_signal(number)


class RankGroup:
    """All ranks of the host, from start to end."""

    def __init__(
        self, ranks: Sequence[RankProcess], shutdown_seconds: float, grace_seconds: float
    ) -> None:
        self._ranks = ranks
        self._shutdown_seconds = shutdown_seconds
        self._grace_seconds = grace_seconds
        self._end_requested = False
        self._end_at = self._kill_at = float("inf")
        self.failed: list[RankProcess] = []
        """Ranks that failed by themselves, in order."""

    def request_end(self, *_signal: object) -> None:
        """Handle a signal that requests the end."""
        self._end_requested = True

    def wait(self) -> int:
        """Wait until all ranks have ended, and return the exit code."""
        while any(rank.exit_code is None for rank in self._ranks):
            time.sleep(_POLL_SECONDS)
            self._update(time.monotonic())
        self._update(time.monotonic())
        for stream in (stream for rank in self._ranks for stream in rank.streams.values()):
            stream.print_lines(final=True)
        codes = [rank.exit_code or 0 for rank in (*self.failed, *self._ranks)]
        code = next((code for code in codes if code), 0)
        return code if code >= 0 else 128 - code

    def _update(self, now: float) -> None:
        for rank in self._ranks:
            rank.poll()
            for stream in rank.streams.values():
                stream.print_lines()
            if rank.exit_code and not rank.terminated and rank not in self.failed:
                self.failed.append(rank)
                # A rank that was ended by TERM is the first to react to a stop: the others may be
                # saving.
                grace = self._grace_seconds if rank.exit_code in _TERMINATED_CODES else 0.0
                self._end_at = min(self._end_at, now + grace)
        if self._end_requested or now >= self._end_at:
            self._end_ranks(now)

    def _end_ranks(self, now: float) -> None:
        for rank in self._ranks:
            if rank.exit_code is None and not rank.terminated:
                rank.terminated = True
                rank.send_signal(signal.SIGTERM)
                self._kill_at = now + self._shutdown_seconds
            elif now >= self._kill_at:
                rank.send_signal(signal.SIGKILL)


def format_failures(failed: Sequence[RankProcess], host: str) -> str:
    """Return the table of failed ranks in torchrun's format:
    :func:`.liveness.diagnosis.parse_failure_table`.
    """
    entries = (
        f"[{number}]:\n"
        f"  time      : {datetime.fromtimestamp(rank.ended).isoformat()}\n"
        f"  host      : {host}\n"
        f"  rank      : {rank.rank} (local_rank: {rank.local_rank})\n"
        f"  exitcode  : {rank.exit_code} (pid: {rank.pid})\n"
        for number, rank in enumerate(failed)
    )
    return f"flagscale: {len(failed)} rank(s) of this host failed\nFailures:\n{''.join(entries)}"


def parse_streams(text: str, local: int) -> tuple[str, ...]:
    """Parse ``--tee`` or ``--redirects`` for a local rank.

    The value is 0 for none, 1 for stdout, 2 for stderr or 3 for both; or comma-separated pairs
    ``local rank:number`` for some ranks.

    Raises:
        ValueError: For any other value.
    """
    pairs = [pair.rpartition(":") for pair in text.split(",")]
    numbers = {int(rank) if colon else None: int(number) for rank, colon, number in pairs}
    if not set(numbers.values()) <= {0, *STREAMS} or (None in numbers and len(pairs) > 1):
        raise ValueError(text)
    return STREAMS.get(numbers.get(local, numbers.get(None, 0)), ())


def _create_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="flagscale.launcher.rank_processes", description=__doc__)
    for kind, names in _OPTIONS.items():
        for name in names.split():
            parser.add_argument(f"--{name}", type=kind, required=True)
    return parser


def _rank_environment(options: argparse.Namespace, local: int) -> dict[str, str]:
    """Return the environment of a rank, with the variables that torchrun sets."""
    rank = options.first_rank + local
    variables = {
        "RANK": rank,
        "LOCAL_RANK": local,
        "WORLD_SIZE": options.world_size,
        "LOCAL_WORLD_SIZE": options.nproc_per_node,
        "GROUP_RANK": options.node_rank,
        "GROUP_WORLD_SIZE": options.nnodes,
        "MASTER_ADDR": options.master_addr,
        "MASTER_PORT": options.master_port,
    }
    inherited = {name: value for name, value in os.environ.items() if name != LINE_PREFIX_VARIABLE}
    return {**inherited, **{name: str(value) for name, value in variables.items()}}


def _create_rank(options: argparse.Namespace, local: int, directory: Path) -> RankProcess:
    number = options.first_rank + local
    label = (
        os.environ.get(LINE_PREFIX_VARIABLE, "${rank}: ").replace("${rank}", str(number)).encode()
    )
    printed_streams = parse_streams(options.tee, local)
    streams = {
        name: RankStream(
            directory / f"{local}/{name}.log", label if name in printed_streams else None
        )
        for name in {*printed_streams, *parse_streams(options.redirects, local)}
    }
    return RankProcess(number, local, streams)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the ranks of one host until all have ended, and return the exit code."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    separator = argv.index("--")
    options, command = _create_parser().parse_args(argv[:separator]), argv[separator + 1 :]
    directory = Path(options.log_dir, f"{options.rdzv_id}_{os.getpid()}", "attempt_0")
    ranks = [_create_rank(options, local, directory) for local in range(options.nproc_per_node)]
    group = RankGroup(
        ranks, float(os.environ.get(SHUTDOWN_TIMEOUT_VARIABLE) or 30), options.stop_grace
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, group.request_end)
    handle_hangup(group.request_end)
    for rank in ranks:
        rank.start(command, _rank_environment(options, rank.local_rank))
    code = group.wait()
    if group.failed:
        host = os.environ.get(LINE_PREFIX_VARIABLE, "").partition(":")[0] or os.uname().nodename
        with suppress(OSError):
            print(format_failures(group.failed, host), file=sys.stderr, flush=True)
    return code
