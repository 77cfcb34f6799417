"""Forked processes for the tools in this directory, as ranks of fsccl's world on this host.

The process that forks must not have called torch before, because torch's threads would be
missing in the child. Used by features.py, kills.py and soak.py.
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
class ChildProcess:
    """A forked process, and the stream of lines that it writes."""

    pid: int
    output: IO[str]


def fork_child(run_child: Callable[[int], object]) -> ChildProcess:
    """Fork a process that calls ``run_child`` with a file descriptor for its output, and exits."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        try:
            run_child(write_end)
        finally:
            os._exit(1)
    os.close(write_end)
    return ChildProcess(pid, os.fdopen(read_end))


def kill_children(processes: Sequence[ChildProcess]) -> None:
    """Kill the processes."""
    for process in processes:
        os.kill(process.pid, signal.SIGKILL)
        os.waitpid(process.pid, 0)
        process.output.close()


def start_store() -> tuple[ChildProcess, int]:
    """Start a process that hosts a torch store, and return it with the store's port."""

    def serve_store(output: int) -> None:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(output, f"{store.port}\n".encode())
        signal.pause()

    process = fork_child(serve_store)
    return process, int(process.output.readline())


def join_world(rank: int, ranks: int, port: int, clusters: str) -> None:
    """Initialize torch.distributed with fsccl on CPUs, in a child process. ``clusters`` is the
    value of FSCCL_CLUSTERS: the numbers of ranks that share memory.
    """
    os.environ.update({"FSCCL_CLUSTERS": clusters, "FSCCL_DEVICE": "cpu"})
    os.environ["FSCCL_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
    dist.init_process_group("fsccl", store=store, rank=rank, world_size=ranks, timeout=TIMEOUT)


def start_ranks(
    ranks: int, port: int, clusters: str, run_rank: Callable[[int, int], object]
) -> list[ChildProcess]:
    """Fork ``ranks`` processes that join a world and call ``run_rank`` with their rank and a
    descriptor to write to.
    """

    def run_child(rank: int, output: int) -> None:
        join_world(rank, ranks, port, clusters)
        run_rank(rank, output)

    return [fork_child(partial(run_child, rank)) for rank in range(ranks)]
