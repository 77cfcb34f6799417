"""One command: the line that a host's login shell gets to see, its input, output and end.

The line is built by :mod:`shlex` and nothing else. It starts ``sh``, which starts the command, so
that a command that a signal ends has the status 128+n that every shell reports; scripts have a
line of their own, see :mod:`.connection`. A marker on both output streams says that the login
shell's own start-up files are done: what they printed before it is not the command's output, and
without it the command never ran.

Nothing here waits for ever. A command may have a deadline; and a host that stops answering is
noticed where it has none: by the kernel where packets get lost (TCP_USER_TIMEOUT), and by a
question that any live SSH server answers where packets are received and nobody acts on them.
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
from flagscale.hosts.errors import HostError
from flagscale.hosts.executor import Closing, OnOutput, Result
from flagscale.hosts.ssh.ssh_config import SshTarget

#: Login shells get the line as one argument, which Linux limits to 128 KiB.
LONGEST = 128 * 1024 - 1

MARKER = b"\x02flagscale\x03"

#: Shell commands that print the marker, given as ``$0``, on both streams.
MARK = r"""printf '\002%s\003' "$0"; printf '\002%s\003' "$0" >&2;"""
_WRAPPER = f'{MARK} "$@"; exit $?'

# Seconds that paramiko's thread gets to end after it reported an error.
_LAST_WORDS = 0.5
_CHUNK = 1 << 16
#: sshd takes this much input before the command has read any of it.
SAFE_INPUT = 1 << 20

#: Seconds of quiet after a command's end that output which others hold open is waited for.
_LINGER = 2.0

#: Seconds between looks at whether a command that says nothing has ended.
_GLANCE = 0.25


def command_line(argv: Sequence[str]) -> str:
    """The line for the login shell that runs ``argv``.

    Raises :class:`ValueError` for what no process can be given: an empty command, a NUL, or more
    than Linux takes. Long and secret things belong on stdin.
    """
    if not argv:
        raise ValueError("a command needs at least its name")
    if any("\0" in argument for argument in argv):
        raise ValueError("an argument cannot contain NUL")
    line = shlex.join(["exec", "sh", "-c", _WRAPPER, "flagscale", *argv])
    size = len(line.encode("utf-8", "surrogateescape"))
    if size > LONGEST:
        raise ValueError(f"a command line of {size} bytes is too long; use stdin")
    return line


class AfterMarker:
    """Collects a stream's bytes and gives out only those after the marker."""

    def __init__(self) -> None:
        self.before = bytearray()
        self.seen = False

    def feed(self, data: bytes) -> bytes:
        if self.seen:
            return data
        self.before += data
        noise, found, rest = bytes(self.before).partition(MARKER)
        if not found:
            return b""
        self.seen = True
        self.before = bytearray(noise)
        return rest


class Link(Closing):
    """What carries commands to a host: a connection on which somebody has logged in, and the signs
    of life of its other end."""

    def __init__(
        self, target: SshTarget, transport: paramiko.Transport, sock: socket.socket, lost: float
    ) -> None:
        self.target = target
        self.transport = transport
        #: Seconds of silence after which :meth:`check_alive` is due.
        self.idle_limit = lost
        self._sock = sock
        self._on_close: list[Callable[[], object]] = []

    @property
    def alive(self) -> bool:
        return self.transport.is_active()

    def stands(self) -> bool:
        """Whether the connection is alive after an error on it: an answer, not its end.

        paramiko's thread tells the channels of a broken connection first and ends after that.
        """
        self.transport.join(_LAST_WORDS)
        return self.alive

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

    def check_alive(self) -> None:
        """Ask the SSH server for a sign of life; raises :class:`ConnectionLostError`."""
        with self.answer_within(self.idle_limit, "answer"):
            self.transport.global_request("keepalive@openssh.com", wait=True)
            if not self.alive:
                raise self.lost()

    def lost(self) -> HostError:
        """The error for a connection that broke, which is closed: nothing goes over it again."""
        self.close()
        return errors.ConnectionLostError(
            self.target.name,
            f"the connection to {self.target.route} was lost: the machine, its network or its "
            "sshd went away; what was started there may still run",
        )

    @contextlib.contextmanager
    def answer_within(self, seconds: float, what: str) -> Iterator[None]:
        """End the connection, and with it the block, where the server is silent for too long:
        paramiko waits without a limit for answers to requests."""
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
                what = f"{self.target.route} did not {what} within {seconds:g} s"
                raise errors.ConnectionLostError(self.target.name, what) from error
            if isinstance(error, paramiko.SSHException) and self.stands():
                what = f"{self.target.route} refuses to {what}: {error}"
                raise errors.ChannelRefusedError(self.target.name, what) from error
            raise self.lost() from error
        finally:
            timer.cancel()


def close_channel(channel: paramiko.Channel) -> None:
    """Close a channel, whose connection may be lost: what was said of that stands."""
    with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
        channel.close()


class Exchange:
    """One command's input, output and end."""

    def __init__(
        self,
        connection: Link,
        channel: paramiko.Channel,
        deadline: float | None,
        on_stdout: OnOutput | None = None,
        on_stderr: OnOutput | None = None,
    ) -> None:
        self._connection = connection
        self._channel = channel
        self._deadline = deadline
        self._stdout, self._stderr = bytearray(), bytearray()
        self._to_stdout = on_stdout or self._stdout.extend
        self._to_stderr = on_stderr or self._stderr.extend
        self._out, self._err = AfterMarker(), AfterMarker()

    def run(self, stdin: bytes) -> Result:
        """Give the command its input and wait for its end."""
        self._feed(stdin, last=True)
        self._collect()
        return self._result()

    def _result(self) -> Result:
        status = self._exit_status()
        if not self._out.seen:
            raise self._never_started(status)
        return Result(status, bytes(self._stdout), bytes(self._stderr))

    def _feed(self, stdin: bytes, *, last: bool) -> None:
        if len(stdin) <= SAFE_INPUT:
            self._send(stdin, last)
        else:
            # A command that writes before it has read everything would wait for us for ever.
            threading.Thread(target=self._send, args=(stdin, last), daemon=True).start()

    def _send(self, stdin: bytes, last: bool) -> None:
        # A command may end without reading its input; how it ended is what counts.
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            self._channel.sendall(stdin)
            if last:
                self._channel.shutdown_write()

    def _over(self) -> bool:
        """Whether there is no more to come."""
        return bool(self._channel.closed or self._channel.eof_received)

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
            if self._over():
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
        self._connection.check_alive()  # on a busy machine paramiko's last words take longer
        raise errors.ConnectionLostError(
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
            raise errors.CommandTimeoutError(
                self._connection.target.name,
                "the command did not end in time; it may still run"
                + (f". Its last output: {said}" if said else ""),
            )

    def _never_started(self, status: int) -> HostError:
        said = bytes(self._out.before + self._err.before)[-500:].decode(errors="replace").strip()
        target = self._connection.target
        return errors.LoginShellError(
            target.name,
            f"the login shell of {target.user} ended with status {status} before it ran anything"
            + (f": {said}" if said else ""),
        )
