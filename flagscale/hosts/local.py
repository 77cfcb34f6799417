"""Connection to this machine: programs are child processes, run with the same bash as elsewhere."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, Any

from flagscale.hosts.connection import (
    SHELL_OPTION_VARIABLES,
    START_FILE_VARIABLE,
    CommandResult,
    Endpoint,
    OutputCallback,
)
from flagscale.hosts.errors import CommandTimeoutError, HostError
from flagscale.hosts.kernel import signal_on_parent_death
from flagscale.status import RUN_VARIABLES

_CHUNK = 1 << 16
_FAILURE_SECONDS = 5.0
# As on a host behind SSH: the whole script is read before its first command runs, it is not
# visible in any process table, and its own stdin is empty.
_READ_SCRIPT = 'LC_ALL=C read -r -N "$1" script; shift; eval "$script" </dev/null'


class LocalConnectionFactory:
    """Factory of connections to this machine; a
    :class:`~flagscale.hosts.connection.ConnectionFactory`.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """``settings`` is ignored: this kind of connection has none."""

    def open(self, endpoint: Endpoint) -> LocalConnection:
        return LocalConnection(endpoint.name)

    def close(self) -> None:
        """Do nothing: no resource is shared."""


class LocalConnection:
    """Runs programs on this machine; a :class:`~flagscale.hosts.connection.HostConnection`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def run_script(self, script: str, *, timeout: float | None = 60) -> CommandResult:
        argv, data = _bash_command(script)
        return _ProcessIO(self._start(argv), timeout).run(data)

    def run_exec_script(
        self, script: str, variables: Mapping[str, str] | None = None
    ) -> tuple[CommandResult, subprocess.Popen[bytes]]:
        """Run a script that ends with ``exec``, and return the process that it becomes.

        ``variables`` are added to the environment of the process from its start.

        That process is a child of this one and gets SIGTERM when this process ends. The result
        holds the script's output before ``exec``. Without any on stdout the script has failed, and
        the result has its exit status.
        """
        argv, data = _bash_command(script)
        process = self._start(argv, dies_with_parent=True, variables=variables)
        return _ProcessIO(process, None, may_outlive_output=True).run(data), process

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout: float | None = 60,
        on_stdout: OutputCallback | None = None,
        on_stderr: OutputCallback | None = None,
    ) -> CommandResult:
        return _ProcessIO(self._start(argv), timeout, on_stdout, on_stderr).run(stdin)

    def _start(
        self,
        argv: Sequence[str],
        *,
        dies_with_parent: bool = False,
        variables: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[bytes]:
        # A launcher that runs inside a run must not pass its identity on to other runs.
        # Options of the user's shell must not apply to the programs.
        dropped_names = (*RUN_VARIABLES, *SHELL_OPTION_VARIABLES)
        environment = {k: v for k, v in os.environ.items() if k not in dropped_names}
        if start_file := os.environ.get("BASH_ENV"):
            # A host's script reads it for the user's commands.
            environment[START_FILE_VARIABLE] = start_file
        environment |= variables or {}
        on_parent_death = None
        if dies_with_parent:
            on_parent_death = signal_on_parent_death(os.getpid(), signal.SIGTERM)
        try:
            return subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                # Ctrl-C in a terminal must reach the launcher alone, which handles it.
                start_new_session=True,
                preexec_fn=on_parent_death,  # noqa: PLW1509 - it takes no lock
            )
        except OSError as error:
            message = f"{argv[0]} cannot be started: {error.strerror}"
            raise HostError(self.name, message, hint=f"is {argv[0]} on PATH?") from None


def _bash_command(script: str) -> tuple[list[str], bytes]:
    """Return the command that runs a script, and the data for its stdin."""
    if "\0" in script:
        raise ValueError("a script cannot contain NUL")
    data = script.encode("utf-8", "surrogateescape")
    return ["bash", "--norc", "-c", _READ_SCRIPT, "flagscale", str(len(data))], data


class _ProcessIO:
    """Input, output and exit of one process. It may outlive its output."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        timeout: float | None,
        on_stdout: OutputCallback | None = None,
        on_stderr: OutputCallback | None = None,
        *,
        may_outlive_output: bool = False,
    ) -> None:
        self._process = process
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._collected_output = (bytearray(), bytearray())
        self._output_callbacks = (
            on_stdout or self._collected_output[0].extend,
            on_stderr or self._collected_output[1].extend,
        )
        self._may_outlive_output = may_outlive_output

    def run(self, stdin: bytes) -> CommandResult:
        process = self._process
        try:
            self._transfer(stdin)
            if self._may_outlive_output:
                exit_code = self._wait_for_failure()
            else:
                exit_code = process.wait(self._remaining_seconds())
        except subprocess.TimeoutExpired:
            last_output = (
                bytes(self._collected_output[1] or self._collected_output[0])[-500:]
                .decode(errors="replace")
                .strip()
            )
            message = "a program did not end in time" + (
                f". Its last output: {last_output}" if last_output else ""
            )
            raise CommandTimeoutError("this machine", message) from None
        finally:
            if not self._may_outlive_output and process.poll() is None:
                process.kill()
                process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None and not stream.closed:
                    stream.close()
        status = exit_code if exit_code >= 0 else 128 - exit_code
        return CommandResult(
            status, bytes(self._collected_output[0]), bytes(self._collected_output[1])
        )

    def _wait_for_failure(self) -> int:
        """Return the exit code of a process that ended its output; 0 while it is running."""
        if not self._collected_output[0]:
            # It ends a moment after its output.
            with suppress(subprocess.TimeoutExpired):
                return self._process.wait(_FAILURE_SECONDS)
        return self._process.poll() or 0

    def _transfer(self, stdin: bytes) -> None:
        """Write the process's input and forward its output, until both output streams are
        closed."""
        process, unsent = self._process, memoryview(stdin)
        with selectors.DefaultSelector() as selector:
            streams = (process.stdout, process.stderr)
            for stream, sink in zip(streams, self._output_callbacks, strict=True):
                selector.register(_descriptor(stream), selectors.EVENT_READ, sink)
            stdin_fd = _descriptor(process.stdin)
            os.set_blocking(stdin_fd, False)
            selector.register(stdin_fd, selectors.EVENT_WRITE)
            while selector.get_map():
                remaining_seconds = self._remaining_seconds()
                ready = selector.select(remaining_seconds)
                if not ready and remaining_seconds is not None:
                    raise subprocess.TimeoutExpired(process.args, remaining_seconds)
                for key, _ in ready:
                    if key.fd == stdin_fd:
                        unsent = _write_chunk(stdin_fd, unsent)
                        if not unsent and process.stdin is not None:
                            selector.unregister(stdin_fd)
                            process.stdin.close()
                    elif data := os.read(key.fd, _CHUNK):
                        key.data(data)
                    else:
                        selector.unregister(key.fd)

    def _remaining_seconds(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())


def _descriptor(stream: IO[bytes] | None) -> int:
    return stream.fileno() if stream is not None else -1


def _write_chunk(descriptor: int, unsent: memoryview) -> memoryview:
    """Write a chunk and return the remaining data, empty once the process has closed its stdin.

    A process may end without reading its input. Its exit status counts.
    """
    try:
        return unsent[os.write(descriptor, unsent[:_CHUNK]) :]
    except BlockingIOError:
        return unsent
    except OSError:
        return unsent[:0]
