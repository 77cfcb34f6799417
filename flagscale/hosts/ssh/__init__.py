"""SSH: the only place of the launcher that opens a connection.

:class:`SshConfig` turns a host's name into an :class:`SshTarget`; :func:`connect` logs in to one,
:func:`fan_out` and :class:`Fleet` do one thing on many. What goes wrong on the way is a
:class:`HostError`: exit code 3, and a message that says which host, what, and what to do.
"""

from flagscale.hosts.errors import HostError
from flagscale.hosts.ssh.command import Result
from flagscale.hosts.ssh.connection import Connection
from flagscale.hosts.ssh.dial import Dialer, DialOptions, connect
from flagscale.hosts.ssh.fan_out import LIMIT, Fleet, Outcome, fan_out
from flagscale.hosts.ssh.ssh_config import SshConfig
from flagscale.hosts.ssh.target import SshTarget

__all__ = [
    "LIMIT",
    "Connection",
    "DialOptions",
    "Dialer",
    "Fleet",
    "HostError",
    "Outcome",
    "Result",
    "SshConfig",
    "SshTarget",
    "connect",
    "fan_out",
]
