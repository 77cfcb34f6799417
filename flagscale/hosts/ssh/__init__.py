"""SSH: the only place that knows paramiko, and that opens a connection.

:class:`.ssh_config.SshConfig` turns a host's name into an :class:`.ssh_config.SshTarget`;
:class:`.dial.SshOpener` logs in to those of a command. What goes wrong on the way is a
:class:`~flagscale.hosts.errors.HostError`: exit code 3, and a message that says which host, what,
and what to do.
"""
