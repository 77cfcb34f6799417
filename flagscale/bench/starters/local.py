"""Starter of ranks on this host: child processes, all of which are ended when one fails.

Used by the benchmark commands for ranks on this machine, and by the SSH starter on each host
(:mod:`.host`).
"""

from __future__ import annotations

import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from flagscale.bench.world import RENDEZVOUS_VARIABLE, STARTER_VARIABLE, rank_environment
from flagscale.cli_errors import has_no_reader
from flagscale.hosts.kernel import is_stopped
from flagscale.hosts.workers.children import ChildProcesses, unwind_on_signal
from flagscale.hosts.workers.task import WorkerTask

_POLL_SECONDS = 0.05
_GRACE_SECONDS = 4.0
"""Time for the other ranks, after one has failed, to report the cause and to save results."""
_STOPPED_CHECK_SECONDS = 1.0
_MAX_OWN_CODE = 4


@dataclass(frozen=True)
class RankRange:
    """The ranks of one host in a world on several: the first rank, the size of the world, and the
    rendezvous address of rank 0."""

    first: int
    world: int
    address: str
    port: int


def overall_exit_code(code: int) -> int:
    """Return the exit code of a command for a code that a starter or host reports.

    Codes from 0 to 4 are a measurement's own, and stay. Any other code, as of a rank that a signal
    ended, becomes 1.
    """
    return code if 0 <= code <= _MAX_OWN_CODE else 1


def log_path(directory: Path, rank: int | str) -> Path:
    """Return the file of a rank's output. Starters pass a pattern such as ``%t`` as ``rank``."""
    return directory / f"rank_{rank}.log"


def run_local_task(task: WorkerTask, count: int, **options: Any) -> int:
    """Run a task as ``count`` ranks; ``options`` are passed to :func:`run_local_ranks`."""
    return run_local_ranks(task.command, count, stdin=task.to_stdin(), **options)


def run_local_ranks(
    command: Sequence[str],
    count: int,
    *,
    log_dir: Path | None = None,
    ranks: RankRange | None = None,
    stdin: bytes = b"",
    stopped_limit_seconds: float = math.inf,
) -> int:
    """Run ``command`` as ranks of this host, wait for them, and return the overall exit code.

    The ranks are ended with this process, however it ends, and when one of them has failed.

    Args:
        command: command line of each rank.
        count: number of ranks on this host.
        log_dir: directory for ``rank_<n>.log`` files; rank 0's is printed too. None: the ranks
            write to this process's own output.
        ranks: numbers of these ranks in a world on several hosts. They are also ended when the
            reader of this process's output has gone, because its host is controlled over SSH.
        stdin: bytes that each rank reads.
        stopped_limit_seconds: seconds that a rank may be stopped (SIGSTOP) before all are ended.
    """
    first = ranks.first if ranks is not None else 0
    sys.stdout.flush()
    with tempfile.TemporaryDirectory(prefix="flagscale-bench-") as directory, ExitStack() as stack:
        stack.enter_context(unwind_on_signal())
        if log_dir is not None:
            log_dir.mkdir(parents=True, exist_ok=True)
        watch = _RankMonitor(first, stopped_limit_seconds, ends_without_reader=ranks is not None)
        if log_dir is not None and first == 0:
            log_path(log_dir, 0).touch()
            watch.log = stack.enter_context(log_path(log_dir, 0).open("rb"))
            stack.callback(watch.print_new_output)
        children = stack.enter_context(ChildProcesses())
        for local in range(count):
            output = None
            if log_dir is not None:
                output = stack.enter_context(log_path(log_dir, first + local).open("wb"))
            environment = _rank_variables(local, count, Path(directory), ranks)
            children.start(command, environment, stdin=stdin, output=output)
        return watch.wait(children)


def _rank_variables(
    local: int, count: int, directory: Path, ranks: RankRange | None
) -> dict[str, str]:
    # Several ranks share the cores of this host.
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    if ranks is None:
        variables = rank_environment(local, count, local, count)
        return {**variables, **threads, RENDEZVOUS_VARIABLE: str(directory / "meeting")}
    variables = rank_environment(ranks.first + local, ranks.world, local, count)
    rendezvous = {"MASTER_ADDR": ranks.address, "MASTER_PORT": str(ranks.port)}
    return {**variables, **threads, **rendezvous, STARTER_VARIABLE: "SSH"}


class _RankMonitor:
    """Waits for the ranks, prints rank 0's log, and ends all ranks after a failure."""

    def __init__(
        self, first: int, stopped_limit_seconds: float, *, ends_without_reader: bool
    ) -> None:
        """``first`` is the number of this host's first rank. With ``ends_without_reader`` the ranks
        end when the reader of this process's output has gone.
        """
        self.log: IO[bytes] | None = None
        self._first = first
        self._stopped_limit_seconds = stopped_limit_seconds
        self._ends_without_reader = ends_without_reader
        self._stopped_since: dict[int, float] = {}
        self._last_check = 0.0

    def print_new_output(self) -> None:
        """Copy the new part of rank 0's log to stdout."""
        if self.log is not None and (data := self.log.read()):
            sys.stdout.buffer.write(data)
            sys.stdout.flush()

    def wait(self, children: ChildProcesses) -> int:
        """Wait for the ranks, and return the overall exit code. If one was stopped or the reader
        has gone, the other ranks may still be running.
        """
        deadline: float | None = None
        signal_reported = False
        while True:
            codes = children.poll()
            self.print_new_output()
            for rank, code in enumerate(codes, start=self._first):
                # After the first failure the others end because of it, some by our own signal.
                if code is not None and code < 0 and not signal_reported:
                    name = signal.Signals(-code).name
                    print(f"error: rank {rank} was ended by {name}", file=sys.stderr)
                    signal_reported = True
            if all(code is not None for code in codes):
                return _combine_codes([code or 0 for code in codes])
            if (stopped := self._find_stopped_rank(children)) is not None:
                print(f"error: rank {stopped} is stopped: all are ended", file=sys.stderr)
                return 1
            if self._ends_without_reader and has_no_reader(sys.stdout):
                return 1
            if deadline is None and any(codes):
                deadline = time.monotonic() + _GRACE_SECONDS
            if deadline is not None and time.monotonic() > deadline:
                children.close()
                return _combine_codes([process.returncode for process in children.processes])
            time.sleep(_POLL_SECONDS)

    def _find_stopped_rank(self, children: ChildProcesses) -> int | None:
        """Return the first rank that has been stopped for too long."""
        now = time.monotonic()
        if now - self._last_check <= _STOPPED_CHECK_SECONDS:
            return None
        self._last_check = now
        ranks = enumerate(children.processes, start=self._first)
        stopped = [rank for rank, process in ranks if is_stopped(process.pid)]
        self._stopped_since = {rank: self._stopped_since.get(rank, now) for rank in stopped}
        times = self._stopped_since.items()
        return next(
            (rank for rank, since in times if now - since > self._stopped_limit_seconds), None
        )


def _combine_codes(codes: Sequence[int]) -> int:
    """Return the first code above 0 (rank 0's where it has one), else 1 if a signal ended a
    rank."""
    return overall_exit_code(next((code for code in codes if code > 0), min(codes)))
