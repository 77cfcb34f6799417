"""Reaching a host: the seam between what is to be done on it and how one gets there.

An :class:`Executor` is one host, reached: it runs a program there and brings its answer. An
:class:`Opener` makes executors of one kind for one command of the user's, and holds what they
share. Kinds are found by name: ``local`` is this machine, ``netns`` a network namespace of it,
``ssh`` another; others come from the entry points ``flagscale.executors``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from flagscale.registry import Registry

EXECUTORS: Registry = Registry(
    "flagscale.executors",
    "way to reach a host",
    {
        "local": "flagscale.hosts.local:LocalOpener",
        "netns": "flagscale.hosts.netns:NetnsOpener",
        "ssh": "flagscale.hosts.ssh.dial:SshOpener",
    },
)
C = TypeVar("C", bound="Closing")
OnOutput = Callable[[bytes], object]


@dataclass(frozen=True)
class Endpoint:
    """How a host is reached. ``user``, ``port`` and ``proxy`` (as ``ssh -J`` takes it) are given
    where they differ from the user's SSH configuration."""

    name: str
    via: str = "ssh"
    user: str | None = None
    port: int | None = None
    proxy: str | None = None


@dataclass(frozen=True)
class Result:
    """What a command on a host did. ``exit_status`` is 128+n where signal n ended it."""

    exit_status: int
    stdout: bytes
    stderr: bytes

    @property
    def ok(self) -> bool:
        return self.exit_status == 0

    @property
    def text(self) -> str:
        """stdout as text; bytes that are not UTF-8 become replacement characters."""
        return self.stdout.decode(errors="replace")

    @property
    def error_text(self) -> str:
        """stderr as text."""
        return self.stderr.decode(errors="replace")


class Executor(Protocol):
    """One host. What fails between here and there is a :class:`~.errors.HostError`."""

    @property
    def name(self) -> str:
        """What the user calls the host."""

    def run_script(self, script: str, *, timeout: float | None = 60) -> Result:
        """Run a bash script that shows in no process table; nothing is on its stdin. ``timeout``
        is in seconds, None for no limit. Raises :class:`ValueError` for a script with a NUL."""

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout: float | None = 60,
        on_stdout: OnOutput | None = None,
        on_stderr: OnOutput | None = None,
    ) -> Result:
        """Run a command; ``argv`` shows in the host's process table. Output goes to the callbacks
        as it comes where there are any, and into the result where there are none."""


class Opener(Protocol):
    """Reaches hosts. Thread-safe: hosts are opened side by side. Made of the settings of all hosts
    of a run that are reached so."""

    def open(self, endpoint: Endpoint) -> Executor:
        """The host, reached; the same one as long as the way to it stands. Raises
        :class:`~.errors.HostError`."""

    def close(self) -> None:
        """Give up what is held open, and wake up whoever waits for a host."""


class Closing(ABC):
    """A context manager that is entered as itself and closed at the end, however it is left."""

    @abstractmethod
    def close(self) -> None:
        """Give up what is held. May be called more than once."""

    def __enter__(self: C) -> C:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
