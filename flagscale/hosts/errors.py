"""What can go wrong between this machine and a host, one class a cause.

All are :class:`~flagscale.errors.UnreachableError` (exit code 3). ``summary`` is the same words
for every host with the same trouble, so that a table can fold them; the message has the details.
"""

from __future__ import annotations

from typing import ClassVar

from flagscale.errors import UnreachableError


class HostError(UnreachableError):
    """A host could not be reached, or did not do what it was asked to."""

    summary: ClassVar[str] = "unreachable"
    #: Whether trying again in a moment may help: the host was busy, not wrong.
    retryable: ClassVar[bool] = False

    def __init_subclass__(cls, *, summary: str = "", retryable: bool = False) -> None:
        super().__init_subclass__()
        cls.summary = summary or cls.summary
        cls.retryable = retryable or cls.retryable

    def __init__(self, host: str, what: str, *, hint: str | None = None) -> None:
        super().__init__(f"{host}: {what}", hint=hint)


class NameResolutionError(HostError, summary="host name does not resolve"):
    """The host's name means nothing to this machine."""


class NoRouteError(HostError, summary="no route to host"):
    """The network says that there is no such machine, or no way to it."""


class ConnectionRefusedByHostError(HostError, summary="connection refused"):
    """The machine is there and nothing listens on the port."""


class ConnectTimeoutError(HostError, summary="no answer"):
    """Nothing answered: the machine is off, or a firewall drops the packets."""


class GreetingTimeoutError(HostError, summary="sshd does not answer"):
    """Something accepts connections on the port and says nothing: sshd is stopped or starved."""


class ConnectionDroppedError(HostError, summary="sshd drops connections", retryable=True):
    """sshd closed the connection during its greeting, as it does under a burst (MaxStartups)."""


class HandshakeError(HostError, summary="no SSH handshake"):
    """What listens there is no SSH server, or none that we have an algorithm in common with."""


class ProxyCommandError(HostError, summary="proxy command failed"):
    """The user's ProxyCommand did not give us a connection."""


class HostKeyError(HostError, summary="host key cannot be checked"):
    """The host's key is not one we can trust."""


class UnknownHostKeyError(HostKeyError, summary="host key is not known"):
    """No known_hosts file has a key of this host."""


class ChangedHostKeyError(HostKeyError, summary="HOST KEY HAS CHANGED"):
    """known_hosts has another key of this host."""


class RevokedHostKeyError(HostKeyError, summary="HOST KEY IS REVOKED"):
    """The user has declared this very key void, for it is known to others."""


class LoginError(HostError, summary="login refused"):
    """The host accepts none of our keys for this user."""


class LoginBrokenError(HostError, summary="connection closed during the login"):
    """The connection ended while we logged in, and not because of our keys as far as we know."""


class ConnectionLostError(HostError, summary="connection lost"):
    """The connection broke while it was in use."""


class CommandTimeoutError(HostError, summary="command timed out"):
    """The host accepted a command and did not finish it in time."""


class ChannelRefusedError(HostError, summary="session refused"):
    """The host logged us in and refuses to run a command, or to forward to another host."""


class LoginShellError(HostError, summary="login shell failed"):
    """The account's login shell ended before it ran the command."""
