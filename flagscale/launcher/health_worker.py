"""Worker that measures this host's hardware between two attempts of a job, for the agent.

It is the worker of ``flagscale health``. The agent starts it when the coordinator orders a check,
passes on the coordinator's commands, and sends the worker's events back. Standard library alone.
"""

from __future__ import annotations

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
"""Longest life of a worker."""
_READ_BYTES = 1 << 16


class WorkerReply(NamedTuple):
    """Reply to the order with this number; without an event, ``problem`` is the reason."""

    step: int
    event: HealthEvent | None
    problem: str = ""


class HealthWorker:
    """Starts, commands and ends the worker. Nothing here waits."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        # A killed process that waits for a device in the kernel ends once the device answers.
        self._killed: list[subprocess.Popen[bytes]] = []
        self._endpoint: ControlEndpoint | None = None
        self._partial = b""
        self._awaited_step: int | None = None
        self._problem = ""

    @property
    def pids(self) -> Collection[int]:
        """Pid of the worker while it runs, and of killed ones that have not ended yet."""
        processes = [*self._killed, *([] if self._process is None else [self._process])]
        return [process.pid for process in processes if process.returncode is None]

    def execute(self, order: MeasureHealth) -> None:
        """Execute an order; :meth:`poll` returns the reply."""
        if order.command is None:
            self.end()
        self._awaited_step, self._problem = order.step, ""
        try:
            if order.command is None:
                self._start()
            else:
                self._send(order.command)
        except OSError as error:
            self._problem = f"the check cannot be made there: {error.strerror}"

    def _start(self) -> None:
        task = WorkerTask.create(ENTRY_POINT, self._settings)
        # Without the run's id it is no process of the run, whose attempts end theirs.
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
        if endpoint is None:
            raise ProcessLookupError(0, "its worker has ended")
        path = Path(f"/proc/{endpoint.pid}/fd/{endpoint.descriptor}")
        if str(path.readlink()) != endpoint.pipe:
            raise ProcessLookupError(0, "its worker has ended")
        line = encode(ControllerLine("command", encode(command)))
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(descriptor, f"{line}\n".encode())
        finally:
            os.close(descriptor)

    def poll(self) -> Iterator[WorkerReply]:
        """Yield the reply to the last order, if there is one by now."""
        for line in self._read_lines():
            if line.endpoint is not None:
                self._endpoint = line.endpoint
            elif line.failure:
                self._problem = line.failure
            else:
                event = parse(HealthEvent, line.event)
                if event is not None and self._awaited_step is not None:
                    step, self._awaited_step = self._awaited_step, None
                    yield WorkerReply(step, event)
        if self._problem and self._awaited_step is not None:
            step, self._awaited_step = self._awaited_step, None
            yield WorkerReply(step, None, self._problem)

    def _read_lines(self) -> Iterator[WorkerLine]:
        if self._process is None or self._process.stdout is None:
            return
        try:
            data = os.read(self._process.stdout.fileno(), _READ_BYTES)
        except BlockingIOError:
            if self._process.returncode is None:
                return
            data = b""
        if not data:
            self._problem = self._problem or "the check was ended there"
            if self._process.returncode is not None:
                self._forget()
        *lines, self._partial = (self._partial + data).split(b"\n")
        for text in lines:
            if (line := parse(WorkerLine, text)) is not None:
                yield line

    def record_exit(self, pid: int) -> None:
        """Record the exit of a child process, if it is this one. What it has written is read by
        :meth:`poll`.
        """
        for process in self._killed:
            if process.pid == pid:
                process.returncode = 0  # which nobody reads
        self._killed = [process for process in self._killed if process.returncode is None]
        if self._process is not None and pid == self._process.pid:
            self._process.returncode = 0  # which nobody reads
            self._endpoint = None

    def end(self) -> None:
        """Kill the worker, and with it the processes that measure."""
        if self._process is not None:
            if self._process.poll() is None:
                self._process.kill()
                self._killed.append(self._process)
            self._forget()
        self._awaited_step, self._problem = None, ""

    def _forget(self) -> None:
        if self._process is not None and self._process.stdout is not None:
            self._process.stdout.close()
        self._process, self._endpoint, self._partial = None, None, b""
