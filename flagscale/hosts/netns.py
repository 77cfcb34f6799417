"""Network namespaces of this machine as hosts: ``left slots=1 addr=10.0.0.1 via=netns``.

The name is one that ``ip netns add`` gave. Programs see this machine's files, and the namespace's
network alone.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from flagscale.hosts.errors import HostError
from flagscale.hosts.executor import Endpoint
from flagscale.hosts.local import LocalExecutor, LocalOpener

NAMESPACES = Path("/run/netns")


class NetnsOpener(LocalOpener):
    """Reaches namespaces; an :class:`~flagscale.hosts.executor.Opener`."""

    def open(self, endpoint: Endpoint) -> NetnsExecutor:
        """The namespace. Raises :class:`~.errors.HostError` where there is none of that name, or
        this user may not enter it."""
        path = NAMESPACES / endpoint.name
        if not path.exists():
            what = f"no network namespace of that name in {NAMESPACES}"
            raise HostError(endpoint.name, what, hint=f"ip netns add {endpoint.name}, as root")
        host = NetnsExecutor(endpoint.name, path)
        tried = host.run(["true"])
        if not tried.ok:
            said = tried.error_text.strip().removeprefix("nsenter: ") or "nsenter fails"
            hint = "entering one takes root's rights" if os.geteuid() else None
            raise HostError(endpoint.name, f"its network cannot be entered: {said}", hint=hint)
        return host


class NetnsExecutor(LocalExecutor):
    """Runs programs in a namespace; an :class:`~flagscale.hosts.executor.Executor`."""

    def __init__(self, name: str, path: Path) -> None:
        super().__init__(name)
        self._path = path

    def _start(self, argv: Sequence[str], *, tied: bool = False) -> subprocess.Popen[bytes]:
        return super()._start(["nsenter", f"--net={self._path}", "--", *argv], tied=tied)
