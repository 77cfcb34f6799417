"""Start processes on this host, and end all of them when one fails."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from flagscale.bench.rank import Job
from flagscale.bench.world import RENDEZVOUS_VARIABLE, STARTER_VARIABLE, VARIABLES
from flagscale.cli_errors import Interrupted, nobody_reads
from flagscale.hosts.kernel import die_with, is_stopped
from flagscale.records import encode

_POLL_SECONDS = 0.05
_GRACE_SECONDS = 4.0
"""For the others, once a rank has failed, to find out why and to keep what they have."""
_KILL_SECONDS = 3.0
_LAUNCHER_SECONDS = 10.0
_LOOK_SECONDS = 1.0
_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
_UNWIND_SECONDS = 60
"""More than a launcher, a lost host and Slurm together may take to end what was started."""
_LARGEST_CODE = 4


def own_code(code: int) -> int:
    """The code of the whole, of one that starters and hosts report: a measurement's own, or 1 for
    a rank that a signal ended and for what a starter has made of that."""
    return code if 0 <= code <= _LARGEST_CODE else 1


@dataclass(frozen=True)
class RankRange:
    """What one host runs of a world on several: its first rank, and where rank 0 is met."""

    first: int
    world: int
    address: str
    port: int


def run_job(job: Job, count: int, **options: Any) -> int:
    """Run a job as ``count`` ranks and wait; see :func:`spawn`, which takes ``options``."""
    return spawn(job.command, count, stdin=encode(job).encode(), **options)


def spawn(
    command: Sequence[str],
    count: int,
    *,
    log_dir: Path | None = None,
    ranks: RankRange | None = None,
    stdin: bytes = b"",
    patience: float = math.inf,
) -> int:
    """Run ``command`` as ``count`` ranks and wait; the exit code of the whole.

    Each gets ``stdin``. Output is this process's own, or ``rank_<n>.log`` of ``log_dir``, of which
    rank 0's is shown as well. A signal that would end this process ends the ranks, and so does its
    death, or that of them one is stopped for ``patience`` seconds. With ``ranks`` they are a host's
    ranks of a larger world, and end as well when nobody reads this process's output any more: the
    connection that brought it has gone.
    """
    first = 0 if ranks is None else ranks.first
    with tempfile.TemporaryDirectory(prefix="flagscale-bench-") as directory, ExitStack() as stack:
        processes: list[subprocess.Popen[bytes]] = []
        stack.enter_context(interruptible())
        given = stack.enter_context(tempfile.TemporaryFile())
        given.write(stdin)
        given.flush()
        try:
            if log_dir is not None:
                log_dir.mkdir(parents=True, exist_ok=True)
            for local in range(count):
                output = None
                if log_dir is not None:
                    output = stack.enter_context(log_path(log_dir, first + local).open("wb"))
                # Opened anew, each is read from its beginning.
                with Path(f"/proc/self/fd/{given.fileno()}").open("rb") as source:
                    process = subprocess.Popen(
                        command,
                        env=_environment(local, count, Path(directory), ranks),
                        stdin=source,
                        stdout=output,
                        stderr=output,
                        preexec_fn=die_with(os.getpid(), signal.SIGKILL),  # noqa: PLW1509 - no lock
                    )
                processes.append(process)
            shown = None
            if log_dir is not None and first == 0:
                shown = stack.enter_context(log_path(log_dir, 0).open("rb"))
                stack.callback(_follow, shown)
            return _wait(processes, first, shown, patience, tied=ranks is not None)
        finally:
            _end(processes)


def log_path(directory: Path, rank: int | str) -> Path:
    """Where a rank's output goes; starters put a pattern in the place of the number."""
    return directory / f"rank_{rank}.log"


def _follow(file: IO[bytes] | None) -> None:
    """Copy to standard output what a growing file has got."""
    if file is not None and (new := file.read()):
        sys.stdout.buffer.write(new)
        sys.stdout.flush()


def call(words: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a launcher with this process's output; it is ended when this process is interrupted.
    Its exit code."""
    sys.stdout.flush()
    process = subprocess.Popen(words, env=dict(environment), stdin=subprocess.DEVNULL)
    try:
        return process.wait()
    finally:
        # It hands this on to what it has started.
        _end([process], _LAUNCHER_SECONDS)


def call_starter(argv: Sequence[str], environment: Mapping[str, str], log_dir: Path | None) -> int:
    """Run a line that starts ranks, and show rank 0's output where the starter put it in a file;
    the starter's code."""
    if log_dir is not None:
        log_dir.mkdir(parents=True, exist_ok=True)
    code = call(argv, environment)
    if log_dir is not None and (log := log_path(log_dir, 0)).is_file():
        print(log.read_text(encoding="utf-8", errors="replace"), end="")
    return code


@contextmanager
def interruptible() -> Iterator[None]:
    """Let TERM, HUP and INT unwind this thread once, so that what was started is ended.

    A second one does not disturb that, and the kernel ends this process where it takes too long.
    Signals that this process was started to ignore, as by nohup, stay ignored.
    """
    previous = {s: signal.getsignal(s) for s in _ENDING}
    for number, handler in previous.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, _interrupt)
    ended = False
    try:
        yield
    except Interrupted:
        ended = True
        raise
    finally:
        if not ended:
            for number, handler in previous.items():
                signal.signal(number, handler)


def cores_here() -> int:
    """Cores of this host that its processes may use."""
    return len(os.sched_getaffinity(0))


def python_path() -> str:
    """PYTHONPATH for a process that shall import what this one can."""
    return os.pathsep.join(path for path in sys.path if path)


# What steers a backend is meant for the ranks; anything else of this machine's stays here.
_HANDED_ON = ("NCCL_", "GLOO_", "FSCCL_", "FLAGCX_", "UCC_", "UCX_", "TORCH_", "OMP_", "MKL_")


def handed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that ranks on other hosts get of this process's."""
    chosen = {k: v for k, v in environment.items() if k.startswith(_HANDED_ON)}
    return {**chosen, "PYTHONPATH": python_path()}


def _interrupt(number: int, _frame: object) -> None:
    for other in _ENDING:
        # Not SIG_IGN, which what is started to clean up would inherit.
        signal.signal(other, lambda *_: None)
    signal.alarm(_UNWIND_SECONDS)
    raise Interrupted(number)


def _environment(
    local: int, count: int, directory: Path, ranks: RankRange | None
) -> dict[str, str]:
    # Each rank is one of several on this host.
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    if ranks is None:
        own = rank_environment(local, count, local, count)
        return {**own, **threads, RENDEZVOUS_VARIABLE: str(directory / "meeting")}
    own = rank_environment(ranks.first + local, ranks.world, local, count)
    meeting = {"MASTER_ADDR": ranks.address, "MASTER_PORT": str(ranks.port)}
    return {**own, **threads, **meeting, STARTER_VARIABLE: "SSH"}


def rank_environment(rank: int, size: int, local_rank: int, local_size: int) -> dict[str, str]:
    """This process's environment for a rank, by torchrun's names."""
    places = (rank, size, local_rank, local_size)
    names = VARIABLES["torchrun"]
    own = {name: str(place) for name, place in zip(names, places, strict=True)}
    return {**os.environ, **own, "PYTHONPATH": python_path()}


def _wait(
    processes: Sequence[subprocess.Popen[bytes]],
    first: int,
    shown: IO[bytes] | None,
    patience: float,
    *,
    tied: bool,
) -> int:
    """The exit code of the whole, once it is known: the caller ends what still runs then."""
    deadline: float | None = None
    told = False
    stopped: dict[int, float] = {}
    looked = 0.0
    while True:
        codes = [process.poll() for process in processes]
        _follow(shown)
        for rank, code in enumerate(codes, start=first):
            # After the first failure the rest end because of it, some by our own hand.
            if code is not None and code < 0 and not told:
                name = signal.Signals(-code).name
                print(f"error: rank {rank} was ended by {name}", file=sys.stderr)
                told = True
        if all(code is not None for code in codes):
            return _overall([code or 0 for code in codes])
        now = time.monotonic()
        if now - looked > _LOOK_SECONDS:
            looked = now
            here = [rank for rank, p in enumerate(processes, start=first) if is_stopped(p.pid)]
            stopped = {rank: stopped.get(rank, now) for rank in here}
            if late := [rank for rank, since in stopped.items() if now - since > patience]:
                print(f"error: rank {late[0]} is stopped: all are ended", file=sys.stderr)
                return 1
        if tied and nobody_reads(sys.stdout):
            return 1
        if deadline is None and any(codes):
            deadline = time.monotonic() + _GRACE_SECONDS
        if deadline is not None and time.monotonic() > deadline:
            _end(processes)
            return _overall([process.returncode for process in processes])
        time.sleep(_POLL_SECONDS)


def _overall(codes: Sequence[int]) -> int:
    """Rank 0's own code where it has one, else any rank's; 1 for a rank that a signal ended."""
    return own_code(next((code for code in codes if code > 0), min(codes)))


def _end(processes: Sequence[subprocess.Popen[bytes]], seconds: float = _KILL_SECONDS) -> None:
    """End our own children, by their ids: first asked, then, after ``seconds``, forced."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
            # One that is stopped would only see the request when it goes on.
            process.send_signal(signal.SIGCONT)
    deadline = time.monotonic() + seconds
    for process in processes:
        try:
            process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
