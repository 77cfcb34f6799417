#!/usr/bin/env python3
"""Measure how soon every rank of fsccl detects a killed rank in the middle of an operation.

    tools/comm/kills.py --kills 5 --clusters 4 2,2 1,1,1,1 --json docs/results/fsccl-kills.json

Four ranks on this host repeat an operation until one of them receives SIGKILL at a random
moment, and every other has raised an error. Clusters are as in FSCCL_CLUSTERS: traffic between
them uses TCP over the loopback. The output has, for each operation and shape, the median and
longest time until the last rank raised, and the number of kills that not all ranks named
correctly.

Exits with 4 if a rank was named wrongly, or not within ``--limit`` seconds.
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
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import children
import torch
import torch.distributed as dist

import flagscale.comm.fsccl

RANKS = 4
SHAPES = ("4", "2,2", "1,1,1,1")
SLOW = 4
"""Exit code if a limit was exceeded."""
COUNT = 1 << 18


def _operations() -> dict[str, Callable[[], object]]:
    """Return the operations that ranks repeat. Tensors are of 1 MiB, or of a few bytes."""
    ranks, me = dist.get_world_size(), dist.get_rank()
    large, small = torch.ones(COUNT), torch.ones(4)
    whole, part = torch.ones(COUNT), torch.ones(COUNT // ranks)
    parts = list(torch.ones(ranks, COUNT // ranks).unbind())

    def around() -> None:
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, large, (me + 1) % ranks),
                dist.P2POp(dist.irecv, whole, (me - 1) % ranks),
            ]
        )
        for work in works:
            work.wait()

    return {
        "all_reduce": lambda: dist.all_reduce(large, op=dist.ReduceOp.MAX),
        "all_reduce-16B": lambda: dist.all_reduce(small, op=dist.ReduceOp.MAX),
        "reduce": lambda: dist.reduce(large, 0, op=dist.ReduceOp.MAX),
        "broadcast": lambda: dist.broadcast(large, 0),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, op=dist.ReduceOp.MAX),
        "all_to_all": lambda: dist.all_to_all_single(whole, large),
        "gather": lambda: dist.gather(part, parts if me == 0 else None, 0),
        "scatter": lambda: dist.scatter(part, parts if me == 0 else None, 0),
        "barrier": dist.barrier,
        "messages": around,
    }


OPERATIONS = (
    *("all_reduce", "all_reduce-16B", "reduce", "broadcast", "all_gather", "reduce_scatter"),
    *("all_to_all", "gather", "scatter", "barrier", "messages"),
)


@dataclass(frozen=True)
class Kill:
    """One kill: the errors of the other ranks, and the seconds until each was raised, by rank."""

    operation: str
    clusters: str
    killed: int
    seconds: dict[int, float]
    said: dict[int, str]

    @property
    def last(self) -> float:
        return max(self.seconds.values())

    @property
    def named(self) -> bool:
        """Return whether every other rank named the killed one."""
        words = f": rank {self.killed} ["
        return len(self.said) == RANKS - 1 and all(words in said for said in self.said.values())


def _run_rank(operation: str, _: int, out: int) -> None:
    """Run a rank: report its start, and its end with the error."""
    operate = _operations()[operation]
    error = ""
    try:
        operate()
        os.write(out, b"begun\n")
        while True:
            operate()
    except RuntimeError as caught:
        error = str(caught)
    os.write(out, (json.dumps({"at": time.time(), "said": error}) + "\n").encode())
    # Leaving would be awaited by nobody.
    os._exit(0)


def kill_one(operation: str, clusters: str, killed: int, after: float) -> Kill:
    """Kill one rank after ``after`` seconds. The process must not have called torch before."""
    keeper, port = children.start_store()
    started = [keeper]
    try:
        ranks = children.start_ranks(RANKS, port, clusters, partial(_run_rank, operation))
        started += ranks
        for rank in ranks:
            if rank.output.readline() != "begun\n":
                raise RuntimeError(f"{operation} of {clusters}: a rank did not begin")
        time.sleep(after)
        at = time.time()
        os.kill(ranks[killed].pid, signal.SIGKILL)
        others = [rank for rank in range(RANKS) if rank != killed]
        ends = {rank: json.loads(ranks[rank].output.readline()) for rank in others}
        seconds = {rank: round(end["at"] - at, 4) for rank, end in ends.items()}
        said = {rank: end["said"] for rank, end in ends.items()}
        return Kill(operation, clusters, killed, seconds, said)
    finally:
        children.kill_children(started)


def run_kills(arguments: argparse.Namespace) -> Iterator[Kill]:
    """Run all requested kills, one after the other."""
    chance = random.Random(arguments.seed)
    for clusters in arguments.clusters:
        for operation in arguments.operations:
            for _ in range(arguments.kills):
                yield kill_one(
                    operation, clusters, chance.randrange(RANKS), chance.uniform(0.0, 0.05)
                )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=3, help="of each operation and shape")
    parser.add_argument("--clusters", nargs="+", default=SHAPES)
    parser.add_argument("--operations", nargs="+", default=OPERATIONS, choices=OPERATIONS)
    parser.add_argument("--limit", type=float, default=0.5, help="seconds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)  # names of torch.distributed
    flagscale.comm.fsccl.load_extension()  # compiled before ranks are started
    done: list[Kill] = []
    for one in run_kills(arguments):
        done.append(one)
        if not one.named:
            print(f"{one.operation} of {one.clusters}, rank {one.killed} killed:", one.said)
        if len(done) % arguments.kills == 0:
            rows = done[-arguments.kills :]
            last = [row.last for row in rows]
            wrong = sum(not row.named for row in rows)
            print(
                f"{one.clusters:10} {one.operation:16} {statistics.median(last) * 1e3:8.1f} ms"
                f" {max(last) * 1e3:8.1f} ms {wrong} wrong",
                flush=True,
            )
    if arguments.json:
        told = [{**asdict(row), "named": row.named} for row in done]
        arguments.json.write_text(json.dumps(told, indent=1) + "\n")
    good = all(row.named and row.last <= arguments.limit for row in done)
    return 0 if good else SLOW


if __name__ == "__main__":
    sys.exit(main())
