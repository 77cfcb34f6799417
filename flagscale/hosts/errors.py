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

    def __init__(self, host: str, what: str, *, hint: str | None = None) -> None:
        super().__init__(f"{host}: {what}", hint=hint)
        self.host = host
        self.what = what


class NameResolutionError(HostError):
    """The host's name means nothing to this machine."""

    summary = "host name does not resolve"


class NoRouteError(HostError):
    """The network says that there is no such machine, or no way to it."""

    summary = "no route to host"


class ConnectionRefusedByHostError(HostError):
    """The machine is there and nothing listens on the port."""

    summary = "connection refused"


class ConnectTimeoutError(HostError):
    """Nothing answered: the machine is off, or a firewall drops the packets."""

    summary = "no answer"


class GreetingTimeoutError(HostError):
    """Something accepts connections on the port and says nothing: sshd is stopped or starved."""

    summary = "sshd does not answer"


class ConnectionDroppedError(HostError):
    """sshd closed the connection during its greeting, as it does under a burst (MaxStartups)."""

    summary = "sshd drops connections"
    retryable = True


class HandshakeError(HostError):
    """What listens there is no SSH server, or none that we have an algorithm in common with."""

    summary = "no SSH handshake"


class ProxyCommandError(HostError):
    """The user's ProxyCommand did not give us a connection."""

    summary = "proxy command failed"


class HostKeyError(HostError):
    """The host's key is not one we can trust."""

    summary = "host key cannot be checked"


class UnknownHostKeyError(HostKeyError):
    """No known_hosts file has a key of this host."""

    summary = "host key is not known"


class ChangedHostKeyError(HostKeyError):
    """known_hosts has another key of this host."""

    summary = "HOST KEY HAS CHANGED"


class RevokedHostKeyError(HostKeyError):
    """The user has declared this very key void, for it is known to others."""

    summary = "HOST KEY IS REVOKED"


class LoginError(HostError):
    """The host accepts none of our keys for this user."""

    summary = "login refused"


class LoginBrokenError(HostError):
    """The connection ended while we logged in, and not because of our keys as far as we know."""

    summary = "connection closed during the login"


class ConnectionLostError(HostError):
    """The connection broke while it was in use."""

    summary = "connection lost"


class CommandTimeoutError(HostError):
    """The host accepted a command and did not finish it in time."""

    summary = "command timed out"


class ChannelRefusedError(HostError):
    """The host logged us in and refuses to run a command, or to forward to another host."""

    summary = "session refused"


class LoginShellError(HostError):
    """The account's login shell ended before it ran the command."""

    summary = "login shell failed"
