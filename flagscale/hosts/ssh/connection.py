"""A connection to one host, and what can be done over it.

Nothing here waits for ever. A command may run without a time limit, but a host that stops
answering is noticed: by the kernel where packets get lost (TCP_USER_TIMEOUT), and by a question
that any live SSH server answers where packets are received and nobody acts on them.
"""

from __future__ import annotations

import contextlib
import shlex
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import paramiko

from flagscale.hosts import errors
from flagscale.hosts.errors import HostError
from flagscale.hosts.executor import Closing, OnOutput, Result
from flagscale.hosts.ssh.exchange import Exchange, close_channel, command_line
from flagscale.hosts.ssh.shell import LINE, Shell
from flagscale.hosts.ssh.target import SshTarget

# Seconds that paramiko's thread gets to end after it reported an error.
_LAST_WORDS = 0.5


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
        # A shell that is at rest; whoever runs a script takes it away for as long as it runs.
        self._shells: list[Shell] = []

    @property
    def name(self) -> str:
        return self.target.name

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
        """Run a command and wait for its end, see :meth:`~flagscale.hosts.executor.Executor.run`.
        ``argv`` reaches it as it is, whatever it contains.

        Raises a :class:`~.errors.HostError` where the command's end is not known: the connection
        was lost, the time was over, the account's login shell did not start it.
        """
        line = command_line(argv)
        deadline = None if timeout is None else time.monotonic() + timeout
        channel = self._execute(line, timeout)
        try:
            return Exchange(self, channel, deadline, on_stdout, on_stderr).run(stdin)
        finally:
            close_channel(channel)

    def run_script(
        self, script: str, arguments: Sequence[str] = (), *, timeout: float | None = 60
    ) -> Result:
        """Run a bash script that travels on stdin: no file, no trace of it in a process table.

        The scripts of a connection run in one bash there, each in a subshell: what one sets, the
        next does not see. A script that is cut off on its way does not run at all. Its own stdin
        is empty. What it leaves behind may go on, its output from then on is lost. Otherwise as
        :meth:`run`; raises :class:`ValueError` for a script that holds a NUL.
        """
        given = f"set -- {shlex.join(arguments)}; " if arguments else ""
        deadline = None if timeout is None else time.monotonic() + timeout
        shell = self._idle_shell() or Shell(self, self._execute(LINE, timeout))
        try:
            result = shell.run(given + script, deadline)
        except BaseException:
            shell.close()
            raise
        self._shells.append(shell)
        return result

    def _idle_shell(self) -> Shell | None:
        """A shell that waits for a script. List operations are atomic: threads may meet here."""
        while True:
            try:
                shell = self._shells.pop()
            except IndexError:
                return None
            if shell.lives:
                return shell
            shell.close()

    def _execute(self, line: str, timeout: float | None) -> paramiko.Channel:
        """A channel on which the account's login shell was given a line."""
        with self._answer_within(min(timeout or self._lost, self._lost), "start a command"):
            channel = self.transport.open_session(timeout=self._lost)
            channel.exec_command(line.encode("utf-8", "surrogateescape"))
        return channel

    def check_alive(self) -> None:
        """Ask the SSH server for a sign of life; raises :class:`ConnectionLostError`."""
        with self._answer_within(self._lost, "answer"):
            self.transport.global_request("keepalive@openssh.com", wait=True)
            if not self.alive:
                raise self.lost()

    def lost(self) -> HostError:
        """The error for a connection that broke."""
        return errors.ConnectionLostError(
            self.target.name,
            f"the connection to {self.target.route} was lost: the machine, its network or its "
            "sshd went away; what was started there may still run",
        )

    @contextlib.contextmanager
    def _answer_within(self, seconds: float, what: str) -> Iterator[None]:
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
