"""Where and how to log in: everything about a host that is known before a connection is opened."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SSH_PORT = 22


@dataclass(frozen=True)
class SshTarget:
    """One host as SSH reaches it. Made by :meth:`.ssh_config.SshConfig.target`.

    ``name`` is what the user calls the host and what messages say. ``via`` is the last jump host
    on the way, itself a target with a ``via`` of its own. ``identity_files`` are tried in order;
    ``default_identities`` says that the user named none and these are the usual ones.
    """

    name: str
    address: str
    user: str
    port: int = SSH_PORT
    identity_files: tuple[Path, ...] = ()
    default_identities: bool = False
    identities_only: bool = False
    agent_socket: str | None = None
    known_hosts: tuple[Path, ...] = ()
    host_key_alias: str | None = None
    remember_new_keys: bool = False
    revoked_keys: Path | None = None
    connect_timeout: float | None = None
    via: SshTarget | None = None
    proxy_command: str | None = None

    @property
    def endpoint(self) -> str:
        """The address, and the port where it is not the usual one, for messages."""
        port = "" if self.port == SSH_PORT else f" port {self.port}"
        return f"{self.address}{port}"

    @property
    def route(self) -> str:
        """``endpoint``, and the jump hosts on the way to it."""
        return self.endpoint if self.via is None else f"{self.endpoint} through {self.via.name}"

    @property
    def known_as(self) -> str:
        """The host's name in known_hosts files."""
        name = (self.host_key_alias or self.address).lower()
        if self.host_key_alias or self.port == SSH_PORT:
            return name
        return f"[{name}]:{self.port}"
