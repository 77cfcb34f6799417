"""Forked processes for the tools in this directory, as ranks of fsccl's world on this host.

The process that forks must not have called torch before, because torch's threads would be
missing in the child. Used by features.py, kills.py and soak.py.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

import flagscale.comm.fsccl
from flagscale.comm.fsccl.build import COMPILED_ON_FIRST_USE, describe_origin
from flagscale.hosts.kernel import signal_on_parent_death

TIMEOUT = timedelta(seconds=30)


class LineReader:
    """Reader of the lines that a process writes to a pipe."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._received = b""

    def readline(self, limit: float | None = None) -> str:
        """Return the next line, or an empty string at the end of the output.

        Raises:
            TimeoutError: no line within ``limit`` seconds.
        """
        end_time = None if limit is None else time.monotonic() + limit
        while b"\n" not in self._received:
            seconds = None if end_time is None else max(0.0, end_time - time.monotonic())
            if not select.select([self._descriptor], [], [], seconds)[0]:
                raise TimeoutError(f"no line within {limit:g} s")
            data = os.read(self._descriptor, 1 << 16)
            if not data:
                return ""
            self._received += data
        line, self._received = self._received.split(b"\n", 1)
        return line.decode() + "\n"

    def close(self) -> None:
        os.close(self._descriptor)


@dataclass(frozen=True)
class ChildProcess:
    """A forked process, and the lines that it writes."""

    pid: int
    output: LineReader


def load_extension() -> None:
    """Load fsccl before processes are forked. Prints a line if it has to be compiled, because that
    takes minutes.
    """
    if describe_origin() == COMPILED_ON_FIRST_USE:
        print("compiling fsccl ...", file=sys.stderr, flush=True)
    flagscale.comm.fsccl.load_extension()


def fork_child(run_child: Callable[[int], object]) -> ChildProcess:
    """Fork a process that calls ``run_child`` with a file descriptor for its output, and exits.

    The child is killed when this process ends. Otherwise it would wait forever for its peers, and
    so would everything that reads its standard output, which is also that of this process.
    """
    read_end, write_end = os.pipe()
    end_with_parent = signal_on_parent_death(os.getpid(), signal.SIGKILL)
    pid = os.fork()
    if pid == 0:
        end_with_parent()
        os.close(read_end)
        try:
            run_child(write_end)
        except Exception:  # noqa: BLE001 - nobody else reports it
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(write_end)
    return ChildProcess(pid, LineReader(read_end))


def kill_children(processes: Sequence[ChildProcess]) -> None:
    """Kill the processes."""
    for process in processes:
        os.kill(process.pid, signal.SIGKILL)
        os.waitpid(process.pid, 0)
        process.output.close()


def start_store() -> tuple[ChildProcess, int]:
    """Start a process that hosts a torch store, and return it with the store's port. Ranks may be
    started with the same store again.
    """
    # The store looks up the host name of every client. A name server may not answer.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

    def serve_store(output: int) -> None:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(output, f"{store.port}\n".encode())
        signal.pause()

    process = fork_child(serve_store)
    return process, int(process.output.readline())


def connect_to_store(port: int) -> TCPStore:
    """Return a client of the store, in a child process."""
    return TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)


def join_world(rank: int, ranks: int, store: TCPStore, clusters: str) -> None:
    """Initialize torch.distributed with fsccl on CPUs, in a child process. ``clusters`` is the
    value of FSCCL_CLUSTERS: the numbers of ranks that share memory.
    """
    os.environ.update({"FSCCL_CLUSTERS": clusters, "FSCCL_DEVICE": "cpu"})
    os.environ["FSCCL_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("fsccl", store=store, rank=rank, world_size=ranks, timeout=TIMEOUT)


def start_ranks(
    ranks: int, port: int, clusters: str, run_rank: Callable[[int, int], object]
) -> list[ChildProcess]:
    """Fork ``ranks`` processes that join a world and call ``run_rank`` with their rank and a
    descriptor to write to.
    """

    def run_child(rank: int, output: int) -> None:
        join_world(rank, ranks, connect_to_store(port), clusters)
        run_rank(rank, output)

    return [fork_child(partial(run_child, rank)) for rank in range(ranks)]
