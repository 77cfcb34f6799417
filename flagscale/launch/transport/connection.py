"""A connection to one host, and what can be done over it.

Nothing here waits for ever. A command may run without a time limit, but a host that stops
answering is noticed: by the kernel where packets get lost (TCP_USER_TIMEOUT), and by a question
that any live SSH server answers where packets are received and nobody acts on them.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import paramiko

from flagscale.launch.transport.closing import Closing
from flagscale.launch.transport.command import (
    AfterMarker,
    Result,
    command_line,
    script_command,
    script_input,
)
from flagscale.launch.transport.errors import (
    ChannelRefusedError,
    CommandTimeoutError,
    ConnectionLostError,
    HostError,
    LoginShellError,
)
from flagscale.launch.transport.target import SshTarget

_CHUNK = 1 << 16
#: sshd takes this much input before the command has read any of it.
_SAFE_INPUT = 1 << 20

#: Seconds of quiet after a command's end that output which others hold open is waited for.
_LINGER = 2.0

#: Seconds between looks at whether a command that says nothing has ended.
_GLANCE = 0.25
# Seconds that paramiko's thread gets to end after it reported an error.
_LAST_WORDS = 0.5

OnOutput = Callable[[bytes], object]


class Connection(Closing):
    """An authenticated connection. Made by :func:`.dial.connect`; a context manager."""

    def __init__(
        self,
        target: SshTarget,
        transport: paramiko.Transport,
        sock: socket.socket,
        lost: float,
        on_close: Callable[[Connection], object],
    ) -> None:
        self.target = target
        self.transport = transport
        self._sock = sock
        self._lost = lost
        self._on_close: list[Callable[[], object]] = [lambda: on_close(self)]

    @property
    def alive(self) -> bool:
        return self.transport.is_active()

    def stands(self) -> bool:
        """Whether the connection is alive after an error on it: an answer, not its end.

        paramiko's thread tells the channels of a broken connection first and ends after that.
        """
        self.transport.join(_LAST_WORDS)
        return self.alive

    @property
    def idle_limit(self) -> float:
        """Seconds of silence after which :meth:`check_alive` is due."""
        return self._lost

    def on_close(self, action: Callable[[], object]) -> None:
        self._on_close.append(action)

    def close(self) -> None:
        """Close the connection. Commands that still run on the host go on running there."""
        # The transport's thread sees the end of the stream at once instead of at its next poll.
        with contextlib.suppress(OSError, EOFError, AttributeError, TypeError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self.transport.close()
        actions, self._on_close = self._on_close, []
        for action in actions:
            action()

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout: float | None = 60,
        on_stdout: OnOutput | None = None,
        on_stderr: OnOutput | None = None,
    ) -> Result:
        """Run a command and wait for its end.

        ``argv`` reaches the command as it is, whatever it contains; it is visible in the host's
        process table, ``stdin`` is not. ``timeout`` is in seconds, None for no limit. Output goes
        to the callbacks as it comes where there are any, and into the result where there are none.

        Raises a :class:`~.errors.HostError` where the command's end is not known: the connection
        was lost, the time was over, the account's login shell did not start it.
        """
        line = command_line(argv)
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._answer_within(min(timeout or self._lost, self._lost), "start a command"):
            channel = self._session()
            channel.exec_command(line.encode("utf-8", "surrogateescape"))
        with contextlib.closing(channel):
            exchange = _Exchange(self, channel, deadline, on_stdout, on_stderr)
            return exchange.run(stdin)

    def run_script(
        self,
        script: str,
        arguments: Sequence[str] = (),
        *,
        timeout: float | None = 60,
        on_stdout: OnOutput | None = None,
        on_stderr: OnOutput | None = None,
    ) -> Result:
        """Run a bash script that travels on stdin: no file, no trace of it in a process table.

        A script that is cut off on its way does not run at all. Its own stdin is empty. Otherwise
        as :meth:`run`.
        """
        return self.run(
            script_command(arguments),
            stdin=script_input(script),
            timeout=timeout,
            on_stdout=on_stdout,
            on_stderr=on_stderr,
        )

    def open_sftp(self) -> paramiko.SFTPClient:
        """An SFTP client whose operations give up on a silent host; see :mod:`.files`."""
        with self._answer_within(self._lost, "start a file transfer"):
            channel = self._session()
            channel.invoke_subsystem("sftp")
            channel.settimeout(self._lost)
            return paramiko.SFTPClient(channel)

    def check_alive(self) -> None:
        """Ask the SSH server for a sign of life; raises :class:`ConnectionLostError`."""
        with self._answer_within(self._lost, "answer"):
            self.transport.global_request("keepalive@openssh.com", wait=True)
            if not self.alive:
                raise self.lost()

    def lost(self) -> HostError:
        """The error for a connection that broke."""
        return ConnectionLostError(
            self.target.name,
            f"the connection to {self.target.route} was lost: the machine, its network or its "
            "sshd went away; what was started there may still run",
        )

    def _session(self) -> paramiko.Channel:
        return self.transport.open_session(timeout=self._lost)

    @contextlib.contextmanager
    def _answer_within(self, seconds: float, what: str) -> Iterator[None]:
        """End the connection, and with it the block, where the server is silent for too long.

        paramiko waits without a limit for answers to requests.
        """
        expired = threading.Event()

        def expire() -> None:
            expired.set()
            self.close()

        timer = threading.Timer(seconds, expire)
        timer.daemon = True
        timer.start()
        try:
            yield
        except paramiko.ChannelException as error:
            raise ChannelRefusedError(
                self.target.name, f"{self.target.route} refuses a session: {error.text}"
            ) from error
        except (paramiko.SSHException, EOFError, OSError) as error:
            if expired.is_set():
                what = f"{self.target.route} did not {what} within {seconds:g} s"
                raise ConnectionLostError(self.target.name, what) from error
            if isinstance(error, paramiko.SSHException) and self.stands():
                what = f"{self.target.route} refuses to {what}: {error}"
                raise ChannelRefusedError(self.target.name, what) from error
            raise self.lost() from error
        finally:
            timer.cancel()


class _Exchange:
    """One command's input, output and end."""

    def __init__(
        self,
        connection: Connection,
        channel: paramiko.Channel,
        deadline: float | None,
        on_stdout: OnOutput | None,
        on_stderr: OnOutput | None,
    ) -> None:
        self._connection = connection
        self._channel = channel
        self._deadline = deadline
        self._stdout, self._stderr = bytearray(), bytearray()
        self._to_stdout = on_stdout or self._stdout.extend
        self._to_stderr = on_stderr or self._stderr.extend
        self._out, self._err = AfterMarker(), AfterMarker()

    def run(self, stdin: bytes) -> Result:
        if len(stdin) <= _SAFE_INPUT:
            self._send(stdin)
        else:
            # A command that writes before it has read everything would wait for us for ever.
            threading.Thread(target=self._send, args=(stdin,), daemon=True).start()
        self._collect()
        status = self._exit_status()
        if not self._out.seen:
            raise self._never_started(status)
        return Result(status, bytes(self._stdout), bytes(self._stderr))

    def _send(self, stdin: bytes) -> None:
        # A command may end without reading its input; how it ended is what counts.
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            self._channel.sendall(stdin)
            self._channel.shutdown_write()

    def _collect(self) -> None:
        """Hand on output until both streams have ended, or the command has and they are quiet.

        A command that leaves a process behind which holds on to its output would keep the streams
        open for as long as that process lives.
        """
        poller = select.poll()
        poller.register(self._channel.fileno(), select.POLLIN)
        heard = time.monotonic()
        while True:
            self._drain()
            if self._channel.closed or self._channel.eof_received:
                self._drain()
                return
            if poller.poll(1000 * self._patience(_GLANCE)):
                heard = time.monotonic()
            elif self._channel.exit_status_ready():
                # The last output of a busy host may come after the status.
                if time.monotonic() - heard >= _LINGER:
                    return
            else:
                self._check_time()
                if time.monotonic() - heard >= self._connection.idle_limit:
                    self._connection.check_alive()
                    heard = time.monotonic()

    def _drain(self) -> None:
        channel = self._channel
        while channel.recv_ready():
            self._to_stdout(self._out.feed(channel.recv(_CHUNK)))
        while channel.recv_stderr_ready():
            self._to_stderr(self._err.feed(channel.recv_stderr(_CHUNK)))

    def _exit_status(self) -> int:
        while not self._channel.status_event.wait(self._patience(self._connection.idle_limit)):
            self._check_time()
            self._connection.check_alive()
        status = self._channel.recv_exit_status()
        if status >= 0:
            return status
        if not self._connection.stands():
            raise self._connection.lost()
        raise ConnectionLostError(
            self._connection.target.name,
            "the session was killed on the host before the command's exit status was known",
        )

    def _patience(self, most: float) -> float:
        """How long, in seconds, to wait before looking at the clock again."""
        if self._deadline is None:
            return most
        return max(0.0, min(most, self._deadline - time.monotonic()))

    def _check_time(self) -> None:
        if self._deadline is not None and time.monotonic() >= self._deadline:
            said = bytes(self._stderr or self._stdout)[-500:].decode(errors="replace").strip()
            raise CommandTimeoutError(
                self._connection.target.name,
                "the command did not end in time; it may still run"
                + (f". Its last output: {said}" if said else ""),
            )

    def _never_started(self, status: int) -> HostError:
        said = bytes(self._out.before + self._err.before)[-500:].decode(errors="replace").strip()
        target = self._connection.target
        return LoginShellError(
            target.name,
            f"the login shell of {target.user} ended with status {status} before it ran anything"
            + (f": {said}" if said else ""),
        )
