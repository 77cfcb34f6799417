"""Ranks of one host that end while the host's part of the attempt goes on.

torchrun and :mod:`flagscale.launcher.rank_processes` end all ranks of a host if one fails, but a
rank with exit code 0 ends alone, and the others may wait for it in a collective. The agent is not
the parent of the ranks, so it sees that a rank has ended, but not its exit code. The code is 0 if
torchrun goes on for longer than it would after a failure, unless another one is recorded.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from pathlib import Path

from flagscale.hosts import processes
from flagscale.hosts.processes import Process
from flagscale.launcher.layout import HostFiles
from flagscale.launcher.liveness.attempt import Attempt, Stage
from flagscale.launcher.liveness.messages import RankExit
from flagscale.status import read_exit_code

# A search reads the status of every process of the machine.
_SEARCH_SECONDS = 1.0
_LATE_SEARCH_SECONDS = 30.0
_SEARCHED_SECONDS = 120.0
# All ranks of a host are started one after the other, in a moment unless the machine is busy. A
# rank that is not found so long after another one has ended before it was seen.
_MISSING_SECONDS = 10.0
# torchrun kills the ranks that survive a failure after its shutdown timeout. If it runs this much
# longer, no rank has failed.
_SHUTDOWN_TIMEOUT_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
_SHUTDOWN_MARGIN_SECONDS = 5.0
_DEFAULT_SHUTDOWN_TIMEOUT = "30"
_MAX_REPORTED_EXITS = 8


class RankExits:
    """Incremental record of the ranks of an attempt that have ended.

    Attributes:
        ended_ranks: Ranks of this host whose process has ended.
    """

    def __init__(self, host: HostFiles, attempt: Attempt, status_directory: Path) -> None:
        self.ended_ranks: set[int] = set()
        self._host = host
        self._attempt = attempt
        self._status_directory = status_directory
        self._processes: dict[int, Process] = {}
        self._first_found: tuple[float, float] | None = None  # monotonic and Unix time
        self._searched_at = attempt.start_time - _SEARCH_SECONDS
        self._exits: dict[int, tuple[RankExit, float]] = {}  # with seconds of the monotonic clock
        timeout = os.environ.get(_SHUTDOWN_TIMEOUT_VARIABLE) or _DEFAULT_SHUTDOWN_TIMEOUT
        # An invalid value ends torchrun with a message of its own.
        seconds = int(timeout) if timeout.isdecimal() else 0
        self._certain_after_seconds = seconds + _SHUTDOWN_MARGIN_SECONDS

    def refresh(self, now: float) -> None:
        """Detect ended ranks. Must be called periodically.

        Ranks that end once the attempt is being ended are not recorded.
        """
        attempt = self._attempt
        if attempt.stage is not Stage.RUNNING or attempt.is_ending:
            return
        self._find_processes(now)
        for rank, process in self._processes.items():
            if rank not in self.ended_ranks and not processes.is_alive(process):
                self._record_end(rank, now, time.time())

    def _find_processes(self, now: float) -> None:
        """Find the processes of ranks that are not known yet."""
        is_late = now - self._attempt.start_time > _SEARCHED_SECONDS
        interval = _LATE_SEARCH_SECONDS if is_late else _SEARCH_SECONDS
        missing_ranks = set(self._host.ranks) - self._processes.keys()
        if not missing_ranks or now - self._searched_at < interval:
            return
        self._searched_at = now
        found_processes = self._attempt.find_ranks()
        if found_processes and self._first_found is None:
            self._first_found = now, time.time()
        for rank in missing_ranks & found_processes.keys():
            self._processes[rank] = found_processes[rank]
            self.ended_ranks.discard(rank)
            self._exits.pop(rank, None)
        if self._first_found is not None and now - self._first_found[0] >= _MISSING_SECONDS:
            for rank in missing_ranks - self._processes.keys() - self.ended_ranks:
                self._record_end(rank, *self._first_found)

    def _record_end(self, rank: int, now: float, unix_time: float) -> None:
        self.ended_ranks.add(rank)
        self._exits[rank] = RankExit(rank, unix_time), now

    def find_early_exits(self, finished_ranks: Collection[int], now: float) -> tuple[RankExit, ...]:
        """Return the first ranks that certainly ended with exit code 0, in order of their end.

        Args:
            finished_ranks: Ranks that reported the end of their work, which are left out.
            now: Seconds of the monotonic clock.
        """
        exits = self._list_successful_exits(now)
        early_exits = [rank_exit for rank_exit in exits if rank_exit.rank not in finished_ranks]
        return tuple(sorted(early_exits, key=lambda e: (e.time, e.rank))[:_MAX_REPORTED_EXITS])

    def _list_successful_exits(self, now: float) -> list[RankExit]:
        attempt = self._attempt
        if attempt.exit_code is None:
            return [
                rank_exit
                for rank_exit, seen_at in self._exits.values()
                if now - seen_at >= self._certain_after_seconds
                and not read_exit_code(self._status_directory, rank_exit.rank)
            ]
        if attempt.exit_code or attempt.is_ending:
            return []
        exits = {rank: RankExit(rank, attempt.end_time) for rank in self._host.ranks}
        exits |= {rank: rank_exit for rank, (rank_exit, _) in self._exits.items()}
        return list(exits.values())
