"""Detection of a rank that has died or hangs.

Every rank publishes its progress once a second through the store. If a rank makes no progress
for the timeout, or an operation fails, the rank that notices reads the last heartbeats: silent
ranks are dead or stuck, and of the others the one that is furthest behind holds up the rest.
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
"""Seconds between heartbeats."""
SILENT = 2.5
"""Seconds without a heartbeat after which a rank is considered silent."""


@dataclass
class RankHeartbeat:
    """Heartbeat of a rank."""

    rank: int
    host: str
    pid: int
    time: float = 0.0
    where: str = "starting"
    stage: int = 0
    """Number of stages entered; all ranks enter the same ones."""
    steps: int = 0
    """Iterations of this stage."""
    done: bool = False

    @property
    def progress(self) -> tuple[int, int]:
        return self.stage, self.steps

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, process {self.pid})"


def explain_delay(heartbeats: dict[int, RankHeartbeat | None], now: float) -> str:
    """Return which ranks hold up the others, by their last heartbeats."""
    absent = [rank for rank, heartbeat in heartbeats.items() if heartbeat is None]
    received = [heartbeat for heartbeat in heartbeats.values() if heartbeat is not None]
    silent = [
        heartbeat for heartbeat in received if now - heartbeat.time > SILENT and not heartbeat.done
    ]
    lines = [f"rank {rank} was never heard" for rank in absent]
    lines += [
        f"{heartbeat} has been silent for {now - heartbeat.time:.0f} s: dead or stopped, last "
        f"heard in {heartbeat.where}, iteration {heartbeat.steps}"
        for heartbeat in silent
    ]
    if not lines and received:
        least, furthest = min(b.progress for b in received), max(b.progress for b in received)
        if least < furthest:
            behind = [b for b in received if b.progress == least]
            lines += [f"{b} is behind: {b.where}, iteration {b.steps}" for b in behind]
        else:
            lines.append(f"all ranks wait in {received[0].where}, iteration {received[0].steps}")
    return "; ".join(lines)


class ProgressWatch:
    """Publishes this rank's progress, and ends the process if it is stuck."""

    def __init__(self, store: Store, beat: RankHeartbeat, size: int, timeout: float) -> None:
        # The timing loop appends one entry per iteration; the length is the stage's progress.
        self.marks: Marks = []
        # A separate connection: the main thread may wait on the other.
        self._store: Store = store.clone()  # type: ignore[attr-defined]
        self._store.set_timeout(timedelta(seconds=2))
        self._heartbeat, self._size, self._timeout = beat, size, timeout
        self._stop = threading.Event()
        self._last_progress = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="bench-watch", daemon=True)

    def start(self) -> None:
        self._publish()
        self._thread.start()

    def enter_stage(self, where: str) -> None:
        """Record that this rank works on a stage."""
        self._heartbeat.where = where
        self._heartbeat.stage += 1
        self.marks.clear()
        self._last_progress = time.monotonic()

    def finish(self) -> None:
        """Record that this rank has finished, so that its silence is expected."""
        self._stop.set()
        self._thread.join(timeout=2 * PERIOD)
        self._heartbeat.done = True
        self._publish()

    def diagnose(self) -> str | None:
        """Return which ranks hold up the others; None if another rank reports it, or nothing is
        known.
        """
        # Wait for one more heartbeat of the ranks that live.
        time.sleep(SILENT + PERIOD / 2)
        try:
            beats = {rank: self._read_heartbeat(rank) for rank in range(self._size)}
        except (dist.DistError, RuntimeError):
            # Rank 0 hosts the store, so the next rank reports its silence.
            lowest = 1 if self._size > 1 else 0
            return "rank 0 does not answer" if self._heartbeat.rank == lowest else None
        now = time.time()
        alive = [r for r, b in beats.items() if b is not None and now - b.time <= SILENT]
        if alive and self._heartbeat.rank != min(alive):
            return None
        return explain_delay(beats, now)

    def _read_heartbeat(self, rank: int) -> RankHeartbeat | None:
        key = f"beat/{rank}"
        return decode(RankHeartbeat, self._store.get(key)) if self._store.check([key]) else None

    def _publish(self) -> None:
        self._heartbeat.time = time.time()
        self._heartbeat.steps = len(self.marks)
        try:
            self._store.set(f"beat/{self._heartbeat.rank}", encode(self._heartbeat))
        except (dist.DistError, RuntimeError):
            # Rank 0's store is gone; the operation that needs it will report that.
            return

    def _run(self) -> None:
        last = (-1, -1)
        while not self._stop.wait(PERIOD):
            now = (self._heartbeat.stage, len(self.marks))
            if now != last:
                last, self._last_progress = now, time.monotonic()
            self._publish()
            if time.monotonic() - self._last_progress > self._timeout:
                self._exit_stuck()

    def _exit_stuck(self) -> None:
        self._stop.set()
        threading.Thread(target=self._keep_publishing, daemon=True).start()
        message = self.diagnose()
        if message is not None:
            sys.stdout.flush()
            os.write(2, f"error: no progress for {self._timeout:g} s: {message}\n".encode())
        # The main thread is inside a call that nothing else ends.
        os._exit(1)

    def _keep_publishing(self) -> None:
        while True:
            self._publish()
            time.sleep(PERIOD)
