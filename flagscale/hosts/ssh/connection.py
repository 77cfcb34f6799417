"""A connection to one host, and what can be done over it: a command, or a script.

Starting a session costs a host several processes, so a connection starts one with a bash for its
scripts and keeps it. Each script runs in a subshell with nothing on its stdin; words that nobody
can guess, on both output streams, say that it has ended.
"""

from __future__ import annotations

import secrets
import shlex
import socket
import time
from collections.abc import Sequence

import paramiko

from flagscale.hosts.executor import OnOutput, Result
from flagscale.hosts.ssh.exchange import (
    MARK,
    AfterMarker,
    Exchange,
    Link,
    close_channel,
    command_line,
)
from flagscale.hosts.ssh.ssh_config import SshTarget

# Whole scripts are read, counted in bytes, before their first command runs: one that was cut off
# on its way does not run. Nothing of them shows in a process table. One line: tcsh, which may be
# the login shell, cannot quote a newline.
_LOOP = (
    f"{MARK} "
    'while read -r turn size && LC_ALL=C read -r -N "$size" script; do '
    '(eval "$script") </dev/null; '
    r"""printf '\002%s %d\003' "$turn" "$?"; printf '\002%s\003' "$turn" >&2; done"""
)

#: What the login shell is given. The login shell has read the user's start-up files already; a
#: bash that sees that SSH started it would read them once more.
LINE = shlex.join(["exec", "bash", "--norc", "-c", _LOOP, "flagscale"])


def script_input(turn: str, script: str) -> bytes:
    """A script as the loop on the host expects it."""
    if "\0" in script:
        raise ValueError("a script cannot contain NUL")
    data = (script or ":").encode("utf-8", "surrogateescape")
    return f"{turn} {len(data)}\n".encode() + data


class Connection(Link):
    """An authenticated connection. Made by a :class:`.dial.Dialer`; a context manager."""

    def __init__(
        self, target: SshTarget, transport: paramiko.Transport, sock: socket.socket, lost: float
    ) -> None:
        super().__init__(target, transport, sock, lost)
        # A shell that is at rest; whoever runs a script takes it away for as long as it runs.
        self._shells: list[Shell] = []

    @property
    def name(self) -> str:
        return self.target.name

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

    def run_script(self, script: str, *, timeout: float | None = 60) -> Result:
        """Run a bash script that travels on stdin: no file, no trace of it in a process table.

        The scripts of a connection run in one bash there, each in a subshell: what one sets, the
        next does not see. A script that is cut off on its way does not run at all. Its own stdin
        is empty. What it leaves behind may go on, its output from then on is lost. Otherwise as
        :meth:`run`; raises :class:`ValueError` for a script that holds a NUL.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        shell = self._idle_shell() or Shell(self, self._execute(LINE, timeout))
        try:
            result = shell.run(script, deadline)
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
        with self.answer_within(
            min(timeout or self.idle_limit, self.idle_limit), "start a command"
        ):
            channel = self.transport.open_session(timeout=self.idle_limit)
            channel.exec_command(line.encode("utf-8", "surrogateescape"))
        return channel


class Shell:
    """A bash at the other end of a channel. One thread at a time."""

    def __init__(self, connection: Link, channel: paramiko.Channel) -> None:
        self._connection = connection
        self._channel = channel
        self._noise = (AfterMarker(), AfterMarker())

    @property
    def lives(self) -> bool:
        return not (self._channel.closed or self._channel.eof_received)

    def close(self) -> None:
        """End it. A script that still runs may go on running."""
        close_channel(self._channel)

    def run(self, script: str, deadline: float | None) -> Result:
        """Run a script until its end; where that is not known, the shell is of no more use."""
        return _Turn(self._connection, self._channel, deadline, self._noise).run_script(script)


class _Turn(Exchange):
    """One script's input, output and end."""

    def __init__(
        self,
        connection: Link,
        channel: paramiko.Channel,
        deadline: float | None,
        noise: tuple[AfterMarker, AfterMarker],
    ) -> None:
        super().__init__(connection, channel, deadline)
        self._out, self._err = noise
        self._turn = secrets.token_hex(8)
        self._out_end = _End(f"\2{self._turn} ")
        self._err_end = _End(f"\2{self._turn}")

    def run_script(self, script: str) -> Result:
        self._feed(script_input(self._turn, script), last=False)
        self._collect()
        out, err = self._out_end, self._err_end
        if out.at < 0 or err.at < 0:
            return self._result()  # the shell itself has ended
        status = int(self._stdout[out.after : self._stdout.index(b"\3", out.after)])
        return Result(status, bytes(self._stdout[: out.at]), bytes(self._stderr[: err.at]))

    def _over(self) -> bool:
        ended = self._out_end.is_in(self._stdout) and self._err_end.is_in(self._stderr)
        return ended or super()._over()


class _End:
    """Looks for what ends a stream, in what has come since it last looked."""

    def __init__(self, text: str) -> None:
        self._text = text.encode()
        self._looked = 0
        self.at = -1

    @property
    def after(self) -> int:
        return self.at + len(self._text)

    def is_in(self, stream: bytearray) -> bool:
        if self.at < 0:
            self.at = stream.find(self._text, self._looked)
            self._looked = max(0, len(stream) - len(self._text))
        return self.at >= 0 and b"\3" in stream[self.after :]
