"""Child processes of this one: started, watched, and ended together."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO

from flagscale.cli_errors import Interrupted
from flagscale.hosts.connection import Closeable
from flagscale.hosts.kernel import signal_on_parent_death

_DEFAULT_GRACE_SECONDS = 3.0
_MAX_UNWIND_SECONDS = 60
"""Exceeds the time to stop a launcher, to time out a lost host and to cancel a Slurm job."""
_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


class ChildProcesses(Closeable):
    """Child processes with one lifetime: leaving the context manager ends those still running.

    The kernel kills a child when the thread that started it ends, however that happens
    (PR_SET_PDEATHSIG).
    """

    def __init__(self, grace_seconds: float = _DEFAULT_GRACE_SECONDS) -> None:
        """``grace_seconds``: time between TERM and KILL when the children are ended."""
        self.processes: list[subprocess.Popen[bytes]] = []
        self._grace_seconds = grace_seconds

    def start(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        *,
        stdin: bytes = b"",
        output: IO[bytes] | None = None,
        dies_with_parent: bool = True,
    ) -> subprocess.Popen[bytes]:
        """Start a child.

        Args:
            argv: command line.
            environment: whole environment of the child.
            stdin: bytes it reads from stdin.
            output: file that receives stdout and stderr; None: those of this process.
            dies_with_parent: have the kernel kill it when this thread ends. Switch off for
                launchers, which end their own processes when they are terminated.
        """
        on_parent_death = None
        if dies_with_parent:
            on_parent_death = signal_on_parent_death(os.getpid(), signal.SIGKILL)
        # A file instead of a pipe: a child may end, or stop, without reading.
        with tempfile.TemporaryFile() as source:
            source.write(stdin)
            source.seek(0)
            process = subprocess.Popen(
                argv,
                env=dict(environment),
                stdin=source,
                stdout=output,
                stderr=output,
                preexec_fn=on_parent_death,  # noqa: PLW1509 - it takes no lock
            )
        self.processes.append(process)
        return process

    def poll(self) -> list[int | None]:
        """Return each child's exit code as :class:`subprocess.Popen` has it; None while it runs."""
        return [process.poll() for process in self.processes]

    def close(self) -> None:
        """End the children that still run, by pid: TERM, the grace period, KILL."""
        for process in self.processes:
            if process.poll() is None:
                process.terminate()
                # A stopped process sees the signal only after it continues.
                process.send_signal(signal.SIGCONT)
        deadline = time.monotonic() + self._grace_seconds
        for process in self.processes:
            try:
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def unwind_on_signal() -> Iterator[None]:
    """Raise :class:`.Interrupted` in this thread on the first TERM, HUP or INT.

    The stack unwinds, so that everything that was started is ended. Further signals are ignored
    from then on, and SIGALRM ends this process if unwinding takes too long. A signal that was
    ignored when the process started, as under nohup, stays ignored.
    """
    previous = {number: signal.getsignal(number) for number in _ENDING_SIGNALS}
    for number, handler in previous.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, _interrupt)
    interrupted = False
    try:
        yield
    except Interrupted:
        interrupted = True
        raise
    finally:
        if not interrupted:
            for number, handler in previous.items():
                signal.signal(number, handler)


def _interrupt(number: int, _frame: object) -> None:
    for ending_signal in _ENDING_SIGNALS:
        # A no-op handler instead of SIG_IGN, which processes started for cleaning up would inherit.
        signal.signal(ending_signal, lambda *_: None)
    signal.alarm(_MAX_UNWIND_SECONDS)
    raise Interrupted(number)
