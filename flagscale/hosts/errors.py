"""Errors between this machine and a host, one class per cause.

All are :class:`~flagscale.errors.UnreachableError` (exit code 3). ``summary`` is the same text
for every host with the same problem, so that a table can group hosts by it. The message has the
details.
"""

from __future__ import annotations

from typing import ClassVar

from flagscale.errors import UnreachableError


class HostError(UnreachableError):
    """A host could not be reached, or a request to it failed."""

    summary: ClassVar[str] = "unreachable"
    #: True if the host was busy, so that another attempt in a moment may succeed.
    retryable: ClassVar[bool] = False

    def __init_subclass__(cls, *, summary: str = "", retryable: bool = False) -> None:
        super().__init_subclass__()
        cls.summary = summary or cls.summary
        cls.retryable = retryable or cls.retryable

    def __init__(self, host: str, message: str, *, hint: str | None = None) -> None:
        super().__init__(f"{host}: {message}", hint=hint)


class NameResolutionError(HostError, summary="host name does not resolve"):
    """The host's name does not resolve on this machine."""


class NoRouteError(HostError, summary="no route to host"):
    """The network reports no such machine, or no route to it."""


class ConnectionRefusedByHostError(HostError, summary="connection refused"):
    """The machine is reachable, but nothing listens on the port."""


class ConnectTimeoutError(HostError, summary="no answer"):
    """The host did not answer: the machine is off, or a firewall drops the packets."""


class SshTimeoutError(HostError, summary="sshd does not answer"):
    """The port accepts connections, but sshd does not answer: it is stopped or starved of
    resources.
    """


class ConnectionDroppedError(HostError, summary="sshd drops connections", retryable=True):
    """sshd closed the connection during the handshake, as it does under a burst (MaxStartups)."""


class HandshakeError(HostError, summary="no SSH handshake"):
    """The peer is not an SSH server, or has no algorithm in common with this client."""


class ProxyCommandError(HostError, summary="proxy command failed"):
    """The user's ProxyCommand did not provide a connection."""


class HostKeyError(HostError, summary="host key cannot be checked"):
    """The host's key cannot be trusted."""


class UnknownHostKeyError(HostKeyError, summary="host key is not known"):
    """No known_hosts file has a key of this host."""


class ChangedHostKeyError(HostKeyError, summary="HOST KEY HAS CHANGED"):
    """known_hosts has a different key for this host."""


class RevokedHostKeyError(HostKeyError, summary="HOST KEY IS REVOKED"):
    """The user has revoked this key, because others may have it."""


class LoginError(HostError, summary="login refused"):
    """The host accepts none of the keys for this user."""


class LoginBrokenError(HostError, summary="connection closed during the login"):
    """The connection ended during the login, for a reason other than the keys as far as can be
    detected.
    """


class ConnectionLostError(HostError, summary="connection lost"):
    """The connection broke while it was in use."""


class CommandTimeoutError(HostError, summary="command timed out"):
    """The host accepted a command that did not finish in time."""


class StartupFileError(CommandTimeoutError, summary="login shell does not start"):
    """The account's login shell did not start the command in time: a startup file does not end."""


class ChannelRefusedError(HostError, summary="session refused"):
    """The host accepted the login but refuses to run a command or to forward to another host."""


class LoginShellError(HostError, summary="login shell failed"):
    """The account's login shell ended before it ran the command."""
