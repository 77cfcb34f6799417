"""A third-party package with a connection type, which tests install under the name ``box``.

Its hosts are this machine. Every program runs under an ``env`` that sets the host's name, and is
recorded as a line of a journal next to this file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flagscale.hosts.connection import CommandResult, Endpoint, OutputCallback
from flagscale.hosts.local import LocalConnection

JOURNAL = Path(__file__).with_name("journal")


class BoxConnectionFactory:
    def __init__(self, settings: Mapping[str, Any]) -> None:
        pass

    def open(self, endpoint: Endpoint) -> BoxConnection:
        return BoxConnection(endpoint.name)

    def close(self) -> None:
        pass


class BoxConnection:
    def __init__(self, name: str) -> None:
        self.name = name

    def run_script(self, script: str, *, timeout: float | None = 60) -> CommandResult:
        argv = ["bash", "-c", 'eval "$(cat)"', "box"]
        return self.run(argv, stdin=script.encode(), timeout=timeout)

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout: float | None = 60,
        on_stdout: OutputCallback | None = None,
        on_stderr: OutputCallback | None = None,
    ) -> CommandResult:
        with JOURNAL.open("a", encoding="utf-8") as journal:
            journal.write(f"{self.name}\n")
        return LocalConnection(self.name).run(
            ["env", f"BOX={self.name}", *argv],
            stdin=stdin,
            timeout=timeout,
            on_stdout=on_stdout,
            on_stderr=on_stderr,
        )
