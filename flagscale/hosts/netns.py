"""Network namespaces of this machine as hosts: ``left slots=1 addr=10.0.0.1 via=netns``.

The name is that of ``ip netns add``. Programs share this machine's files but see only the
namespace's network.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from flagscale.hosts.connection import Endpoint
from flagscale.hosts.errors import HostError
from flagscale.hosts.local import LocalConnection, LocalConnectionFactory

NAMESPACES = Path("/run/netns")


class NetnsConnectionFactory(LocalConnectionFactory):
    """Factory of connections to namespaces; a
    :class:`~flagscale.hosts.connection.ConnectionFactory`.
    """

    def open(self, endpoint: Endpoint) -> NetnsConnection:
        """Return a connection to a namespace. Raises :class:`~.errors.HostError` if no namespace
        has this name or this user may not enter it.
        """
        path = NAMESPACES / endpoint.name
        if not path.exists():
            message = f"no network namespace of that name in {NAMESPACES}"
            raise HostError(endpoint.name, message, hint=f"ip netns add {endpoint.name}, as root")
        host = NetnsConnection(endpoint.name, path)
        result = host.run(["true"])
        if not result.ok:
            error_text = result.error_text.strip().removeprefix("nsenter: ") or "nsenter fails"
            hint = "entering one takes root's rights" if os.geteuid() else None
            raise HostError(
                endpoint.name, f"its network cannot be entered: {error_text}", hint=hint
            )
        return host


class NetnsConnection(LocalConnection):
    """Runs programs in a namespace; a :class:`~flagscale.hosts.connection.HostConnection`."""

    def __init__(self, name: str, path: Path) -> None:
        super().__init__(name)
        self._path = path

    def _start(
        self,
        argv: Sequence[str],
        *,
        dies_with_parent: bool = False,
        variables: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[bytes]:
        command = ["nsenter", f"--net={self._path}", "--", *argv]
        return super()._start(command, dies_with_parent=dies_with_parent, variables=variables)
