"""A bash on a host that runs one script after another.

Starting a session costs a host several processes, so a connection starts one and keeps it. Each
script runs in a subshell with nothing on its stdin; words that nobody can guess, on both output
streams, say that it has ended.
"""

from __future__ import annotations

import secrets
import shlex

import paramiko

from flagscale.hosts.executor import Result
from flagscale.hosts.ssh.exchange import MARK, AfterMarker, Exchange, Link, close_channel

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
