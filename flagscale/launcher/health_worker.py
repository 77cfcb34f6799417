"""Handle of the agent on the worker that measures this host's hardware between two attempts.

The worker is that of ``flagscale health``, a process with torch that starts one process per device.
The agent starts it when the coordinator of the job orders a hardware check, passes on the
coordinator's commands, and sends the worker's events back. This module is part of the agent, and
uses the standard library alone.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from flagscale.health.messages import HealthCommand, HealthEvent, WorkerSettings
from flagscale.health.worker import ENTRY_POINT
from flagscale.hosts.kernel import signal_on_parent_death
from flagscale.hosts.workers.messages import ControlEndpoint, ControllerLine, WorkerLine
from flagscale.hosts.workers.task import WorkerTask
from flagscale.launcher.liveness.messages import MeasureHealth
from flagscale.records import encode, parse
from flagscale.status import RUN_ID_VARIABLE

LIFETIME_SECONDS = 900.0
"""Longest life of a worker, which it keeps to itself."""
_READ_BYTES = 1 << 16


class WorkerReply(NamedTuple):
    """Reply to the order with this number; without an event, ``problem`` is the reason."""

    order: int
    event: HealthEvent | None
    problem: str = ""


class HealthWorker:
    """Starts, commands and ends the worker. Nothing here waits."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        # Killed processes that have not ended yet: a call of a device's driver may hold them.
        self._killed: list[subprocess.Popen[bytes]] = []
        self._endpoint: ControlEndpoint | None = None
        self._partial = b""
        self._awaited_order: int | None = None
        self._problem = ""

    @property
    def pids(self) -> Collection[int]:
        """Pid of the worker while it runs, and of killed ones that have not ended yet."""
        processes = [*self._killed, *([] if self._process is None else [self._process])]
        return [process.pid for process in processes if process.returncode is None]

    def execute(self, order: MeasureHealth) -> None:
        """Execute an order; :meth:`poll` returns the reply.

        The first order of a check has no command. It starts a worker, and ends an earlier one.
        """
        if order.command is None:
            self.end()
        self._awaited_order, self._problem = order.step, ""
        try:
            if order.command is None:
                self._start()
            else:
                self._send(order.command)
        except (OSError, subprocess.SubprocessError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            self._problem = f"the host cannot be measured: {reason}"

    def _start(self) -> None:
        task = WorkerTask.create(ENTRY_POINT, self._settings)
        # An attempt ends all processes with the run's id; the worker must not be among them.
        environment = {k: v for k, v in os.environ.items() if k != RUN_ID_VARIABLE}
        process = self._process = subprocess.Popen(
            task.command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # it reports its errors itself
            start_new_session=True,
            preexec_fn=signal_on_parent_death(os.getpid(), signal.SIGKILL),  # noqa: PLW1509 - one thread
        )
        assert process.stdin is not None and process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        with process.stdin as stdin:
            stdin.write(task.to_stdin())

    def _send(self, command: HealthCommand) -> None:
        endpoint = self._endpoint
        # The worker reads commands from a pipe of its own, because its standard input is only for
        # the task. The descriptor of another process may have been reused for another file.
        path = None if endpoint is None else Path(f"/proc/{endpoint.pid}/fd/{endpoint.descriptor}")
        if endpoint is None or path is None or _read_link(path) != endpoint.pipe:
            raise OSError(errno.ESRCH, "its worker has ended")
        line = f"{encode(ControllerLine('command', encode(command)))}\n".encode()
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        try:
            if os.write(descriptor, line) < len(line):
                raise OSError(errno.EAGAIN, "its worker does not read its commands")
        finally:
            os.close(descriptor)

    def poll(self) -> Iterator[WorkerReply]:
        """Yield the reply to the last order, if there is one by now.

        A host that has not replied in time gets no further order of the check, so an event always
        belongs to the last order.
        """
        for line in self._read_lines():
            if line.endpoint is not None:
                self._endpoint = line.endpoint
            elif line.failure:
                self._problem = line.failure
            else:
                event = parse(HealthEvent, line.event)
                if event is not None and self._awaited_order is not None:
                    order, self._awaited_order = self._awaited_order, None
                    yield WorkerReply(order, event)
        if self._problem and self._awaited_order is not None:
            order, self._awaited_order = self._awaited_order, None
            yield WorkerReply(order, None, self._problem)

    def _read_lines(self) -> Iterator[WorkerLine]:
        if self._process is None or self._process.stdout is None:
            return
        try:
            data = os.read(self._process.stdout.fileno(), _READ_BYTES)
        except BlockingIOError:
            if self._process.returncode is None:
                return
            data = b""  # the worker has ended, and processes that it started hold the pipe open
        if not data:
            self._problem = self._problem or "its worker has ended"
            if self._process.returncode is not None:
                self._close()
        *lines, self._partial = (self._partial + data).split(b"\n")
        for text in lines:
            if (line := parse(WorkerLine, text)) is not None:
                yield line

    def record_exit(self, pid: int) -> None:
        """Record the exit of a child process, if it is a worker. :meth:`poll` reads what it has
        written.
        """
        for process in self._killed:
            if process.pid == pid:
                process.returncode = 0  # of which only None is told apart
        self._killed = [process for process in self._killed if process.returncode is None]
        if self._process is not None and pid == self._process.pid:
            self._process.returncode = 0  # of which only None is told apart
            self._endpoint = None

    def end(self) -> None:
        """Kill the worker. The processes that it has started end when their parent does."""
        if self._process is not None:
            if self._process.poll() is None:
                self._process.kill()
                self._killed.append(self._process)
            self._close()
        self._awaited_order, self._problem = None, ""

    def _close(self) -> None:
        if self._process is not None and self._process.stdout is not None:
            self._process.stdout.close()
        self._process, self._endpoint, self._partial = None, None, b""


def _read_link(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:
        return ""
