"""Workers of other hosts, seen from the process that controls them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from flagscale.errors import FlagscaleError
from flagscale.hosts.connection import CommandResult, HostConnection, OutputCallback
from flagscale.hosts.errors import HostError
from flagscale.hosts.program import shell_assignment
from flagscale.hosts.workers.messages import ControlEndpoint, ControllerLine, WorkerLine
from flagscale.hosts.workers.task import TASK_MODULE, WorkerTask, python_path
from flagscale.module_command import python_arguments
from flagscale.records import decode, encode, parse

_SEND_TIMEOUT_SECONDS = 20.0
_MAX_STDERR_CHARACTERS = 2000
# The pipe must be the one that this very worker holds: the pid may belong to another process by
# now. Otherwise nothing is written.
_WRITE_LINE = """\
commands=/proc/$pid/fd/$descriptor
[ "$(readlink "$commands")" = "$pipe" ] || exit 3
printf '%s\\n' "$line" >"$commands"
"""
# The text to evaluate activates an environment, whose output is not the worker's.
_RUN_AFTER_SETUP = 'eval "$1" >/dev/null || exit; shift; cd /; exec "$@"'
EventT = TypeVar("EventT")
WorkerT = TypeVar("WorkerT", bound="RemoteWorker[Any]")


@dataclass(frozen=True)
class HostPython:
    """Python of a host that differs from this process's: its path or name, the shell commands that
    activate its environment, and the directory of this project there."""

    executable: str
    setup: str
    project: Path

    def command(self, task: WorkerTask) -> list[str]:
        """Return the command line of a worker."""
        module = python_arguments(TASK_MODULE, self.project)
        python = [self.executable, *module, task.function]
        return ["bash", "-c", _RUN_AFTER_SETUP, "bash", self.setup, *python]


def run_on_host(
    host: HostConnection,
    task: WorkerTask,
    *,
    timeout: float | None,
    python: HostPython | None = None,
    on_stdout: OutputCallback | None = None,
    on_stderr: OutputCallback | None = None,
) -> CommandResult:
    """Run a task on a host and wait for its end. Closing the connection closes the task's
    stdout. ``python`` is the host's Python; None: this process's is at the same path there.

    Raises:
        HostError: the host cannot be reached, or was lost.
    """
    command = ["env", f"PYTHONPATH={python_path()}", *task.command]
    return host.run(
        command if python is None else python.command(task),
        stdin=task.to_stdin(),
        timeout=timeout,
        on_stdout=on_stdout,
        on_stderr=on_stderr,
    )


def explain_task_failure(
    program: str, stderr: str, exit_status: int, executable: str = sys.executable
) -> str:
    """Return the message for a host whose Python did not run a task.

    The last line of stderr has the reason, for example that the project is not there.
    """
    lines = stderr.strip().splitlines() or [f"exit code {exit_status}"]
    return f"{executable} there cannot run the {program}: {lines[-1]}"


class WorkerListener(Protocol[EventT]):
    """Receiver of what workers send. Each worker calls it from a thread of its own."""

    def on_event(self, worker: RemoteWorker[EventT], event: EventT) -> object:
        """Receive an event."""

    def on_failure(self, worker: RemoteWorker[EventT], reason: str) -> object:
        """Receive the reason why a worker failed, or could not be started."""

    def on_exit(self, worker: RemoteWorker[EventT]) -> object:
        """Called last: the worker has ended, or its connection was lost."""


@dataclass
class RemoteWorker(Generic[EventT]):
    """A worker with a control channel on a host. Its function opens a :class:`.ControlChannel`."""

    name: str
    """Name of the host, for messages."""
    program: str
    """Name of the worker's program, for messages."""
    host: HostConnection
    task: WorkerTask
    event: type[EventT]
    """Dataclass of the events."""
    listener: WorkerListener[EventT]
    python: HostPython | None = None
    """Python that runs the worker there; None: this process's."""
    endpoint: ControlEndpoint | None = None
    """Set once the worker reads commands."""
    ended: threading.Event = field(default_factory=threading.Event)
    _stderr: str = ""
    _partial: bytes = b""
    _send_lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self) -> None:
        """Start the worker, and a thread that reads its events."""
        threading.Thread(target=self._run, name=f"worker {self.name}", daemon=True).start()

    def send(self, command: Any) -> bool:
        """Send a command, a dataclass. Returns whether the worker was there to read it.

        Raises:
            HostError: the host cannot be reached.
        """
        return self._send_line(ControllerLine("command", encode(command)))

    def renew_lease(self) -> bool:
        """Renew the worker's lease; otherwise as :meth:`send`."""
        return self._send_line(ControllerLine("renew"))

    def request_exit(self) -> bool:
        """Have the worker end; otherwise as :meth:`send`."""
        return self._send_line(ControllerLine("end"))

    def _send_line(self, line: ControllerLine) -> bool:
        if self.endpoint is None or self.ended.is_set():
            return False
        values = {
            "pid": str(self.endpoint.pid),
            "descriptor": str(self.endpoint.descriptor),
            "pipe": self.endpoint.pipe,
            "line": encode(line),
        }
        script = "\n".join([*(shell_assignment(*pair) for pair in values.items()), _WRITE_LINE])
        with self._send_lock:
            return self.host.run_script(script, timeout=_SEND_TIMEOUT_SECONDS).ok

    def _run(self) -> None:
        try:
            result = run_on_host(
                self.host,
                self.task,
                timeout=None,
                python=self.python,
                on_stdout=self._read,
                on_stderr=self._append_stderr,
            )
            if result.exit_status and self.endpoint is None:
                executable = self.python.executable if self.python else sys.executable
                reason = explain_task_failure(
                    self.program, self._stderr, result.exit_status, executable
                )
                self.listener.on_failure(self, reason)
        except FlagscaleError as error:
            self.listener.on_failure(self, error.message.removeprefix(f"{self.name}: "))
        finally:
            self.ended.set()
            self.listener.on_exit(self)

    def _append_stderr(self, data: bytes) -> None:
        self._stderr = (self._stderr + data.decode(errors="replace"))[-_MAX_STDERR_CHARACTERS:]

    def _read(self, data: bytes) -> None:
        *lines, self._partial = (self._partial + data).split(b"\n")
        for text in lines:
            line = parse(WorkerLine, text)
            if line is None:
                continue  # output of a login shell
            if line.endpoint is not None:
                self.endpoint = line.endpoint
            elif line.failure:
                self.listener.on_failure(self, line.failure)
            else:
                self.listener.on_event(self, decode(self.event, line.event))


def for_each_worker(workers: Sequence[WorkerT], action: Callable[[WorkerT], object]) -> None:
    """Call ``action`` for all workers at the same time. A host that cannot be reached is reported
    as the worker's failure; workers that have ended are skipped by the action."""

    def run(worker: WorkerT) -> None:
        try:
            action(worker)
        except HostError as error:
            worker.listener.on_failure(worker, error.message.removeprefix(f"{worker.name}: "))

    threads = [threading.Thread(target=run, args=(worker,), daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_SEND_TIMEOUT_SECONDS + 5)
