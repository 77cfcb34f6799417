"""Forked ranks for the tools in this directory: start and end.

The process that forks must not have called torch before, because torch's threads would be
missing in the child.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import IO

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

TIMEOUT = timedelta(seconds=30)


@dataclass(frozen=True)
class Child:
    """A forked process and its output."""

    pid: int
    output: IO[str]


def fork_child(child: Callable[[int], object]) -> Child:
    """Fork a process that calls ``child`` with a descriptor to write to, and then exits."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        try:
            child(write)
        finally:
            os._exit(1)
    os.close(write)
    return Child(pid, os.fdopen(read))


def kill_children(children: Sequence[Child]) -> None:
    """Kill the processes."""
    for child in children:
        os.kill(child.pid, signal.SIGKILL)
        os.waitpid(child.pid, 0)
        child.output.close()


def start_store() -> tuple[Child, int]:
    """Start a process that owns a store, and return it with the store's port."""

    def serve_store(out: int) -> None:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(out, f"{store.port}\n".encode())
        signal.pause()

    keeper = fork_child(serve_store)
    return keeper, int(keeper.output.readline())


def join_world(rank: int, ranks: int, port: int, clusters: str) -> None:
    """Become a rank of fsccl's world on CPUs, in a child process."""
    os.environ.update({"FSCCL_CLUSTERS": clusters, "FSCCL_DEVICE": "cpu"})
    os.environ["FSCCL_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
    dist.init_process_group("fsccl", store=store, rank=rank, world_size=ranks, timeout=TIMEOUT)


def start_ranks(
    ranks: int, port: int, clusters: str, run_rank: Callable[[int, int], object]
) -> list[Child]:
    """Fork ``ranks`` processes that join a world and call ``run_rank`` with their rank and a
    descriptor to write to.
    """

    def child(rank: int, out: int) -> None:
        join_world(rank, ranks, port, clusters)
        run_rank(rank, out)

    return [fork_child(partial(child, rank)) for rank in range(ranks)]
