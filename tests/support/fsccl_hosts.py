"""Ranks on the hosts of a test bed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bed.lab import Bed

from support.fsccl_ranks import RankWorker, unwrap_results, wait_for_replies
from support.waiting import PATIENCE_SECONDS

FIRST_PORT = 29500
"""Port of the first store, which rank 0 hosts."""


@dataclass
class HostRanks:
    """Ranks of a job on one or several hosts of a test bed."""

    bed: Bed
    ranks: dict[int, RankWorker]
    timeout_seconds: float
    """Timeout of a case."""

    @classmethod
    @contextmanager
    def start(
        cls,
        bed: Bed,
        hosts: Sequence[int],
        timeout_seconds: float,
        stderr_files: Mapping[int, Path] | None = None,
    ) -> Iterator[HostRanks]:
        """Start rank ``i`` on host ``hosts[i]``. ``stderr_files`` receive the ranks' stderr."""
        with ExitStack() as stack:
            ranks = {}
            for i, host in enumerate(hosts):
                prefix = ("nsenter", "-t", str(bed[host].pid), "-a", "--")
                ranks[i] = RankWorker(prefix=prefix, stderr=(stderr_files or {}).get(i))
                stack.callback(ranks[i].stop)
                stack.callback(ranks[i].process.kill)
            yield cls(bed, ranks, timeout_seconds)

    def join(
        self, key: str, operation_timeout: float, port: int = FIRST_PORT, **environment: str
    ) -> None:
        """Initialize a job on all ranks, with a timeout of operations in seconds."""
        arguments = {"size": len(self.ranks), "host": self.bed[0].address, "port": port, "key": key}
        for i, rank in self.ranks.items():
            rank.start_case(
                "join",
                rank=i,
                timeout=PATIENCE_SECONDS,
                environment=environment,
                **arguments,
            )
        unwrap_results(wait_for_replies(self.ranks, 1.5 * PATIENCE_SECONDS))
        self.call("set_operation_timeout", seconds=operation_timeout)

    def start_case(self, case: str, **arguments: Any) -> None:
        for rank in self.ranks.values():
            rank.start_case(case, **arguments)

    def call(self, case: str, **arguments: Any) -> list[Any]:
        """Run a case on all ranks and return their results."""
        self.start_case(case, **arguments)
        return unwrap_results(wait_for_replies(self.ranks, self.timeout_seconds))
