"""Saving of the training state in host memory, copies on another host, and restoring.

Each rank writes alternately to two regions of its host's memory, so that one whole copy exists at
any time. A thread then sends the copy to a rank of another host, and receives that of a third one.
A region is overwritten only after the other copy of the same rank has arrived everywhere.

After a restart, the ranks agree on the newest iteration of which every rank's copy is somewhere. A
rank on a new host receives its copy from the rank that holds it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from flagscale.memory_regions import find_regions
from flagscale.train.checkpoint.collective_errors import describe_error, true_on_all_ranks
from flagscale.train.distributed import RankIdentity, gather_from_ranks
from flagscale.train.host_memory import explain_lack_of_memory
from flagscale.train.memory_checkpoint.local_state import LocalState, name_part
from flagscale.train.memory_checkpoint.region import INCOMPLETE, Region
from flagscale.train.section_recorder import ignore_this_thread
from flagscale.train.state import TrainState

_SENT_BYTES = 1 << 30
"""Maximum number of bytes of one message."""


@dataclass(frozen=True)
class _Holding:
    """Complete copies that a rank can read.

    Attributes:
        own: iterations of its own state, with the fingerprints of the state.
        source: the rank whose copies are in ``others``.
        others: iterations of that rank's state.
    """

    own: dict[int, str]
    source: int
    others: frozenset[int]


class MemoryCheckpoints:
    """Copies of the training state in host memory. All ranks call all methods at the same points.

    If a host has no memory for a copy, ``warn`` gets one message, and training goes on with
    checkpoints on disk alone.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        rank: RankIdentity,
        warn: Callable[[str], None],
    ) -> None:
        """Open the regions of this rank, and create a process group for the copies. Collective.

        Args:
            args: the resolved training arguments.
            rank: identity of this process.
            warn: called with a message on every rank.
        """
        self._rank, self._warn = rank.rank, warn
        self._part = name_part(args)
        self._interval: int | None = args.non_persistent_save_interval
        self._own: list[Region] = []
        self._others: list[Region] = []
        self._pool = ThreadPoolExecutor(
            1, thread_name_prefix="memory-checkpoint", initializer=ignore_this_thread
        )
        self._transfer: Future[None] | None = None
        self._is_announced = False
        self.has_restored = False
        """True if the state is from memory, so that the checkpoint on disk may be older."""
        error = self._open_regions(rank.local_rank)
        if not true_on_all_ranks(not error):
            if error or rank.rank == 0:
                reason = error or "another rank failed"
                warn(f"non_persistent_save_interval has no effect: {reason}")
            self._interval = None
        sizes = gather_from_ranks(rank.local_world_size)
        self._distance = max(sizes) if args.replication_jump is None else args.replication_jump
        replicates = args.replication is not False and len(sizes) > max(sizes)
        self._group: Any = None
        if self._interval and replicates and self._distance % len(sizes):
            minutes = args.distributed_timeout_minutes
            self._group = dist.new_group(backend="gloo", timeout=timedelta(minutes=minutes))

    def _open_regions(self, local_rank: int) -> str:
        """Open the regions; return the reason if it is not possible."""
        regions = find_regions(local_rank)
        if regions is None:
            return "the launcher's agent of this host provides no memory"
        try:
            self._own = [Region(path) for path in regions.own]
            self._others = [Region(path) for path in regions.others]
        except OSError as error:
            return describe_error(error)
        return ""

    def is_due(self, iteration: int) -> bool:
        """Return whether the state is saved after this iteration."""
        return self._interval is not None and iteration % self._interval == 0

    def save(self, state: TrainState) -> str | None:
        """Save this rank's state, and send it to another host in the background.

        Parameters must be up to date (:func:`flagscale.train.step.gathered_parameters`).

        Returns:
            After the first save, what it took, for the log.
        """
        start_time = time.monotonic()
        local_state = LocalState(state, self._part)
        if reason := self._explain_lack_of_memory(local_state):
            self._give_up(reason if self._rank == 0 else "")
            return None
        iteration, error = state.progress.iteration, ""
        target = min(self._own, key=Region.iteration)
        try:
            self._finish_transfer()
            target.write(iteration, local_state.tensors, local_state.describe())
        except (OSError, RuntimeError) as problem:
            error = describe_error(problem)
        if not true_on_all_ranks(not error):
            self._give_up(error or ("another rank failed" if self._rank == 0 else ""))
            return None
        if self._group is not None:
            self._transfer = self._pool.submit(self._exchange, target)
        if self._is_announced:
            return None
        self._is_announced = True
        return (
            f"the training state is copied to host memory every {self._interval} steps: "
            f"{target.size() / 2**30:.2f} GiB and {time.monotonic() - start_time:.2f} s on rank 0"
        )

    def _explain_lack_of_memory(self, local_state: LocalState) -> str | None:
        """Return why the hosts cannot hold the copies, before the first is saved. Collective."""
        if self._is_announced:
            return None
        regions = [*self._own, *(self._others if self._group is not None else ())]
        # The rank that sends its copies here is expected to hold as much as this one.
        return explain_lack_of_memory(sum(r.missing_bytes(local_state.tensors) for r in regions))

    def _give_up(self, reason: str) -> None:
        """End copying; warn if there is a reason."""
        if reason:
            self._warn(f"the training state is not kept in host memory: {reason}")
        self._interval = None

    def _finish_transfer(self) -> None:
        """Wait until the last copy has arrived everywhere.

        Raises:
            RuntimeError: a connection is lost.
            OSError: this host has no memory for a copy.
        """
        if self._transfer is not None:
            transfer, self._transfer = self._transfer, None
            transfer.result()

    def _exchange(self, own: Region) -> None:
        """Send this rank's copy, and receive that of the rank before it."""
        target = (self._rank + self._distance) % dist.get_world_size()
        source = self._find_source()
        sent_header = torch.tensor(own.header())
        received_header = torch.empty_like(sent_header)
        sending: Any = dist.isend(sent_header, target, group=self._group)
        dist.recv(received_header, source, group=self._group)
        sending.wait()
        iteration, position, length = received_header.tolist()
        region = min(self._others, key=Region.iteration)
        incoming = region.bytes_to_receive(position + length)
        handles: list[Any] = [
            dist.isend(part, target, group=self._group) for part in _split(own.bytes_to_send())
        ]
        for part in _split(incoming):
            dist.recv(part, source, group=self._group)
        for handle in handles:
            handle.wait()
        region.complete((iteration, position, length))
        dist.barrier(group=self._group)

    def find(self, state: TrainState) -> int | None:
        """Return the newest iteration of which every rank's state is in the memory of some host;
        None without any. Collective.
        """
        if self._interval is None:
            return None
        iterations = self._list_common(LocalState(state, self._part).fingerprint())
        return max(iterations, default=None)

    def _list_common(self, fingerprint: str) -> set[int]:
        holdings = self._gather_holdings()
        own = holdings[self._rank].own
        fits = all(text == fingerprint for text in own.values())
        if not true_on_all_ranks(fits):
            # Those of a job with more hosts: a later copy must not be completed from them.
            for region in (*self._own, *self._others):
                region.invalidate()
            return set()
        available = [
            set(holding.own).union(*(h.others for h in holdings if h.source == rank))
            for rank, holding in enumerate(holdings)
        ]
        return set.intersection(*available)

    def _gather_holdings(self) -> list[_Holding]:
        own = {
            region.iteration(): str(region.read_description()["fingerprint"])
            for region in self._own
            if region.iteration() != INCOMPLETE
        }
        others = frozenset(region.iteration() for region in self._others) - {INCOMPLETE}
        return gather_from_ranks(_Holding(own, self._find_source(), others))

    def _find_source(self) -> int:
        """Return the rank whose copies this one keeps."""
        return int((self._rank - self._distance) % dist.get_world_size())

    def restore(self, state: TrainState, iteration: int) -> str:
        """Restore the state of an iteration that :meth:`find` has returned. Collective.

        Returns:
            A remark for the log on where it came from.
        """
        holdings = self._gather_holdings()
        moved = self._send_lost_copies(holdings, iteration)
        region = next(region for region in self._own if region.iteration() == iteration)
        local_state = LocalState(state, self._part)
        region.read(local_state.tensors)
        dist.barrier()
        local_state.restore(region.read_description())
        self.has_restored = True
        # Copies of later iterations are of a past that did not happen.
        for other in (*self._own, *self._others):
            if other.iteration() > iteration:
                other.invalidate()
        origin = f", {moved} of {len(holdings)} ranks' from another host" if moved else ""
        return f"loaded iteration {iteration} from host memory{origin}"

    def _send_lost_copies(self, holdings: list[_Holding], iteration: int) -> int:
        """Send the copies of ranks that have lost theirs; return the number of these ranks."""
        lost = [rank for rank, holding in enumerate(holdings) if iteration not in holding.own]
        for rank in lost:
            holder = next(
                number
                for number, holding in enumerate(holdings)
                if holding.source == rank and iteration in holding.others
            )
            header = torch.zeros(3, dtype=torch.int64)
            if self._rank == holder:
                region = next(r for r in self._others if r.iteration() == iteration)
                header = torch.tensor(region.header())
                dist.send(header, rank, group=self._group)
                for part in _split(region.bytes_to_send()):
                    dist.send(part, rank, group=self._group)
            elif self._rank == rank:
                dist.recv(header, holder, group=self._group)
                _, position, length = header.tolist()
                region = self._own[0]
                for part in _split(region.bytes_to_receive(position + length)):
                    dist.recv(part, holder, group=self._group)
                region.complete((iteration, position, length))
        return len(lost)

    def close(self) -> None:
        """Wait for the end of the transfer; the copies stay until the run ends."""
        with suppress(OSError, RuntimeError):  # training has ended
            self._finish_transfer()
        self._pool.shutdown()


def open_memory_checkpoints(
    args: argparse.Namespace, rank: RankIdentity, warn: Callable[[str], None]
) -> MemoryCheckpoints | None:
    """Return the copies in memory, if ``args`` ask for them. Collective."""
    return MemoryCheckpoints(args, rank, warn) if args.non_persistent_save_interval else None


def _split(data: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield parts of a message that are not too large for a transport."""
    for start in range(0, data.numel(), _SENT_BYTES):
        yield data[start : start + _SENT_BYTES]
