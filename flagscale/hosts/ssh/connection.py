"""SSH connection to one host, which runs commands and scripts.

Starting a session costs a host several processes, so a connection starts a single session with a
bash for its scripts and reuses it. Each script runs in a subshell with an empty stdin. Its end
is marked on both output streams by random tokens that a script cannot predict.

The first script is sent before the account's startup files have run, which saves a round trip, and
one of them may read it. It is therefore sent again if it does not start: the bash ignores what is
left of the first copy, and a second one.
"""

from __future__ import annotations

import secrets
import shlex
import socket
import time
from collections.abc import Sequence

import paramiko

from flagscale.hosts.connection import SHELL_OPTION_VARIABLES, CommandResult, OutputCallback
from flagscale.hosts.ssh.exchange import (
    BUFFERED_INPUT_BYTES,
    PRINT_MARKER,
    CommandExchange,
    MarkerFilter,
    SshLink,
    close_channel,
    command_line,
)
from flagscale.hosts.ssh.ssh_config import SshTarget

# A whole script, counted in bytes, is read before its first command runs, so that a script that was
# truncated in transit does not run. It is not visible in any process table. The loop is a single
# line without exclamation marks because the login shell may be tcsh, which cannot quote them.
_SCRIPT_LOOP = (
    "last=; while read -r word turn size; do "
    '[[ $word == "$0:script" ]] || continue; '
    'LC_ALL=C read -r -N "$size" script || break; '
    "[[ $turn == $last ]] && continue; "
    f"[[ $last ]] || {{ {PRINT_MARKER} }}; last=$turn; "
    '(eval "$script") </dev/null; '
    r"""printf '\002%s %d\003' "$turn" "$?"; printf '\002%s\003' "$turn" >&2; done"""
)
#: Seconds until a script that has not started is sent again, doubled each time.
RESEND_SECONDS = 4.0

#: Command line for the login shell, which has read the user's startup files already. Without
#: --norc bash would detect that SSH started it and read them again.
LOGIN_SHELL_LINE = shlex.join(
    [
        *("exec", "env", *(f"-u{name}" for name in SHELL_OPTION_VARIABLES)),
        *("bash", "--norc", "-c", _SCRIPT_LOOP, "flagscale"),
    ]
)


def encode_script(token: str, script: str) -> bytes:
    """Encode a script as input of the loop on the host.

    It begins with an empty line, which ends an incomplete copy before it, or satisfies a start-up
    file that reads a line.
    """
    if "\0" in script:
        raise ValueError("a script cannot contain NUL")
    data = (script or ":").encode("utf-8", "surrogateescape")
    return f"\nflagscale:script {token} {len(data)}\n".encode() + data


class SshConnection(SshLink):
    """An authenticated connection, created by a :class:`.dial.Dialer`; a context manager."""

    def __init__(
        self,
        target: SshTarget,
        transport: paramiko.Transport,
        sock: socket.socket,
        idle_limit_seconds: float,
    ) -> None:
        super().__init__(target, transport, sock, idle_limit_seconds)
        # Idle shells. A thread that runs a script removes its shell from the list meanwhile.
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
        on_stdout: OutputCallback | None = None,
        on_stderr: OutputCallback | None = None,
    ) -> CommandResult:
        """Run a command and wait for its end, see
        :meth:`~flagscale.hosts.connection.HostConnection.run`.

        ``argv`` reaches the command unchanged, whatever it contains. Raises a
        :class:`~.errors.HostError` if the command's exit status is unknown: the connection was
        lost, the timeout passed, or the account's login shell did not start the command.
        """
        line = command_line(argv)
        deadline = None if timeout is None else time.monotonic() + timeout
        channel = self._execute(line, timeout)
        try:
            return CommandExchange(self, channel, deadline, on_stdout, on_stderr).run(stdin)
        finally:
            close_channel(channel)

    def run_script(self, script: str, *, timeout: float | None = 60) -> CommandResult:
        """Run a bash script that is sent over stdin, without a file and invisible in any process
        table.

        The scripts of a connection run in one bash, each in a subshell: variables that one sets
        are not visible to the next. A script that is truncated in transit does not run at all.
        Its own stdin is empty. Processes that it leaves behind may continue, but their later
        output is lost. Otherwise as :meth:`run`; raises :class:`ValueError` for a script that
        contains a NUL.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        shell = self._idle_shell() or Shell(self, self._execute(LOGIN_SHELL_LINE, timeout))
        try:
            result = shell.run(script, deadline)
        except BaseException:
            shell.close()
            raise
        self._shells.append(shell)
        return result

    def _idle_shell(self) -> Shell | None:
        """Return an idle shell, or None. List operations are atomic, so threads need no lock
        here."""
        while True:
            try:
                shell = self._shells.pop()
            except IndexError:
                return None
            if shell.is_alive:
                return shell
            shell.close()

    def _execute(self, line: str, timeout: float | None) -> paramiko.Channel:
        """Open a channel and send a command line to the account's login shell."""
        with self.limit_reply_time(
            min(timeout or self.idle_limit_seconds, self.idle_limit_seconds), "start a command"
        ):
            channel = self.transport.open_session(timeout=self.idle_limit_seconds)
            channel.exec_command(line.encode("utf-8", "surrogateescape"))
        return channel


class Shell:
    """A bash at the other end of a channel. Not thread-safe."""

    def __init__(self, connection: SshLink, channel: paramiko.Channel) -> None:
        self._connection = connection
        self._channel = channel
        self._marker_filters = (MarkerFilter(), MarkerFilter())

    @property
    def is_alive(self) -> bool:
        return not (self._channel.closed or self._channel.eof_received)

    def close(self) -> None:
        """Close the channel. A script that is running may continue on the host."""
        close_channel(self._channel)

    def run(self, script: str, deadline: float | None) -> CommandResult:
        """Run a script until its end. After an error the shell must not be used again."""
        return _ScriptExchange(
            self._connection, self._channel, deadline, self._marker_filters
        ).run_script(script)


class _ScriptExchange(CommandExchange):
    """Input, output and end of one script in a shell."""

    def __init__(
        self,
        connection: SshLink,
        channel: paramiko.Channel,
        deadline: float | None,
        marker_filters: tuple[MarkerFilter, MarkerFilter],
    ) -> None:
        super().__init__(connection, channel, deadline)
        self._stdout_filter, self._stderr_filter = marker_filters
        self._token = secrets.token_hex(8)
        self._stdout_end = _EndToken(f"\2{self._token} ")
        self._stderr_end = _EndToken(f"\2{self._token}")
        self._encoded_script = b""
        self._sent_bytes = 0
        self._resend_seconds = RESEND_SECONDS
        self._resend_at = time.monotonic() + RESEND_SECONDS

    def run_script(self, script: str) -> CommandResult:
        self._encoded_script = encode_script(self._token, script)
        self._send_script()
        self._forward_output()
        stdout_end, stderr_end = self._stdout_end, self._stderr_end
        if stdout_end.position < 0 or stderr_end.position < 0:
            return self._result()  # the shell itself has ended
        status = int(
            self._stdout[
                stdout_end.end_position : self._stdout.index(b"\3", stdout_end.end_position)
            ]
        )
        return CommandResult(
            status,
            bytes(self._stdout[: stdout_end.position]),
            bytes(self._stderr[: stderr_end.position]),
        )

    def _send_script(self) -> None:
        self._sent_bytes += len(self._encoded_script)
        self._start_sending(self._encoded_script, close_stdin=False)

    def _check_start(self) -> None:
        """Send the script again if it does not start, unless the copies could block the sender."""
        copy_fits = self._sent_bytes + len(self._encoded_script) <= BUFFERED_INPUT_BYTES
        if (
            time.monotonic() >= self._resend_at
            and copy_fits
            and not self._stdout_filter.marker_seen
        ):
            self._resend_seconds *= 2
            self._resend_at = time.monotonic() + self._resend_seconds
            self._send_script()

    def _is_finished(self) -> bool:
        ended = self._stdout_end.find_in(self._stdout) and self._stderr_end.find_in(self._stderr)
        return ended or super()._is_finished()


class _EndToken:
    """Incremental search for the token that ends a script's output."""

    def __init__(self, text: str) -> None:
        self._text = text.encode()
        self._search_start = 0
        self.position = -1

    @property
    def end_position(self) -> int:
        return self.position + len(self._text)

    def find_in(self, stream: bytearray) -> bool:
        if self.position < 0:
            self.position = stream.find(self._text, self._search_start)
            self._search_start = max(0, len(stream) - len(self._text))
        return self.position >= 0 and b"\3" in stream[self.end_position :]
