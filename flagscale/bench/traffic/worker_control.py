"""A process of the traffic on its host: it hears orders, speaks, and ends when it shall.

It ends by itself at its time, when its parent ends (the kernel tells), when nobody reads its output
any more (the connection that brought it has closed), and when no word has come for the time of its
lease: the machine that started it may be gone without a trace. Orders come by a pipe that the
process itself holds, found under ``/proc``: so nothing of it is ever on a disk.

Standard library alone.
"""

from __future__ import annotations

import fcntl
import os
import queue
import select
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from flagscale.bench.traffic.messages import Order, Said, Word
from flagscale.errors import FlagscaleError
from flagscale.hosts.kernel import die_with
from flagscale.records import decode, encode

_POLL_MS = 100
_DESCRIPTORS_FROM = 700
_CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")


class Post:
    """The process's ears and mouth. ``end`` may be called by any thread, and nothing is left."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.words: queue.SimpleQueue[Word] = queue.SimpleQueue()
        self._deadline = time.monotonic() + order.seconds
        self._lease = time.monotonic() + order.lease
        self._speaking = threading.Lock()
        self._ear, mouth = os.pipe()
        # A number that no other process is likely to have: see `stations.tell`.
        self._mouth = fcntl.fcntl(mouth, fcntl.F_DUPFD_CLOEXEC, _DESCRIPTORS_FROM)
        os.close(mouth)
        os.set_blocking(self._ear, False)

    def open(self, port: int) -> None:
        """Listen from now on, and say where this process is reached."""
        signal.signal(signal.SIGTERM, lambda *_: self.end())
        with suppress(OSError):
            die_with(os.getppid(), signal.SIGTERM)()
        threading.Thread(target=self.guarded(self._watch), name="watch", daemon=True).start()
        pipe = str(Path(f"/proc/self/fd/{self._mouth}").readlink())
        self.say(Said("ready", "", os.getpid(), self._mouth, pipe, port, _congestion()))

    def say(self, said: Said) -> None:
        """Tell whoever has started this process; without one it ends."""
        line = f"{encode(said)}\n".encode()
        with self._speaking:
            try:
                while line:
                    line = line[os.write(1, line) :]
            except OSError:
                self.end()

    def fail(self, text: str) -> NoReturn:
        """Say why this process cannot go on, and end it."""
        self.say(Said("failed", text))
        self.end(1)

    def guarded(self, work: Callable[[], object]) -> Callable[[], None]:
        """``work`` for a thread: what goes wrong in it ends the process with its reason."""

        def run() -> None:
            try:
                work()
            except (OSError, ValueError, FlagscaleError) as error:
                self.fail(str(error))

        return run

    def end(self, code: int = 0) -> NoReturn:
        """End at once: the kernel closes every socket, and what they still had to send is lost."""
        os._exit(code)

    def _watch(self) -> None:
        poller = select.poll()
        poller.register(self._ear, select.POLLIN)
        poller.register(1, 0)
        rest = b""
        while True:
            ready = dict(poller.poll(_POLL_MS))
            now = time.monotonic()
            if 1 in ready or now > self._deadline or now > self._lease:
                self.end()
            if self._ear not in ready:
                continue
            *lines, rest = (rest + os.read(self._ear, 1 << 16)).split(b"\n")
            for line in lines:
                self._lease = now + self.order.lease
                self._hear(decode(Word, line))

    def _hear(self, word: Word) -> None:
        if word.do == "end":
            self.end()
        if word.do != "renew":
            self.words.put(word)


def _congestion() -> str:
    try:
        return _CONGESTION.read_text(encoding="ascii").strip()
    except OSError:
        return "unknown"
