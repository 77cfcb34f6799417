"""Noticing a rank that died or hangs, and saying which one and where.

Every rank tells the others once a second, through the store, how far it is. When one has made no
progress for the timeout, or an operation fails, the rank that notices reads what the others said
last: who is silent is stuck or dead, and among those who speak the one furthest behind holds up
the rest.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from flagscale.bench.collectives.timing import Marks
from flagscale.records import decode, encode

PERIOD = 1.0
SILENT = 2.5
"""After so many seconds without a word a rank counts as silent."""


@dataclass
class Beat:
    """What a rank says about itself."""

    rank: int
    host: str
    pid: int
    time: float = 0.0
    where: str = "starting"
    stage: int = 0
    """How many stages it has entered; all ranks enter the same ones."""
    steps: int = 0
    """Iterations of this stage."""
    done: bool = False

    @property
    def progress(self) -> tuple[int, int]:
        return self.stage, self.steps

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, process {self.pid})"


def explain(beats: dict[int, Beat | None], now: float) -> str:
    """Which ranks hold up the others, from what each said last."""
    absent = [rank for rank, beat in beats.items() if beat is None]
    heard = [beat for beat in beats.values() if beat is not None]
    silent = [beat for beat in heard if now - beat.time > SILENT and not beat.done]
    lines = [f"rank {rank} was never heard" for rank in absent]
    lines += [
        f"{beat} has been silent for {now - beat.time:.0f} s: dead or stopped, last heard in "
        f"{beat.where}, iteration {beat.steps}"
        for beat in silent
    ]
    if not lines and heard:
        least, most = min(b.progress for b in heard), max(b.progress for b in heard)
        if least < most:
            behind = [b for b in heard if b.progress == least]
            lines += [f"{b} is behind: {b.where}, iteration {b.steps}" for b in behind]
        else:
            lines.append(f"all ranks wait in {heard[0].where}, iteration {heard[0].steps}")
    return "; ".join(lines)


class Watch:
    """Tells the others how far this rank is, and ends it when it is stuck."""

    def __init__(self, store: Store, beat: Beat, size: int, timeout: float) -> None:
        self.marks: Marks = []
        # A connection of its own: the main thread may wait on the other.
        self._store: Store = store.clone()  # type: ignore[attr-defined]
        self._store.set_timeout(timedelta(seconds=2))
        self._beat, self._size, self._timeout = beat, size, timeout
        self._stop = threading.Event()
        self._moved = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="bench-watch", daemon=True)

    def start(self) -> None:
        self._publish()
        self._thread.start()

    def enter(self, where: str) -> None:
        """This rank now works on ``where``."""
        self._beat.where = where
        self._beat.stage += 1
        self.marks.clear()
        self._moved = time.monotonic()

    def finish(self) -> None:
        """This rank has nothing left to do; its silence means nothing from now on."""
        self._stop.set()
        self._thread.join(timeout=2 * PERIOD)
        self._beat.done = True
        self._publish()

    def diagnose(self) -> str | None:
        """Who holds up the others; None when another rank has the word, or no one can tell."""
        # Let the living speak once more, so that the dead stand out.
        time.sleep(SILENT + PERIOD / 2)
        try:
            beats = {rank: self._read(rank) for rank in range(self._size)}
        except (dist.DistError, RuntimeError):
            lowest = 1 if self._size > 1 else 0
            return "rank 0 does not answer" if self._beat.rank == lowest else None
        now = time.time()
        alive = [r for r, b in beats.items() if b is not None and now - b.time <= SILENT]
        if alive and self._beat.rank != min(alive):
            return None
        return explain(beats, now)

    def _read(self, rank: int) -> Beat | None:
        key = f"beat/{rank}"
        return decode(Beat, self._store.get(key)) if self._store.check([key]) else None

    def _publish(self) -> None:
        self._beat.time = time.time()
        self._beat.steps = len(self.marks)
        try:
            self._store.set(f"beat/{self._beat.rank}", encode(self._beat))
        except (dist.DistError, RuntimeError):
            # Rank 0's store is gone; the operation that needs it will say so.
            return

    def _run(self) -> None:
        seen = (-1, -1)
        while not self._stop.wait(PERIOD):
            now = (self._beat.stage, len(self.marks))
            if now != seen:
                seen, self._moved = now, time.monotonic()
            self._publish()
            if time.monotonic() - self._moved > self._timeout:
                self._give_up()

    def _give_up(self) -> None:
        self._stop.set()
        threading.Thread(target=self._beat_on, daemon=True).start()
        message = self.diagnose()
        if message is not None:
            sys.stdout.flush()
            os.write(2, f"error: no progress for {self._timeout:g} s: {message}\n".encode())
        # The main thread is inside a call that nothing else ends.
        os._exit(1)

    def _beat_on(self) -> None:
        while True:
            self._publish()
            time.sleep(PERIOD)
