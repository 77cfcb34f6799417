"""SSH: the only place that knows paramiko, and that opens a connection.

:class:`SshConfig` turns a host's name into an :class:`SshTarget`; :func:`connect` logs in to one,
:class:`SshOpener` to those of a command. What goes wrong on the way is a
:class:`~flagscale.hosts.errors.HostError`: exit code 3, and a message that says which host, what,
and what to do.
"""

from flagscale.hosts.ssh.connection import Connection
from flagscale.hosts.ssh.dial import Dialer, DialOptions, SshOpener, connect
from flagscale.hosts.ssh.ssh_config import SshConfig, SshTarget

__all__ = [
    "Connection",
    "DialOptions",
    "Dialer",
    "SshConfig",
    "SshOpener",
    "SshTarget",
    "connect",
]
