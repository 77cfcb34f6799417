"""Interface to hosts, independent of the way in which they are reached.

A :class:`HostConnection` runs programs on one host and returns their output. A
:class:`ConnectionFactory` creates the connections of one kind for one command of the user, and
holds the resources that they share. Kinds are selected by name: ``local`` is this machine,
``netns`` a network namespace of it, ``ssh`` a remote host. Packages register more under the
entry points ``flagscale.executors``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from flagscale.registry import Registry

CONNECTION_FACTORIES: Registry = Registry(
    "flagscale.executors",
    "way to reach a host",
    {
        "local": "flagscale.hosts.local:LocalConnectionFactory",
        "netns": "flagscale.hosts.netns:NetnsConnectionFactory",
        "ssh": "flagscale.hosts.ssh.dial:SshConnectionFactory",
    },
)
CloseableT = TypeVar("CloseableT", bound="Closeable")
OutputCallback = Callable[[bytes], object]
START_FILE_VARIABLE = "FLAGSCALE_BASH_ENV"
"""Variable that passes the value of BASH_ENV on to the scripts of hosts."""
SHELL_OPTION_VARIABLES = ("SHELLOPTS", "BASHOPTS", "BASH_ENV")
"""Variables by which a user's shell would give its options, such as errexit, to the programs that a
connection runs.
"""


@dataclass(frozen=True)
class Endpoint:
    """Address of a host and the way to reach it.

    ``user``, ``port`` and ``proxy`` (in the syntax of ``ssh -J``) override the user's SSH
    configuration.
    """

    name: str
    via: str = "ssh"
    user: str | None = None
    port: int | None = None
    proxy: str | None = None


@dataclass(frozen=True)
class CommandResult:
    """Exit status and output of a command on a host. The status is 128+n if signal n ended it."""

    exit_status: int
    stdout: bytes
    stderr: bytes

    @property
    def ok(self) -> bool:
        return self.exit_status == 0

    @property
    def text(self) -> str:
        """stdout as text. Bytes that are not UTF-8 become replacement characters."""
        return self.stdout.decode(errors="replace")

    @property
    def error_text(self) -> str:
        """stderr as text. Bytes that are not UTF-8 become replacement characters."""
        return self.stderr.decode(errors="replace")


class HostConnection(Protocol):
    """Connection to one host. Failures between this machine and the host raise
    :class:`~.errors.HostError`.
    """

    @property
    def name(self) -> str:
        """The host's name in the hostfile."""

    def run_script(self, script: str, *, timeout: float | None = 60) -> CommandResult:
        """Run a bash script without showing it in any process table. Its stdin is empty.

        ``timeout`` is in seconds; None means no limit. Raises :class:`ValueError` for a script that
        contains a NUL.
        """

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout: float | None = 60,
        on_stdout: OutputCallback | None = None,
        on_stderr: OutputCallback | None = None,
    ) -> CommandResult:
        """Run a command. ``argv`` is visible in the host's process table.

        Output is passed to the callbacks as it arrives, or collected in the result for a stream
        without a callback.
        """


class ConnectionFactory(Protocol):
    """Factory of connections, constructed from the settings of this kind (a mapping). Thread-safe:
    hosts are opened in parallel."""

    def open(self, endpoint: Endpoint) -> HostConnection:
        """Return the connection to a host, reusing an earlier one while it is alive. Raises
        :class:`~.errors.HostError`.
        """

    def close(self) -> None:
        """Close all connections and wake up threads that wait for a host."""


class Closeable(ABC):
    """Base class of context managers that call :meth:`close` on exit."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources. May be called more than once."""

    def __enter__(self: CloseableT) -> CloseableT:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
