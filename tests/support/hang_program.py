"""Program whose ranks hang in a chosen way: ``hang_program.py KIND BACKEND TIMEOUT``.

Rank 2 is to blame, of two ranks the last one.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

BLAMED = min(2, int(os.environ["WORLD_SIZE"]) - 1)
FOREVER = 600.0
_KERNEL_CYCLES = 1 << 40


class Program:
    """A rank: warms up, and then hangs."""

    def __init__(self, backend: str, timeout: float) -> None:
        if backend == "fsccl":
            import flagscale.comm  # noqa: F401
        duration = timedelta(seconds=timeout)
        self.device = torch.device("cpu")
        if backend == "nccl":
            self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(self.device)
        dist.init_process_group(backend, timeout=duration)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        everybody = range(self.world)
        self.first, self.second = (
            dist.new_group(everybody, timeout=duration, group_desc=name)
            for name in ("first", "DATA_PARALLEL_GROUP")
        )
        self.tensor = self.create_tensor(4)
        for _ in range(3):
            dist.all_reduce(self.tensor)
            dist.all_reduce(self.tensor, group=self.first)
            dist.all_reduce(self.tensor, group=self.second)
        self.is_blamed = self.rank == BLAMED

    def create_tensor(self, size: int) -> torch.Tensor:
        """Return a tensor of ones on the device of the backend."""
        return torch.ones(size, device=self.device)

    def asleep(self) -> None:
        """Wait for data on one rank."""
        for _batch in self._batches():
            dist.all_reduce(self.tensor)

    def _batches(self) -> Iterator[int]:
        yield 0
        if self.is_blamed:
            time.sleep(FOREVER)  # the loader
        yield 1

    def storage(self) -> None:
        """Read from a file system that does not answer."""
        if self.is_blamed:
            path = Path(os.environ["FLAGSCALE_STATUS_DIR"], "storage")
            os.mkfifo(path)
            path.read_bytes()
        dist.all_reduce(self.tensor, group=self.second)

    def operation(self) -> None:
        if self.is_blamed:
            parts = [self.create_tensor(4) for _ in range(self.world)]
            dist.all_gather(parts, self.tensor)
        else:
            dist.all_reduce(self.tensor)

    def shape(self) -> None:
        tensor = self.create_tensor(5 if self.is_blamed else 4)
        dist.all_reduce(tensor, group=self.second)

    def order(self) -> None:
        """Begin two operations in another order than the others."""
        calls: list[Callable[[], object]] = [
            lambda: dist.all_reduce(self.tensor, async_op=True),
            lambda: dist.broadcast(self.create_tensor(8), 0, async_op=True),
        ]
        works = [call() for call in (reversed(calls) if self.is_blamed else calls)]
        for work in works:
            work.wait()  # type: ignore[attr-defined]

    def missing(self) -> None:
        """Leave out a collective, and go on to compute."""
        if not self.is_blamed:
            dist.all_reduce(self.tensor, group=self.second)
        while self.is_blamed:
            self.tensor.add_(1)

    def group(self) -> None:
        """Use another group than the others."""
        dist.all_reduce(self.tensor, group=self.first if self.is_blamed else self.second)

    def dead(self) -> None:
        """End one rank as if all were well."""
        if self.is_blamed:
            sys.stdout.flush()
            os._exit(0)
        dist.all_reduce(self.tensor)

    def stopped(self) -> None:
        """Stop the process of one rank."""
        if self.is_blamed:
            os.kill(os.getpid(), 19)
        dist.all_reduce(self.tensor)

    def deadlock(self) -> None:
        """Use two groups in different orders."""
        groups = [self.first, self.second]
        for group in reversed(groups) if self.is_blamed else groups:
            dist.all_reduce(self.tensor, group=group)

    def message(self) -> None:
        """Never send what another rank receives."""
        if self.rank == 0:
            dist.recv(self.tensor, BLAMED)
        elif self.is_blamed:
            time.sleep(FOREVER)
        dist.barrier()

    def chain(self) -> None:
        """Wait for a rank that waits for the blamed one."""
        pair = dist.new_group([1, BLAMED], group_desc="pair")
        if self.is_blamed:
            time.sleep(FOREVER)
        if self.rank == 1:
            dist.all_reduce(self.tensor, group=pair)
        dist.all_reduce(self.tensor)

    def kernel(self) -> None:
        """Run a kernel that does not end, before a collective."""
        if self.is_blamed:
            torch.cuda._sleep(_KERNEL_CYCLES)  # type: ignore[no-untyped-call]
        dist.all_reduce(self.tensor)

    def slow(self) -> None:
        """Advance, slowly: no hang."""
        for _ in range(8):
            time.sleep(1.5 if self.is_blamed else 0)
            dist.all_reduce(self.tensor)


def main() -> None:
    """Run the rank."""
    kind, backend, timeout = sys.argv[1:]
    getattr(Program(backend, float(timeout)), kind)()
    dist.barrier()


if __name__ == "__main__":
    main()
