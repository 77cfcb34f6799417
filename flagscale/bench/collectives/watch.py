"""Detection of a benchmark rank that has died or hangs.

Every rank publishes a heartbeat with its progress once a second through torch's store. If a rank
makes no progress for the timeout, or an operation fails, the last heartbeats are read. A rank
without a recent heartbeat is *silent*: dead or stopped. If no rank is silent, the one with the
least progress delays the others.

Used by :mod:`.worker`, which creates a :class:`ProgressWatch` on each rank. A *stage* is a part of
the run that all ranks enter in the same order, such as the timing of one size.
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

HEARTBEAT_SECONDS = 1.0
"""Time between heartbeats."""
SILENCE_SECONDS = 2.5
"""Time without a heartbeat after which a rank is considered silent."""


@dataclass
class RankHeartbeat:
    """Heartbeat of a rank."""

    rank: int
    host: str
    pid: int
    time: float = 0.0
    """When it was published, in seconds since the epoch."""
    stage_name: str = "starting"
    stage_index: int = 0
    """Number of stages entered so far."""
    iterations: int = 0
    """Iterations of this stage that have finished."""
    is_finished: bool = False
    """The rank has finished its work, so that no heartbeat follows."""

    @property
    def progress(self) -> tuple[int, int]:
        """Stage and iteration; the rank with the smallest value is the furthest behind."""
        return self.stage_index, self.iterations

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, process {self.pid})"


def explain_delay(heartbeats: dict[int, RankHeartbeat | None], now: float) -> str:
    """Return a message that names the ranks which delay the others.

    Args:
        heartbeats: last heartbeat by rank; None if there was none.
        now: time of the evaluation, in seconds since the epoch.
    """
    lines = [
        f"rank {rank} was never heard"
        for rank, heartbeat in heartbeats.items()
        if heartbeat is None
    ]
    received = [heartbeat for heartbeat in heartbeats.values() if heartbeat is not None]
    lines += [
        f"{heartbeat} has been silent for {now - heartbeat.time:.0f} s: dead or stopped, last "
        f"heard in {heartbeat.stage_name}, iteration {heartbeat.iterations}"
        for heartbeat in received
        if now - heartbeat.time > SILENCE_SECONDS and not heartbeat.is_finished
    ]
    if lines or not received:
        return "; ".join(lines)
    slowest = min(heartbeat.progress for heartbeat in received)
    fastest = max(heartbeat.progress for heartbeat in received)
    if slowest < fastest:
        lines = [
            f"{heartbeat} is behind: {heartbeat.stage_name}, iteration {heartbeat.iterations}"
            for heartbeat in received
            if heartbeat.progress == slowest
        ]
    else:
        stage_name, iterations = received[0].stage_name, received[0].iterations
        lines = [f"all ranks wait in {stage_name}, iteration {iterations}"]
    return "; ".join(lines)


class ProgressWatch:
    """Thread that publishes this rank's progress, and ends the process if it makes none.

    Args:
        store: torch's store of all ranks.
        heartbeat: heartbeat of this rank; it is updated and published.
        world_size: number of ranks.
        timeout_seconds: time without progress after which the process reports the cause and exits.
    """

    def __init__(
        self, store: Store, heartbeat: RankHeartbeat, world_size: int, timeout_seconds: float
    ) -> None:
        # The timing loop appends one entry per iteration; the length is the stage's progress.
        self.marks: Marks = []
        # A separate connection, because the main thread may be waiting on the original one.
        self._store: Store = store.clone()  # type: ignore[attr-defined]
        self._store.set_timeout(timedelta(seconds=2))
        self._heartbeat, self._world_size = heartbeat, world_size
        self._timeout_seconds = timeout_seconds
        self._stop = threading.Event()
        self._last_progress = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="bench-watch", daemon=True)

    def start(self) -> None:
        """Publish the first heartbeat, and start the thread."""
        self._publish()
        self._thread.start()

    def enter_stage(self, name: str) -> None:
        """Record that this rank begins a stage."""
        self._heartbeat.stage_name = name
        self._heartbeat.stage_index += 1
        self.marks.clear()
        self._last_progress = time.monotonic()

    def finish(self) -> None:
        """Record that this rank has finished, and stop the thread."""
        self._stop.set()
        self._thread.join(timeout=2 * HEARTBEAT_SECONDS)
        self._heartbeat.is_finished = True
        self._publish()

    def diagnose(self) -> str | None:
        """Return a message that names the ranks which delay the others, on one rank only: the
        lowest one that is alive. Return None on the others. Takes about three seconds.
        """
        # Wait for one more heartbeat of the ranks that are alive.
        time.sleep(SILENCE_SECONDS + HEARTBEAT_SECONDS / 2)
        try:
            heartbeats = {rank: self._read_heartbeat(rank) for rank in range(self._world_size)}
        except (dist.DistError, RuntimeError):
            # Rank 0 hosts the store. If it does not answer, rank 1 reports that.
            reporting_rank = 1 if self._world_size > 1 else 0
            return "rank 0 does not answer" if self._heartbeat.rank == reporting_rank else None
        now = time.time()
        alive_ranks = [
            rank
            for rank, heartbeat in heartbeats.items()
            if heartbeat is not None and now - heartbeat.time <= SILENCE_SECONDS
        ]
        if alive_ranks and self._heartbeat.rank != min(alive_ranks):
            return None
        return explain_delay(heartbeats, now)

    def _read_heartbeat(self, rank: int) -> RankHeartbeat | None:
        key = f"beat/{rank}"
        return decode(RankHeartbeat, self._store.get(key)) if self._store.check([key]) else None

    def _publish(self) -> None:
        self._heartbeat.time = time.time()
        self._heartbeat.iterations = len(self.marks)
        try:
            self._store.set(f"beat/{self._heartbeat.rank}", encode(self._heartbeat))
        except (dist.DistError, RuntimeError):
            # Rank 0's store no longer exists. The running operation fails too, and is reported.
            return

    def _run(self) -> None:
        previous = (-1, -1)
        while not self._stop.wait(HEARTBEAT_SECONDS):
            current = (self._heartbeat.stage_index, len(self.marks))
            if current != previous:
                previous, self._last_progress = current, time.monotonic()
            self._publish()
            if time.monotonic() - self._last_progress > self._timeout_seconds:
                self._exit_stuck()

    def _exit_stuck(self) -> None:
        """Report the cause and end the process. Heartbeats go on meanwhile, so that other ranks
        do not consider this one dead.
        """
        self._stop.set()
        threading.Thread(target=self._keep_publishing, daemon=True).start()
        message = self.diagnose()
        if message is not None:
            sys.stdout.flush()
            text = f"error: no progress for {self._timeout_seconds:g} s: {message}\n"
            os.write(2, text.encode())
        # The main thread is blocked in a call that cannot be interrupted.
        os._exit(1)

    def _keep_publishing(self) -> None:
        while True:
            self._publish()
            time.sleep(HEARTBEAT_SECONDS)
