"""Hosts behind SSH, each with a connection that stays open from one program to the next."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flagscale.hosts.closing import Closing
from flagscale.hosts.executor import Endpoint
from flagscale.hosts.ssh.connection import Connection
from flagscale.hosts.ssh.dial import Dialer, DialOptions
from flagscale.hosts.ssh.ssh_config import SshConfig
from flagscale.hosts.ssh.target import SshTarget


class SshOpener(Closing):
    """Reaches hosts by SSH; an :class:`~flagscale.hosts.executor.Opener`. A connection that broke
    is opened again."""

    def __init__(self, settings: Mapping[str, Any], options: DialOptions | None = None) -> None:
        """``settings["config"]`` is an SSH configuration in place of the user's."""
        given = settings.get("config")
        self._config = SshConfig.load(Path(given) if given else None)
        self._dialer = Dialer(options)
        self._lock = threading.Lock()
        self._connections: dict[SshTarget, Connection] = {}

    def open(self, endpoint: Endpoint) -> Connection:
        target = self._config.target(
            endpoint.name, user=endpoint.user, port=endpoint.port, proxy=endpoint.proxy
        )
        with self._lock:
            connection = self._connections.get(target)
        if connection is not None and connection.alive:
            return connection
        connection = self._dialer.connect(target)
        with self._lock:
            self._connections[target] = connection
        return connection

    def close(self) -> None:
        self._dialer.close()
