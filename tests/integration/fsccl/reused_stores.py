"""Ranks that initialize the default group with a store that has keys of an earlier one.

usage: reused_stores.py agent           (torchrun's store, groups destroyed and created again)
       reused_stores.py file PATH       (a file that killed runs have left behind)

Forks the ranks. Exits with 0 if all operations have had the right results.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, TCPStore

import flagscale.comm.fsccl

RANKS = 3
INITIALIZATIONS = 20
TIMEOUT = timedelta(seconds=15)


def fork_ranks(ranks: Sequence[int], run_rank: Callable[[int], object]) -> list[int]:
    """Fork the ranks, and return their exit codes, as of :class:`subprocess.Popen`."""
    children = []
    for rank in ranks:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                torch.set_num_threads(1)
                run_rank(rank)
                code = 0
            except Exception:  # noqa: BLE001 - reported by the exit code
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def use_group(group: Any, members: Sequence[int]) -> None:
    """Reduce in a group if this rank is a member."""
    if dist.get_rank() in members:
        values = torch.full((1000,), float(dist.get_rank()))
        dist.all_reduce(values, group=group)
        assert values.tolist() == [float(sum(members))] * 1000


def initialize_again(port: int, rank: int) -> None:
    """Initialize and destroy the default group many times, with and without groups and operations
    in between. torch gives the groups the same names each time.
    """
    os.environ.update(
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(RANKS),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
    )
    for i in range(INITIALIZATIONS):
        dist.init_process_group("fsccl", timeout=TIMEOUT)
        groups = [(dist.new_group(members), members) for members in [[0, 2], [1, 2]][: i % 3]]
        if i % 4:
            use_group(dist.group.WORLD, range(RANKS))
            for group, members in groups:
                use_group(group, members)
        dist.destroy_process_group()


def initialize_with_file(path: str, rank: int) -> None:
    store = FileStore(path, RANKS)
    dist.init_process_group("fsccl", store=store, rank=rank, world_size=RANKS, timeout=TIMEOUT)


def die(_rank: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_while_meeting(path: str, rank: int) -> None:
    threading.Timer(0.2, die, [rank]).start()
    initialize_with_file(path, rank)


def die_without_operations(path: str, rank: int) -> None:
    initialize_with_file(path, rank)
    die(rank)


def die_after_operations(path: str, rank: int) -> None:
    initialize_with_file(path, rank)
    use_group(dist.group.WORLD, range(RANKS))
    die(rank)


def finish(path: str, rank: int) -> None:
    initialize_with_file(path, rank)
    group = dist.new_group([0, 2])
    use_group(dist.group.WORLD, range(RANKS))
    use_group(group, [0, 2])
    dist.destroy_process_group()


def run_with_agent_store() -> list[int]:
    """Return the exit codes of the ranks."""
    read_end, write_end = os.pipe()
    server = os.fork()  # the process that forks ranks must not have threads
    if server == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(write_end, f"{store.port}\n".encode())
        signal.pause()
    try:
        return fork_ranks(range(RANKS), partial(initialize_again, int(os.read(read_end, 100))))
    finally:
        os.kill(server, signal.SIGKILL)


def run_with_file(path: str) -> list[int]:
    """Return the exit codes of the ranks of the last run."""
    killed = [-signal.SIGKILL]
    assert fork_ranks([1], partial(die_while_meeting, path)) == killed
    assert fork_ranks(range(RANKS), partial(die_without_operations, path)) == killed * RANKS
    assert fork_ranks(range(RANKS), partial(die_after_operations, path)) == killed * RANKS
    assert Path(path).exists()
    return fork_ranks(range(RANKS), partial(finish, path))


def main() -> int:
    os.environ.update({"FSCCL_DEVICE": "cpu", "FSCCL_SOCKET_IFNAME": "lo"})
    flagscale.comm.fsccl.load_extension()
    codes = run_with_agent_store() if sys.argv[1] == "agent" else run_with_file(sys.argv[2])
    print(f"exit codes of the ranks: {codes}")
    return 0 if codes == [0] * RANKS else 1


if __name__ == "__main__":
    sys.exit(main())
