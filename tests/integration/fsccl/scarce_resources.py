"""Two ranks of which rank 1 lacks a resource in its first collective.

usage: scarce_resources.py {descriptors,threads}

Prints one line of JSON: the errors of both ranks, and the seconds until they came.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from forked_store import start_store
from torch._C._distributed_c10d import TCPStore

import flagscale.comm.fsccl

TIMEOUT = timedelta(seconds=15)
"""Longer than any delay that is not a timeout."""
LIMIT_SECONDS = 20
COUNT = 1 << 20
"""Elements of the collective."""


def limit(name: str) -> None:
    """Leave this process nothing of a resource."""
    if name == "descriptors":
        used = 1 + max(int(p.name) for p in Path("/proc/self/fd").iterdir())
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (used, hard))
        with contextlib.suppress(OSError):
            while True:
                os.open(os.devnull, os.O_RDONLY)
        return
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    used = pages * resource.getpagesize()
    # a thread needs 8 MiB for its stack
    resource.setrlimit(resource.RLIMIT_AS, (used + (6 << 20), resource.RLIM_INFINITY))


def run_rank(rank: int, port: int, lacking: str, output: int) -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
    dist.init_process_group("fsccl", store=store, rank=rank, world_size=2, timeout=TIMEOUT)
    group = dist.new_group([0, 1])
    values = torch.ones(COUNT)
    if rank == 1:
        limit(lacking)
    start = time.monotonic()
    try:
        # an asynchronous one runs on a thread
        work = dist.all_reduce(values, group=group, async_op=lacking == "threads")
        if work is not None:
            work.wait()
        error = ""
    except Exception as e:  # noqa: BLE001 - the test decides what it means
        error = str(e)
    row = [rank, error, time.monotonic() - start]
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    os.write(output, f"{json.dumps(row)}\n".encode())
    # neither rank ends before the other has its error
    store.add("reported", 1)
    while store.add("reported", 0) < 2 and time.monotonic() - start < LIMIT_SECONDS:
        time.sleep(0.01)


def main() -> None:
    (lacking,) = sys.argv[1:]
    os.environ.update({"FSCCL_DEVICE": "cpu", "FSCCL_SOCKET_IFNAME": "lo"})
    flagscale.comm.fsccl.load_extension()
    server, port = start_store()
    read_end, write_end = os.pipe()
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                run_rank(rank, port, lacking, write_end)
                code = 0
            except BaseException:  # noqa: BLE001 - os._exit() prints nothing
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    os.kill(server, signal.SIGKILL)
    os.close(write_end)
    with os.fdopen(read_end) as output:
        rows = sorted(json.loads(line) for line in output)
    print(json.dumps({"errors": [row[1] for row in rows], "seconds": max(row[2] for row in rows)}))


if __name__ == "__main__":
    main()
