"""SSH connections. Only this package uses paramiko and opens network connections to hosts.

:class:`.ssh_config.SshConfig` resolves a host's name to an :class:`.ssh_config.SshTarget`.
:class:`.dial.SshConnectionFactory` logs in to the targets of a command. Every failure is a
:class:`~flagscale.hosts.errors.HostError` (exit code 3), whose message contains the host, the
cause, and a remedy.
"""
