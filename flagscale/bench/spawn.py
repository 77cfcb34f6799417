"""Start ranks on this host, and end all of them when one fails."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from flagscale.bench.world import MEETING_VARIABLE, STARTER_VARIABLE
from flagscale.hosts.kernel import die_with

_POLL_SECONDS = 0.05
_GRACE_SECONDS = 4.0
"""For the others, once a rank has failed, to find out why and to keep what they have."""
_KILL_SECONDS = 3.0
_LAUNCHER_SECONDS = 10.0
_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
_UNWIND_SECONDS = 60
"""More than a launcher, a lost host and Slurm together may take to end what was started."""


@dataclass(frozen=True)
class Share:
    """What one host runs of a world on several: its first rank, and where rank 0 is met."""

    first: int
    world: int
    address: str
    port: int


def spawn(
    command: Sequence[str], count: int, *, log_dir: Path | None = None, share: Share | None = None
) -> int:
    """Run ``command`` as ``count`` ranks and wait; the exit code of the whole.

    Output is this process's own, or ``rank_<n>.log`` of ``log_dir``, of which rank 0's is shown as
    well. A signal that would end this process ends the ranks, and so does its death. With ``share``
    they are a host's ranks of a larger world, and end as well when nobody reads this process's
    output any more: the connection that brought it has gone.
    """
    first = 0 if share is None else share.first
    with tempfile.TemporaryDirectory(prefix="flagscale-bench-") as directory, ExitStack() as stack:
        ranks: list[subprocess.Popen[bytes]] = []
        stack.enter_context(interruptible())
        try:
            if log_dir is not None:
                log_dir.mkdir(parents=True, exist_ok=True)
            for local in range(count):
                output = None
                if log_dir is not None:
                    output = stack.enter_context(log_path(log_dir, first + local).open("wb"))
                environment = _environment(local, count, Path(directory), share)
                ranks.append(
                    subprocess.Popen(
                        command,
                        env=environment,
                        stdout=output,
                        stderr=output,
                        preexec_fn=die_with(os.getpid(), signal.SIGKILL),  # noqa: PLW1509 - no lock
                    )
                )
            shown = log_path(log_dir, 0) if log_dir is not None and first == 0 else None
            with _Follower(shown) as follower:
                return _wait(ranks, first, follower, tied=share is not None)
        finally:
            _end(ranks)


def log_path(directory: Path, rank: int) -> Path:
    """Where a rank's output goes."""
    return directory / f"rank_{rank}.log"


class _Follower:
    """Copies what a growing file gets to standard output."""

    def __init__(self, path: Path | None) -> None:
        self._file = None if path is None else path.open("rb")

    def __enter__(self) -> _Follower:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self.copy()
            self._file.close()

    def copy(self) -> None:
        """Copy what is new."""
        if self._file is not None and (new := self._file.read()):
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
        if process.poll() is None:
            # It hands this on to what it has started.
            process.terminate()
            try:
                process.wait(timeout=_LAUNCHER_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


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
    except _Ended:
        ended = True
        raise
    finally:
        if not ended:
            for number, handler in previous.items():
                signal.signal(number, handler)


def python_path() -> str:
    """PYTHONPATH for a process that shall import what this one can."""
    return os.pathsep.join(path for path in sys.path if path)


# What steers a backend is meant for the ranks; anything else of this machine's stays here.
_HANDED_ON = ("NCCL_", "GLOO_", "FSCCL_", "FLAGCX_", "UCC_", "UCX_", "TORCH_", "OMP_", "MKL_")


def handed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that ranks on other hosts get of this process's."""
    chosen = {k: v for k, v in environment.items() if k.startswith(_HANDED_ON)}
    return {**chosen, "PYTHONPATH": python_path()}


def show_log(directory: Path | None) -> None:
    """Print what rank 0 has written, where a launcher puts all output into files."""
    if directory is not None and log_path(directory, 0).is_file():
        print(log_path(directory, 0).read_text(encoding="utf-8", errors="replace"), end="")


class _Ended(KeyboardInterrupt):
    """A signal that asks this process to end; ``exit_code`` says which."""

    exit_code = 130


def _interrupt(number: int, _frame: object) -> None:
    for other in _ENDING:
        # Not SIG_IGN, which what is started to clean up would inherit.
        signal.signal(other, lambda *_: None)
    signal.alarm(_UNWIND_SECONDS)
    ended = _Ended()
    ended.exit_code = 128 + number
    raise ended


def _environment(local: int, count: int, directory: Path, share: Share | None) -> dict[str, str]:
    if share is None:
        place = {MEETING_VARIABLE: str(directory / "meeting")}
    else:
        place = {STARTER_VARIABLE: "SSH", "MASTER_ADDR": share.address}
        place["MASTER_PORT"] = str(share.port)
    return {
        **os.environ,
        **place,
        "RANK": str(local if share is None else share.first + local),
        "WORLD_SIZE": str(count if share is None else share.world),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(count),
        # Each rank is one of several on this host.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "PYTHONPATH": python_path(),
    }


def _wait(
    ranks: Sequence[subprocess.Popen[bytes]], first: int, follower: _Follower, *, tied: bool
) -> int:
    deadline: float | None = None
    told: set[int] = set()
    while True:
        codes = [process.poll() for process in ranks]
        follower.copy()
        for rank, code in enumerate(codes, start=first):
            # After the first failure the rest end because of it, some by our own hand.
            if code is not None and code < 0 and not told:
                name = signal.Signals(-code).name
                print(f"error: rank {rank} was ended by {name}", file=sys.stderr)
                told.add(rank)
        if all(code is not None for code in codes):
            return _overall([code or 0 for code in codes])
        if tied and unheard():
            _end(ranks)
            return 1
        if deadline is None and any(codes):
            deadline = time.monotonic() + _GRACE_SECONDS
        if deadline is not None and time.monotonic() > deadline:
            _end(ranks)
            return _overall([process.returncode for process in ranks])
        time.sleep(_POLL_SECONDS)


def unheard() -> bool:
    """Whether the other end of standard output is closed."""
    poller = select.poll()
    poller.register(1, 0)
    return bool(poller.poll(0))


def _overall(codes: Sequence[int]) -> int:
    """Rank 0's own code where it has one, else any rank's; 1 for a rank that a signal ended."""
    own = [code for code in codes if code > 0]
    if own:
        return own[0]
    return 1 if any(codes) else 0


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """End our own children, by their ids: first asked, then forced."""
    for process in ranks:
        if process.poll() is None:
            process.terminate()
            # One that is stopped would only see the request when it goes on.
            process.send_signal(signal.SIGCONT)
    deadline = time.monotonic() + _KILL_SECONDS
    for process in ranks:
        try:
            process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
