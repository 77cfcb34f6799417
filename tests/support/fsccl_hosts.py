"""Ranks on the hosts of a bed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bed.lab import Bed

from support.fsccl_ranks import Rank, replies, results

FIRST_PORT = 29500
"""Of stores, which rank 0 keeps on its host."""


@dataclass
class HostRanks:
    """A job's ranks, each on a host of its own or beside others."""

    bed: Bed
    ranks: dict[int, Rank]
    limit: float
    """Seconds of a case."""

    @classmethod
    @contextmanager
    def start(
        cls, bed: Bed, hosts: Sequence[int], limit: float, said: Mapping[int, Path] | None = None
    ) -> Iterator[HostRanks]:
        """Rank ``i`` runs on the host ``hosts[i]``; ``said`` are files for what ranks print."""
        with ExitStack() as stack:
            ranks = {}
            for i, host in enumerate(hosts):
                enter = ("nsenter", "-t", str(bed[host].pid), "-a", "--")
                ranks[i] = Rank(prefix=enter, stderr=(said or {}).get(i))
                stack.callback(ranks[i].end)
                stack.callback(ranks[i].process.kill)
            yield cls(bed, ranks, limit)

    def join(self, key: str, timeout: float, port: int = FIRST_PORT, **environment: str) -> None:
        """Make all of them a job, whose operations may take ``timeout`` seconds."""
        where = {"size": len(self.ranks), "host": self.bed[0].address, "port": port, "key": key}
        for i, rank in self.ranks.items():
            rank.ask("join", rank=i, timeout=timeout, environment=environment, **where)
        results(replies(self.ranks, 90))

    def ask(self, case: str, **arguments: Any) -> None:
        for rank in self.ranks.values():
            rank.ask(case, **arguments)

    def call(self, case: str, **arguments: Any) -> list[Any]:
        self.ask(case, **arguments)
        return results(replies(self.ranks, self.limit))
