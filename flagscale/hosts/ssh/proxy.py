"""The user's ProxyCommand as a socket.

The command uses one end of a socket pair and SSH the other, so that its exit, silence and close
look like those of a network connection. (paramiko's own ProxyCommand reads from pipes and spins
after the command has ended.)
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

# A shell runs the command, so values of tokens must not contain special characters of a shell.
_SAFE_VALUE_PATTERN = re.compile(r"[\w.:%+-]*")


class ProxySocket(socket.socket):
    """This side's end of the pair, with the process at the other end. ``stderr_file`` is the
    process's stderr."""

    target: SshTarget
    process: subprocess.Popen[bytes]
    stderr_file: IO[bytes]

    #: Error that describes the command's exit, if it ended before this side closed the pair.
    exit_error: ProxyCommandError | None = None

    def close(self) -> None:
        """Close the pair, and end a command that does not exit by itself."""
        if not self.stderr_file.closed and self.exit_error is None:
            self.exit_error = self._describe_exit()
        super().close()
        self.stderr_file.close()
        for end_process in (self.process.terminate, self.process.kill):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=0.5)
                return
            end_process()
        self.process.wait()

    def _describe_exit(self) -> ProxyCommandError | None:
        try:
            status = self.process.wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            return None
        self.stderr_file.seek(0)
        stderr_text = self.stderr_file.read().decode(errors="replace").strip()[-500:]
        return ProxyCommandError(
            self.target.name,
            f"its ProxyCommand ended with status {status}"
            + (f": {stderr_text}" if stderr_text else ""),
        )


def expand_tokens(target: SshTarget, template: str) -> str:
    """Return the command with its tokens replaced: %h, %p, %r, %n and %%."""
    values = {
        "h": target.address,
        "p": str(target.port),
        "r": target.user,
        "n": target.name,
        "%": "%",
    }

    def replace_token(token: re.Match[str]) -> str:
        value = values.get(token[1])
        if value is None:
            raise ProxyCommandError(target.name, f"ProxyCommand has an unknown token {token[0]!r}")
        if not _SAFE_VALUE_PATTERN.fullmatch(value):
            raise ProxyCommandError(target.name, f"{value!r} has no place in a ProxyCommand")
        return value

    return re.sub(r"%(.?)", replace_token, template)


def start_proxy(target: SshTarget, template: str) -> ProxySocket:
    """Start the command that connects to ``target``."""
    command = expand_tokens(target, template)
    local_end, command_end = socket.socketpair()
    with command_end:
        sock = ProxySocket(
            local_end.family, local_end.type, local_end.proto, fileno=local_end.detach()
        )
        sock.target = target
        sock.stderr_file = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the socket)
        # In a session of its own, because this process handles Ctrl-C.
        sock.process = subprocess.Popen(
            ["sh", "-c", f"{command}"],
            stdin=command_end.fileno(),
            stdout=command_end.fileno(),
            stderr=sock.stderr_file,
            start_new_session=True,
        )
    return sock
