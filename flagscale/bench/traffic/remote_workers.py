"""The processes of a session on their hosts, seen from here: started, told, heard, ended."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from flagscale.bench.traffic.messages import Order, Said, Word
from flagscale.errors import FlagscaleError
from flagscale.hosts.errors import HostError
from flagscale.hosts.executor import Executor
from flagscale.hosts.program import assignment
from flagscale.modules import started
from flagscale.records import encode, from_record

_MODULE = "flagscale.bench.traffic.host"
_TELL_SECONDS = 20.0
# The pipe is the one that this very process holds, or nothing is written: its number may be
# another's by now.
_TELL = """\
ear=/proc/$pid/fd/$descriptor
[ "$(readlink "$ear")" = "$pipe" ] || exit 3
printf '%s\\n' "$word" >"$ear"
"""


@dataclass
class Station:
    """One process on one host. ``heard`` is called in the station's thread with what it says, and
    with None when it has ended."""

    name: str
    host: Executor
    order: Order
    heard: Callable[[Station, Said | None], None]
    ready: Said | None = None
    ended: threading.Event = field(default_factory=threading.Event)
    said: str = ""
    """What it wrote to stderr last."""
    _rest: bytes = b""
    _telling: threading.Lock = field(default_factory=threading.Lock)

    def start(self) -> None:
        """Start it; its output is read by a thread of its own."""
        threading.Thread(target=self._run, name=f"traffic {self.name}", daemon=True).start()

    def tell(self, word: Word) -> bool:
        """Say something to it; whether it was there to hear.

        Raises:
            HostError: its host cannot be reached.
        """
        ready = self.ready
        if ready is None or self.ended.is_set():
            return False
        values = {
            "pid": str(ready.pid),
            "descriptor": str(ready.descriptor),
            "pipe": ready.pipe,
            "word": encode(word),
        }
        lines = [assignment(name, value) for name, value in values.items()]
        with self._telling:
            return self.host.run_script("\n".join([*lines, _TELL]), timeout=_TELL_SECONDS).ok

    def _run(self) -> None:
        try:
            done = self.host.run(
                [sys.executable, *started(_MODULE)],
                stdin=encode(self.order).encode(),
                timeout=None,
                on_stdout=self._read,
                on_stderr=self._complain,
            )
            if done.exit_status and self.ready is None:
                lines = self.said.strip().splitlines() or [f"exit code {done.exit_status}"]
                text = f"{sys.executable} there cannot run the traffic: {lines[-1]}"
                self.heard(self, Said("failed", text))
        except FlagscaleError as error:
            text = error.message.removeprefix(f"{self.name}: ")
            self.heard(self, Said("failed", text))
        finally:
            self.ended.set()
            self.heard(self, None)

    def _complain(self, data: bytes) -> None:
        self.said = (self.said + data.decode(errors="replace"))[-2000:]

    def _read(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            said = _understood(line)
            if said is None:
                continue  # what a login shell printed
            if said.event == "ready":
                self.ready = said
            self.heard(self, said)


def _understood(line: bytes) -> Said | None:
    try:
        return from_record(Said, json.loads(line))
    except (ValueError, RecursionError):
        return None


def tell_all(stations: list[Station], word: Word) -> None:
    """Say the same to all, side by side; those that are gone are passed over."""

    def tell(station: Station) -> None:
        try:
            station.tell(word)
        except HostError as error:
            station.heard(station, Said("failed", error.message.removeprefix(f"{station.name}: ")))

    threads = [threading.Thread(target=tell, args=(one,), daemon=True) for one in stations]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_TELL_SECONDS + 5)
