"""This machine as a host: programs are processes of ours, run by the same bash as elsewhere."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any

from flagscale.hosts.errors import CommandTimeoutError, HostError
from flagscale.hosts.executor import Endpoint, OnOutput, Result
from flagscale.hosts.kernel import die_with
from flagscale.status import RUN_VARIABLES

_CHUNK = 1 << 16
# As on a host behind SSH: a whole script is read before its first command runs, nothing of it
# shows in a process table, and its own stdin is empty.
_READ = 'LC_ALL=C read -r -N "$1" script; shift; eval "$script" </dev/null'


class LocalOpener:
    """Reaches this machine; an :class:`~flagscale.hosts.executor.Opener`."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """There is nothing to set."""

    def open(self, endpoint: Endpoint) -> LocalExecutor:
        return LocalExecutor(endpoint.name)

    def close(self) -> None:
        """Nothing is held open."""


class LocalExecutor:
    """Runs programs on this machine; an :class:`~flagscale.hosts.executor.Executor`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def run_script(self, script: str, *, timeout: float | None = 60) -> Result:
        argv, data = _read_by_bash(script)
        return _Exchange(self._start(argv), timeout).run(data)

    def run_tied(self, script: str) -> tuple[Result, subprocess.Popen[bytes]]:
        """Run a script that ends by ``exec``, so that what it becomes is a child of this process:
        TERM comes to it when this process ends. The result is what it said before that."""
        argv, data = _read_by_bash(script)
        process = self._start(argv, tied=True)
        return _Exchange(process, None, stays=True).run(data), process

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout: float | None = 60,
        on_stdout: OnOutput | None = None,
        on_stderr: OnOutput | None = None,
    ) -> Result:
        return _Exchange(self._start(argv), timeout, on_stdout, on_stderr).run(stdin)

    def _start(self, argv: Sequence[str], *, tied: bool = False) -> subprocess.Popen[bytes]:
        # A launcher that is itself part of a run must not pass for its programs.
        environment = {k: v for k, v in os.environ.items() if k not in RUN_VARIABLES}
        try:
            return subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                # A terminal's Ctrl-C is for the launcher, which knows what to do about it.
                start_new_session=True,
                preexec_fn=die_with(os.getpid(), signal.SIGTERM) if tied else None,  # noqa: PLW1509
            )
        except OSError as error:
            what = f"{argv[0]} cannot be started: {error.strerror}"
            raise HostError(self.name, what, hint=f"is {argv[0]} on PATH?") from None


def _read_by_bash(script: str) -> tuple[list[str], bytes]:
    """The command that runs a script, and what it is to read."""
    if "\0" in script:
        raise ValueError("a script cannot contain NUL")
    data = script.encode("utf-8", "surrogateescape")
    return ["bash", "--norc", "-c", _READ, "flagscale", str(len(data))], data


class _Exchange:
    """One process's input, output and end. ``stays``: it may live on once its output has ended."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        timeout: float | None,
        on_stdout: OnOutput | None = None,
        on_stderr: OnOutput | None = None,
        *,
        stays: bool = False,
    ) -> None:
        self._process = process
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._output = (bytearray(), bytearray())
        self._hand_on = (on_stdout or self._output[0].extend, on_stderr or self._output[1].extend)
        self._stays = stays

    def run(self, stdin: bytes) -> Result:
        process = self._process
        try:
            self._exchange(stdin)
            code = (process.poll() or 0) if self._stays else process.wait(self._left())
        except subprocess.TimeoutExpired:
            said = bytes(self._output[1] or self._output[0])[-500:].decode(errors="replace").strip()
            what = "a program did not end in time" + (f". Its last output: {said}" if said else "")
            raise CommandTimeoutError("this machine", what) from None
        finally:
            if not self._stays and process.poll() is None:
                process.kill()
                process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None and not stream.closed:
                    stream.close()
        status = code if code >= 0 else 128 - code
        return Result(status, bytes(self._output[0]), bytes(self._output[1]))

    def _exchange(self, stdin: bytes) -> None:
        """Give the process its input and hand on its output, until both streams have ended."""
        process, unsent = self._process, memoryview(stdin)
        with selectors.DefaultSelector() as selector:
            streams = (process.stdout, process.stderr)
            for stream, hand_on in zip(streams, self._hand_on, strict=True):
                selector.register(_descriptor(stream), selectors.EVENT_READ, hand_on)
            feeding = _descriptor(process.stdin)
            os.set_blocking(feeding, False)
            selector.register(feeding, selectors.EVENT_WRITE)
            while selector.get_map():
                left = self._left()
                ready = selector.select(left)
                if not ready and left is not None:
                    raise subprocess.TimeoutExpired(process.args, left)
                for key, _ in ready:
                    if key.fd == feeding:
                        unsent = _send(feeding, unsent)
                        if not unsent and process.stdin is not None:
                            selector.unregister(feeding)
                            process.stdin.close()
                    elif data := os.read(key.fd, _CHUNK):
                        key.data(data)
                    else:
                        selector.unregister(key.fd)

    def _left(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())


def _descriptor(stream: IO[bytes] | None) -> int:
    return stream.fileno() if stream is not None else -1


def _send(descriptor: int, unsent: memoryview) -> memoryview:
    """What is left to be sent. A process may end without reading its input: how it ended counts."""
    try:
        return unsent[os.write(descriptor, unsent[:_CHUNK]) :]
    except BlockingIOError:
        return unsent
    except OSError:
        return unsent[:0]
