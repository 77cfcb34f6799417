"""Execution of one command over SSH: its command line, input, output and exit status.

The command line is built by :mod:`shlex` alone. It starts ``sh``, which starts the command, so
that a command that a signal ends has status 128+n, as every shell reports it. Scripts have
another command line, see :mod:`.connection`. A marker on both output streams shows that the
login shell's own startup files are done: output before the marker is not the command's, and
without the marker the command never ran. Input is sent after the marker, because a startup file
may read it.

No wait is unbounded. A command may have a deadline. Without one, a host that stops answering is
still detected: by the kernel where packets are lost (TCP_USER_TIMEOUT), and by a keepalive
request, which every live SSH server answers, where packets are received but not processed.
"""

from __future__ import annotations

import contextlib
import select
import shlex
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import paramiko

from flagscale.hosts import errors
from flagscale.hosts.connection import Closeable, CommandResult, OutputCallback
from flagscale.hosts.errors import HostError
from flagscale.hosts.ssh.ssh_config import SshTarget

#: Limit of a command line in bytes: the login shell gets it as one argument, at most 128 KiB on
#: Linux.
MAX_LINE_BYTES = 128 * 1024 - 1

MARKER = b"\x02flagscale\x03"

#: Shell commands that print the marker, whose text is ``$0``, on both streams.
PRINT_MARKER = r"""printf '\002%s\003' "$0"; printf '\002%s\003' "$0" >&2;"""
_WRAPPER = f'{PRINT_MARKER} "$@"; exit $?'

# Seconds that paramiko's thread gets to end after it reported an error.
_THREAD_EXIT_SECONDS = 0.5
_CHUNK_BYTES = 1 << 16
#: Input in bytes that sshd accepts before the command has read any of it.
BUFFERED_INPUT_BYTES = 1 << 20

#: Seconds without output, after a command's exit, until its streams are abandoned: other processes
#: may hold them open.
_QUIET_SECONDS = 2.0

#: Seconds between checks of the exit status of a command that prints nothing.
_POLL_SECONDS = 0.25


def command_line(argv: Sequence[str]) -> str:
    """Return the line for the login shell that runs ``argv``.

    Raises :class:`ValueError` for arguments that no process can have: an empty command, a NUL,
    or more than :data:`MAX_LINE_BYTES`. Long or secret data belongs on stdin.
    """
    if not argv:
        raise ValueError("a command needs at least its name")
    if any("\0" in argument for argument in argv):
        raise ValueError("an argument cannot contain NUL")
    line = shlex.join(["exec", "sh", "-c", _WRAPPER, "flagscale", *argv])
    size = len(line.encode("utf-8", "surrogateescape"))
    if size > MAX_LINE_BYTES:
        raise ValueError(f"a command line of {size} bytes is too long; use stdin")
    return line


class MarkerFilter:
    """Filter of a stream that passes only the bytes after the marker."""

    def __init__(self) -> None:
        self.preamble = bytearray()
        self.marker_seen = False

    def feed(self, data: bytes) -> bytes:
        if self.marker_seen:
            return data
        self.preamble += data
        preamble, marker, output = bytes(self.preamble).partition(MARKER)
        if not marker:
            return b""
        self.marker_seen = True
        self.preamble = bytearray(preamble)
        return output


class SshLink(Closeable):
    """Authenticated connection that carries commands to a host, with checks that its peer is
    alive."""

    def __init__(
        self,
        target: SshTarget,
        transport: paramiko.Transport,
        sock: socket.socket,
        idle_limit_seconds: float,
    ) -> None:
        self.target = target
        self.transport = transport
        #: Seconds of silence after which :meth:`check_alive` is due.
        self.idle_limit_seconds = idle_limit_seconds
        self._sock = sock
        self._on_close: list[Callable[[], object]] = []

    @property
    def alive(self) -> bool:
        return self.transport.is_active()

    def survived_error(self) -> bool:
        """Return True if the connection is still alive after an error on it.

        paramiko's thread reports a broken connection to its channels first and ends after that.
        """
        self.transport.join(_THREAD_EXIT_SECONDS)
        return self.alive

    def on_close(self, action: Callable[[], object]) -> None:
        self._on_close.append(action)

    def close(self) -> None:
        """Close the connection. Commands that are running on the host continue there."""
        # This way the transport's thread sees the end of the stream at once, not at its next poll.
        with contextlib.suppress(OSError, EOFError, AttributeError, TypeError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self.transport.close()
        actions, self._on_close = self._on_close, []
        for action in actions:
            action()

    def check_alive(self) -> None:
        """Send a keepalive request and wait for the reply. Raises :class:`ConnectionLostError`."""
        with self.limit_reply_time(self.idle_limit_seconds, "answer"):
            self.transport.global_request("keepalive@openssh.com", wait=True)
            if not self.alive:
                raise self.connection_lost()

    def connection_lost(self) -> HostError:
        """Close the broken connection and return the error for it."""
        self.close()
        return errors.ConnectionLostError(
            self.target.name,
            f"the connection to {self.target.route} was lost: the machine, its network or its "
            "sshd is down; processes started there may still run",
        )

    @contextlib.contextmanager
    def limit_reply_time(self, seconds: float, request: str) -> Iterator[None]:
        """Context manager that closes the connection if its block takes longer than ``seconds``.

        paramiko waits without a limit for replies to requests. ``request`` is the verb phrase of
        the request for messages, such as "start a command". Errors of the block are converted to
        :class:`HostError`.
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
            raise errors.ChannelRefusedError(
                self.target.name, f"{self.target.route} refuses a session: {error.text}"
            ) from error
        except (paramiko.SSHException, EOFError, OSError) as error:
            if expired.is_set():
                message = f"{self.target.route} did not {request} within {seconds:g} s"
                raise errors.ConnectionLostError(self.target.name, message) from error
            if isinstance(error, paramiko.SSHException) and self.survived_error():
                message = f"{self.target.route} refuses to {request}: {error}"
                raise errors.ChannelRefusedError(self.target.name, message) from error
            raise self.connection_lost() from error
        finally:
            timer.cancel()


def close_channel(channel: paramiko.Channel) -> None:
    """Close a channel, ignoring errors: if the connection is lost, that has been reported
    already."""
    with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
        channel.close()


class CommandExchange:
    """Input, output and end of one command."""

    def __init__(
        self,
        connection: SshLink,
        channel: paramiko.Channel,
        deadline: float | None,
        on_stdout: OutputCallback | None = None,
        on_stderr: OutputCallback | None = None,
    ) -> None:
        self._connection = connection
        self._channel = channel
        self._deadline = deadline
        self._stdout, self._stderr = bytearray(), bytearray()
        self._on_stdout = on_stdout or self._stdout.extend
        self._on_stderr = on_stderr or self._stderr.extend
        self._stdout_filter, self._stderr_filter = MarkerFilter(), MarkerFilter()
        self._unsent_input = b""

    def run(self, stdin: bytes) -> CommandResult:
        """Send the command's input and wait for its end."""
        self._unsent_input = stdin
        if not stdin:
            self._start_sending(b"", close_stdin=True)
        self._forward_output()
        return self._result()

    def _result(self) -> CommandResult:
        status = self._exit_status()
        if not self._stdout_filter.marker_seen:
            raise self._login_shell_error(status)
        return CommandResult(status, bytes(self._stdout), bytes(self._stderr))

    def _start_sending(self, stdin: bytes, *, close_stdin: bool) -> None:
        if len(stdin) <= BUFFERED_INPUT_BYTES:
            self._send(stdin, close_stdin)
        else:
            # A command that writes before it has read all its input would deadlock with a blocking
            # send.
            threading.Thread(target=self._send, args=(stdin, close_stdin), daemon=True).start()

    def _send(self, stdin: bytes, close_stdin: bool) -> None:
        # Ignore errors: a command may end without reading its input, and its exit status decides.
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            self._channel.sendall(stdin)
            if close_stdin:
                self._channel.shutdown_write()

    def _is_finished(self) -> bool:
        """Return True if no more output will be received."""
        return bool(self._channel.closed or self._channel.eof_received)

    def _forward_output(self) -> None:
        """Forward output until both streams have ended, or until the command has ended and they are
        quiet.

        A background process that inherits the output would keep the streams open for as long as
        it lives.
        """
        poller = select.poll()
        poller.register(self._channel.fileno(), select.POLLIN)
        last_activity = time.monotonic()
        is_exit_seen = False
        while True:
            self._drain()
            if self._is_finished():
                self._drain()
                return
            if poller.poll(1000 * self._wait_seconds(_POLL_SECONDS)):
                last_activity = time.monotonic()
            elif self._channel.exit_status_ready():
                # The last output of a busy host may arrive after the status, and after a long
                # silence, or between the poll and this check.
                if not is_exit_seen:
                    is_exit_seen, last_activity = True, time.monotonic()
                if time.monotonic() - last_activity >= _QUIET_SECONDS:
                    return
            else:
                self._check_deadline()
                self._check_start()
                if time.monotonic() - last_activity >= self._connection.idle_limit_seconds:
                    self._connection.check_alive()
                    last_activity = time.monotonic()

    def _drain(self) -> None:
        channel = self._channel
        while channel.recv_ready():
            self._on_stdout(self._stdout_filter.feed(channel.recv(_CHUNK_BYTES)))
        while channel.recv_stderr_ready():
            self._on_stderr(self._stderr_filter.feed(channel.recv_stderr(_CHUNK_BYTES)))
        if self._unsent_input and self._stdout_filter.marker_seen:
            stdin, self._unsent_input = self._unsent_input, b""
            self._start_sending(stdin, close_stdin=True)

    def _check_start(self) -> None:
        """Hook of subclasses, called several times a second while there is no output."""

    def _exit_status(self) -> int:
        while not self._channel.status_event.wait(
            self._wait_seconds(self._connection.idle_limit_seconds)
        ):
            self._check_deadline()
            self._connection.check_alive()
        status = self._channel.recv_exit_status()
        if status >= 0:
            return status
        if not self._connection.survived_error():
            raise self._connection.connection_lost()
        self._connection.check_alive()  # on a busy machine paramiko's thread takes longer to end
        raise errors.ConnectionLostError(
            self._connection.target.name,
            "the session was killed on the host before the command's exit status was known",
        )

    def _wait_seconds(self, max_seconds: float) -> float:
        """Return the seconds to wait until the clock is read again, at most ``max_seconds``."""
        if self._deadline is None:
            return max_seconds
        return max(0.0, min(max_seconds, self._deadline - time.monotonic()))

    def _check_deadline(self) -> None:
        if self._deadline is not None and time.monotonic() >= self._deadline:
            if not self._stdout_filter.marker_seen:
                raise self._startup_error()
            last_output = (
                bytes(self._stderr or self._stdout)[-500:].decode(errors="replace").strip()
            )
            raise errors.CommandTimeoutError(
                self._connection.target.name,
                "the command did not end in time; it may still run"
                + (f". Its last output: {last_output}" if last_output else ""),
            )

    def _login_shell_error(self, status: int) -> HostError:
        target = self._connection.target
        output = self._login_output()
        return errors.LoginShellError(
            target.name,
            f"the login shell of {target.user} ended with status {status} before it ran anything"
            + (f": {output}" if output else ""),
        )

    def _startup_error(self) -> HostError:
        target = self._connection.target
        output = self._login_output()
        return errors.StartupFileError(
            target.name,
            f"the login shell of {target.user} did not start anything in time: a startup file of "
            "the account, such as ~/.bashrc, takes too long, or reads standard input to its end"
            + (f". Its last output: {output}" if output else ""),
            hint="let the file end at once if nobody is at the keyboard: put `[[ $- == *i* ]] || "
            "return` at the top of ~/.bashrc there",
        )

    def _login_output(self) -> str:
        """Return the end of what the login shell's startup files have printed."""
        output = bytes(self._stdout_filter.preamble + self._stderr_filter.preamble)
        return output[-500:].decode(errors="replace").strip()
