#!/usr/bin/env python3
"""Measure how fast every rank of fsccl detects that another rank was killed during an operation.

    tools/comm/kills.py --kills 5 --clusters 4 2,2 1,1,1,1 --json docs/results/fsccl-kills.json

Four ranks on this host repeat an operation until one of them receives SIGKILL at a random time, and
every other one has raised an error. The ranks are divided into clusters, which share memory, as by
FSCCL_CLUSTERS: ``2,2`` are two clusters of two ranks. Traffic between clusters uses TCP over the
loopback interface. The output has, for each operation and division, the median and longest time
until the last rank raised an error, and the number of kills in which an error did not name the
killed rank.

Exits with 4 if an error did not name the killed rank, or came later than ``--limit`` seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import children
import torch
import torch.distributed as dist

RANKS = 4
CLUSTERS = ("4", "2,2", "1,1,1,1")
EXIT_LIMIT_EXCEEDED = 4
"""Exit code if a limit was exceeded."""
LARGE_ELEMENTS = 1 << 18
PATIENCE_SECONDS = 2 * children.TIMEOUT.total_seconds()
"""Time after which a rank that has written nothing hangs. Operations time out before."""


def _operations() -> dict[str, Callable[[], object]]:
    """Return the operations that ranks repeat, on tensors of 1 MiB or 16 bytes."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    large, small = torch.ones(LARGE_ELEMENTS), torch.ones(4)
    whole_buffer, rank_buffer = torch.ones(LARGE_ELEMENTS), torch.ones(LARGE_ELEMENTS // world_size)
    rank_buffers = list(torch.ones(world_size, LARGE_ELEMENTS // world_size).unbind())

    def send_around_ring() -> None:
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, large, (rank + 1) % world_size),
                dist.P2POp(dist.irecv, whole_buffer, (rank - 1) % world_size),
            ]
        )
        for work in works:
            work.wait()

    return {
        "all_reduce": lambda: dist.all_reduce(large, op=dist.ReduceOp.MAX),
        "all_reduce-16B": lambda: dist.all_reduce(small, op=dist.ReduceOp.MAX),
        "reduce": lambda: dist.reduce(large, 0, op=dist.ReduceOp.MAX),
        "broadcast": lambda: dist.broadcast(large, 0),
        "all_gather": lambda: dist.all_gather_into_tensor(whole_buffer, rank_buffer),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(
            rank_buffer, whole_buffer, op=dist.ReduceOp.MAX
        ),
        "all_to_all": lambda: dist.all_to_all_single(whole_buffer, large),
        "gather": lambda: dist.gather(rank_buffer, rank_buffers if rank == 0 else None, 0),
        "scatter": lambda: dist.scatter(rank_buffer, rank_buffers if rank == 0 else None, 0),
        "barrier": dist.barrier,
        "messages": send_around_ring,
    }


OPERATIONS = (
    *("all_reduce", "all_reduce-16B", "reduce", "broadcast", "all_gather", "reduce_scatter"),
    *("all_to_all", "gather", "scatter", "barrier", "messages"),
)


@dataclass(frozen=True)
class Kill:
    """One kill, and the errors of the surviving ranks."""

    operation: str
    clusters: str
    killed_rank: int
    detection_seconds: dict[int, float]
    """Time from the kill until the error was raised, by surviving rank."""
    errors: dict[int, str]
    """Error message by surviving rank."""

    @property
    def last_detection_seconds(self) -> float:
        return max(self.detection_seconds.values())

    @property
    def is_named_by_all(self) -> bool:
        """True if the errors of all surviving ranks name the killed one."""
        name = f": rank {self.killed_rank} ["
        return len(self.errors) == RANKS - 1 and all(name in text for text in self.errors.values())

    def to_json(self) -> dict[str, Any]:
        return {
            "operation": self.operation,
            "clusters": self.clusters,
            "killed": self.killed_rank,
            "seconds": self.detection_seconds,
            "said": self.errors,
            "named": self.is_named_by_all,
        }


def _run_rank(operation: str, _rank: int, output: int) -> None:
    """Repeat an operation until it raises an error. Writes a line when the first one has finished,
    and the time and text of the error as a line of JSON.
    """
    run_operation = _operations()[operation]
    error_text = ""
    try:
        run_operation()
        os.write(output, b"begun\n")
        while True:
            run_operation()
    except RuntimeError as error:
        error_text = str(error)
    os.write(output, (json.dumps({"time": time.time(), "error": error_text}) + "\n").encode())
    # Without torch's cleanup, which would wait for the killed rank.
    os._exit(0)


def _read_report(rank: children.ChildProcess) -> dict[str, Any]:
    """Return the time and text of a rank's error, or a text that says that it has none."""
    try:
        line = rank.output.readline(PATIENCE_SECONDS)
    except TimeoutError:
        return {"time": time.time(), "error": f"no error within {PATIENCE_SECONDS:g} s"}
    return json.loads(line) if line else {"time": time.time(), "error": "ended without an error"}


def kill_one_rank(operation: str, clusters: str, killed_rank: int, delay_seconds: float) -> Kill:
    """Start the ranks, and kill one ``delay_seconds`` after all have finished a first operation.
    This process must not have called torch before.
    """
    store_process, port = children.start_store()
    processes = [store_process]
    try:
        ranks = children.start_ranks(RANKS, port, clusters, partial(_run_rank, operation))
        processes += ranks
        for rank in ranks:
            if rank.output.readline(PATIENCE_SECONDS) != "begun\n":
                raise RuntimeError(f"{operation} of {clusters}: a rank did not begin")
        time.sleep(delay_seconds)
        kill_time = time.time()
        os.kill(ranks[killed_rank].pid, signal.SIGKILL)
        survivors = [rank for rank in range(RANKS) if rank != killed_rank]
        reports = {rank: _read_report(ranks[rank]) for rank in survivors}
        seconds = {rank: round(report["time"] - kill_time, 4) for rank, report in reports.items()}
        errors = {rank: report["error"] for rank, report in reports.items()}
        return Kill(operation, clusters, killed_rank, seconds, errors)
    finally:
        children.kill_children(processes)


def run_kills(arguments: argparse.Namespace) -> Iterator[Kill]:
    """Run all requested kills, one after the other."""
    generator = random.Random(arguments.seed)
    for clusters in arguments.clusters:
        for operation in arguments.operations:
            for _ in range(arguments.kills):
                yield kill_one_rank(
                    operation, clusters, generator.randrange(RANKS), generator.uniform(0.0, 0.05)
                )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--kills", type=int, default=3, help="kills of each operation and division into clusters"
    )
    parser.add_argument("--clusters", nargs="+", default=CLUSTERS)
    parser.add_argument("--operations", nargs="+", default=OPERATIONS, choices=OPERATIONS)
    parser.add_argument(
        "--limit", type=float, default=0.5, help="longest accepted detection time in seconds"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)  # names of torch.distributed
    children.load_extension()
    kills: list[Kill] = []
    for kill in run_kills(arguments):
        kills.append(kill)
        if not kill.is_named_by_all:
            print(
                f"{kill.operation} of {kill.clusters}, rank {kill.killed_rank} killed:", kill.errors
            )
        if len(kills) % arguments.kills == 0:
            same_kills = kills[-arguments.kills :]
            seconds = [same_kill.last_detection_seconds for same_kill in same_kills]
            wrong = sum(not same_kill.is_named_by_all for same_kill in same_kills)
            print(
                f"{kill.clusters:10} {kill.operation:16} {statistics.median(seconds) * 1e3:8.1f} ms"
                f" {max(seconds) * 1e3:8.1f} ms {wrong} wrong",
                flush=True,
            )
    if arguments.json:
        records = [kill.to_json() for kill in kills]
        arguments.json.write_text(json.dumps(records, indent=1) + "\n")
    passed = all(
        kill.is_named_by_all and kill.last_detection_seconds <= arguments.limit for kill in kills
    )
    return 0 if passed else EXIT_LIMIT_EXCEEDED


if __name__ == "__main__":
    sys.exit(main())
