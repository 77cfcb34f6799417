"""The user's ProxyCommand, as a socket.

The command talks to one end of a socket pair and SSH to the other, so that its end, its silence
and its closing look like a network connection's. (paramiko's own ProxyCommand reads from pipes
and spins when the command has ended.)
"""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import tempfile
from typing import IO

from flagscale.hosts.errors import ProxyCommandError
from flagscale.hosts.ssh.ssh_config import SshTarget

# The command is a shell's; what replaces its tokens must mean nothing to one.
_PLAIN = re.compile(r"[\w.:%+-]*")


class ProxySocket(socket.socket):
    """Our end of the pair, and the command at the other end."""

    target: SshTarget
    process: subprocess.Popen[bytes]
    said: IO[bytes]

    #: Why the command ended, where it did so before we closed the pair.
    ended: ProxyCommandError | None = None

    def close(self) -> None:
        """Close the pair, and end a command that does not end by itself."""
        if not self.said.closed and self.ended is None:
            self.ended = self._why_ended()
        super().close()
        self.said.close()
        for end in (self.process.terminate, self.process.kill):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=0.5)
                return
            end()
        self.process.wait()

    def _why_ended(self) -> ProxyCommandError | None:
        try:
            status = self.process.wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            return None
        self.said.seek(0)
        words = self.said.read().decode(errors="replace").strip()[-500:]
        return ProxyCommandError(
            self.target.name,
            f"its ProxyCommand ended with status {status}" + (f": {words}" if words else ""),
        )


def expand(target: SshTarget, template: str) -> str:
    """The command with its tokens replaced: %h, %p, %r, %n and %%."""
    values = {
        "h": target.address,
        "p": str(target.port),
        "r": target.user,
        "n": target.name,
        "%": "%",
    }

    def value(token: re.Match[str]) -> str:
        word = values.get(token[1])
        if word is None:
            raise ProxyCommandError(target.name, f"ProxyCommand has an unknown token {token[0]!r}")
        if not _PLAIN.fullmatch(word):
            raise ProxyCommandError(target.name, f"{word!r} has no place in a ProxyCommand")
        return word

    return re.sub(r"%(.?)", value, template)


def start(target: SshTarget, template: str) -> ProxySocket:
    """Start the command by which ``target`` is reached."""
    command = expand(target, template)
    ours, theirs = socket.socketpair()
    with theirs:
        sock = ProxySocket(ours.family, ours.type, ours.proto, fileno=ours.detach())
        sock.target = target
        sock.said = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the socket)
        # Of its own session: a Ctrl-C is ours to handle.
        sock.process = subprocess.Popen(
            ["sh", "-c", f"{command}"],
            stdin=theirs.fileno(),
            stdout=theirs.fileno(),
            stderr=sock.said,
            start_new_session=True,
        )
    return sock
