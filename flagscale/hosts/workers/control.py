"""Worker's side of its control channel: reads commands, sends events.

The worker ends by itself

- when its time is over,
- when its parent ends (the kernel reports that),
- when nobody reads its stdout any more: the connection that started it has closed,
- when its lease runs out without a command or a renewal: the controlling machine may be gone
  without a trace.

Commands arrive in a pipe that the worker holds; the controller opens it as
``/proc/<pid>/fd/<descriptor>``, so there is no FIFO on a disk. No third-party packages.
"""

from __future__ import annotations

import fcntl
import os
import queue
import select
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

from flagscale.errors import FlagscaleError
from flagscale.hosts.kernel import signal_on_parent_death
from flagscale.hosts.workers.messages import ControlEndpoint, ControllerLine, WorkerLine
from flagscale.records import decode, encode

_POLL_MS = 100
_MIN_DESCRIPTOR = 700
CommandT = TypeVar("CommandT")


class ControlChannel(Generic[CommandT]):
    """Channel over which a worker receives commands and sends events. Thread-safe."""

    def __init__(
        self, command: type[CommandT], lifetime_seconds: float, lease_seconds: float
    ) -> None:
        """Create the channel.

        Args:
            command: dataclass of the commands.
            lifetime_seconds: longest life of the worker.
            lease_seconds: longest time without a line from the controller.
        """
        self.commands: queue.SimpleQueue[CommandT] = queue.SimpleQueue()
        self._command_type = command
        self._lease_seconds = lease_seconds
        self._deadline = time.monotonic() + lifetime_seconds
        self._lease_end = time.monotonic() + lease_seconds
        self._send_lock = threading.Lock()
        self._read_end, write_end = os.pipe()
        # A high number: if the pid is reused, that process most likely has no such descriptor.
        # See `remote.RemoteWorker.send`.
        self._write_end = fcntl.fcntl(write_end, fcntl.F_DUPFD_CLOEXEC, _MIN_DESCRIPTOR)
        os.close(write_end)
        os.set_blocking(self._read_end, False)

    def open(self) -> None:
        """Read commands from now on, and send the endpoint at which they are read."""
        signal.signal(signal.SIGTERM, lambda *_: self.exit_process())
        with suppress(OSError):
            signal_on_parent_death(os.getppid(), signal.SIGTERM)()
        threading.Thread(target=self.report_errors(self._watch), name="watch", daemon=True).start()
        pipe = str(Path(f"/proc/self/fd/{self._write_end}").readlink())
        self._write(WorkerLine(endpoint=ControlEndpoint(os.getpid(), self._write_end, pipe)))

    def send_event(self, event: Any) -> None:
        """Send an event, a dataclass, to the controller. Without a reader the worker ends."""
        self._write(WorkerLine(event=encode(event)))

    def report_failure(self, reason: str) -> NoReturn:
        """Send the reason why the worker cannot go on, and end it."""
        self._write(WorkerLine(failure=reason))
        self.exit_process(1)

    def report_errors(self, work: Callable[[], object]) -> Callable[[], None]:
        """Return ``work`` as the target of a thread: an error in it ends the worker with its
        reason."""

        def run() -> None:
            try:
                work()
            except (OSError, ValueError, FlagscaleError) as error:
                self.report_failure(str(error))

        return run

    def exit_process(self, code: int = 0) -> NoReturn:
        """End the worker at once. The kernel closes its sockets, and unsent data is lost."""
        os._exit(code)

    def _write(self, line: WorkerLine) -> None:
        unsent = f"{encode(line)}\n".encode()
        with self._send_lock:
            try:
                while unsent:
                    unsent = unsent[os.write(1, unsent) :]
            except OSError:
                self.exit_process()

    def _watch(self) -> None:
        poller = select.poll()
        poller.register(self._read_end, select.POLLIN)
        poller.register(1, 0)
        partial = b""
        while True:
            ready = dict(poller.poll(_POLL_MS))
            now = time.monotonic()
            if 1 in ready or now > self._deadline or now > self._lease_end:
                self.exit_process()
            if self._read_end not in ready:
                continue
            *lines, partial = (partial + os.read(self._read_end, 1 << 16)).split(b"\n")
            for text in lines:
                self._lease_end = now + self._lease_seconds
                line = decode(ControllerLine, text)
                if line.kind == "end":
                    self.exit_process()
                if line.kind == "command":
                    self.commands.put(decode(self._command_type, line.command))
