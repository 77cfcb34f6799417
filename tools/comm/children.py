"""Ranks that are forked from one process: how the tools here start them and end them.

The process that forks must not have called torch before: its threads would not be in the child.
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
    """A forked process and what it writes."""

    pid: int
    words: IO[str]


def start(child: Callable[[int], object]) -> Child:
    """Fork a process that calls ``child`` with the descriptor that it is to write to, and ends."""
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


def end(children: Sequence[Child]) -> None:
    """Kill them, whatever they do."""
    for child in children:
        os.kill(child.pid, signal.SIGKILL)
        os.waitpid(child.pid, 0)
        child.words.close()


def start_store() -> tuple[Child, int]:
    """A process that keeps a store, and the store's port."""

    def keep(out: int) -> None:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(out, f"{store.port}\n".encode())
        signal.pause()

    keeper = start(keep)
    return keeper, int(keeper.words.readline())


def join(rank: int, ranks: int, port: int, clusters: str) -> None:
    """In a child: become that rank of fsccl's world, on CPUs, in such clusters."""
    os.environ.update({"FSCCL_CLUSTERS": clusters, "FSCCL_DEVICE": "cpu"})
    os.environ["FSCCL_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
    dist.init_process_group("fsccl", store=store, rank=rank, world_size=ranks, timeout=TIMEOUT)


def start_ranks(
    ranks: int, port: int, clusters: str, life: Callable[[int, int], object]
) -> list[Child]:
    """Fork so many that join and then call ``life`` with their rank and where to write."""

    def child(rank: int, out: int) -> None:
        join(rank, ranks, port, clusters)
        life(rank, out)

    return [start(partial(child, rank)) for rank in range(ranks)]
