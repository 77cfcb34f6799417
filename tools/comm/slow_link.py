#!/usr/bin/env python3
"""Compare all_reduces of fsccl and gloo over two hosts with a slow link, and with the link
itself.

    tools/comm/slow_link.py --rate 1gbit --sizes 4m,16m,64m --output docs/results/slow_link.json

The hosts are namespaces of this machine (tests/bed: needs root) with a token bucket on both ends
of the cable between them, and run two ranks each. In every round each backend reduces the same
tensor once, and two bare TCP connections carry its bytes in both directions at the same time:
this is the capacity of the link, and no algorithm needs fewer bytes. Times are those of the
slowest rank. Ratios are taken in every round, so that temporary load affects both sides, and the
medians are printed. Every result is checked.

Exits with 4 if, from 16 MiB on, fsccl reaches less than 95 % of the bare connections' rate, or
is less than 1.4 times as fast as gloo.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT / "tests"))

RANKS = 4  # two on each host
STORE, BARE = 29500, 29501  # ports on the first host
BACKENDS = ("fsccl", "gloo")
LINK_SHARE, OVER_GLOO, FROM_BYTES = 0.95, 1.4, 16 << 20


@dataclass(frozen=True)
class LinkPlan:
    """Plan of every rank. ``address`` is the first host's."""

    address: str
    sizes: tuple[int, ...]
    rounds: int


@dataclass(frozen=True)
class LinkRow:
    """Medians over rounds at one size: milliseconds, and ratios of times of one round."""

    bytes: int
    fsccl_ms: float
    gloo_ms: float
    link_ms: float
    link_share: float
    over_gloo: float

    @property
    def misses(self) -> bool:
        late = self.link_share < LINK_SHARE or self.over_gloo < OVER_GLOO
        return self.bytes >= FROM_BYTES and late


class BareConnections:
    """A TCP connection in each direction between the hosts' first ranks."""

    def __init__(self, rank: int, address: str) -> None:
        import torch.distributed as dist

        self.both: list[socket.socket] = []
        server = socket.create_server((address, BARE)) if rank == 0 else None
        dist.barrier()
        if server is not None:
            self.both = [server.accept()[0] for _ in range(2)]
            # Which came first is only known to the other side.
            self.both.sort(key=lambda s: s.recv(1))
        elif rank == RANKS // 2:
            for name in (b"a", b"b"):
                self.both.append(socket.create_connection((address, BARE)))
                self.both[-1].sendall(name)
            self.both.reverse()

    def __call__(self, size: int) -> None:
        if not self.both:
            return
        out, into = self.both
        sender = threading.Thread(target=out.sendall, args=(bytes(size),))
        sender.start()
        room = memoryview(bytearray(1 << 20))
        while size > 0:
            size -= into.recv_into(room[: min(size, 1 << 20)])
        sender.join()


def measure_as_rank(rank: int, plan: LinkPlan) -> list[LinkRow]:
    """Run a rank."""
    import torch
    import torch.distributed as dist

    import flagscale.comm.fsccl  # noqa: F401 - registers the backend

    torch.set_num_threads(1)
    dist.init_process_group(
        "fsccl",
        init_method=f"tcp://{plan.address}:{STORE}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(minutes=2),
    )
    groups = {name: dist.new_group(backend=name) for name in BACKENDS}
    bare = BareConnections(rank, plan.address)
    rows = []
    for size in plan.sizes:
        x = torch.empty(size // 4)
        calls: dict[str, Callable[[], object]] = {
            name: partial(dist.all_reduce, x, group=group) for name, group in groups.items()
        }
        calls["link"] = partial(bare, size)
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(1 + plan.rounds):
            for name, call in calls.items():
                x.fill_(rank + 1)
                dist.barrier()
                begin = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - begin)
                if name in groups and not bool((x == sum(range(1, RANKS + 1))).all()):
                    raise RuntimeError(f"{name}: wrong sums at {size} bytes")
        slowest = torch.tensor([times[name][1:] for name in calls])  # the first one warms up
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        fsccl, gloo, link = slowest
        medians = torch.stack([*(1e3 * slowest), link / fsccl, gloo / fsccl]).median(1).values
        rows.append(LinkRow(size, *medians.tolist()))
    dist.barrier()
    dist.destroy_process_group()
    return rows


def on_bed(rate: str, sizes: tuple[int, ...], rounds: int) -> list[LinkRow]:
    """Start the ranks on two hosts, and read the first one's result."""
    from bed.lab import Bed  # type: ignore[import-not-found]

    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        bed = stack.enter_context(Bed.open(Path(directory) / "bed", 2))
        bed[1].shape(rate, burst="128kb")
        plan = json.dumps(asdict(LinkPlan(bed[0].address, sizes, rounds)))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
        ranks = []
        for rank in range(RANKS):
            enter = ["nsenter", "-t", str(bed[rank // (RANKS // 2)].pid), "-a", "--"]
            argv = [*enter, sys.executable, __file__, "--rank", str(rank), "--plan", plan]
            process = subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, text=True)
            stack.callback(process.kill)
            ranks.append(process)
        answers = [process.communicate()[0] for process in ranks]
        if any(process.returncode for process in ranks):
            raise SystemExit("a rank failed: see above")
    return [LinkRow(**row) for row in json.loads(answers[0])]


def report(rows: Sequence[LinkRow], options: argparse.Namespace) -> dict[str, Any]:
    from flagscale.bench.machine import describe_machine

    return {
        **describe_machine("flagscale", "torch"),
        "method": f"all_reduce of float32, 2+2 ranks, token bucket of {options.rate} on both ends "
        f"of the cable; slowest rank, medians of {options.rounds} rounds; link: the same bytes by "
        "a bare TCP connection each way at once; ratios are taken round by round",
        "bars": {"link_share": LINK_SHARE, "over_gloo": OVER_GLOO, "from_bytes": FROM_BYTES},
        "rows": [{name: round(value, 3) for name, value in asdict(row).items()} for row in rows],
    }


def _sizes(text: str) -> tuple[int, ...]:
    from flagscale.bench.collectives.sizes import parse_size

    return tuple(parse_size(word) for word in text.split(","))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tools/comm/slow_link.py")
    parser.add_argument("--rate", default="1gbit", help="of the link, as tc spells it")
    parser.add_argument("--sizes", type=_sizes, default="1M,4M,16M,64M")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, help="a JSON file for the result")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--plan", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    if options.rank is not None:
        plan = LinkPlan(**json.loads(options.plan))
        print(json.dumps([asdict(row) for row in measure_as_rank(options.rank, plan)]))
        return 0
    rows = on_bed(options.rate, options.sizes, options.rounds)
    print(
        f"{'bytes':>10} {'fsccl ms':>9} {'gloo ms':>9} {'link ms':>9} {'of link':>8} {'x gloo':>7}"
    )
    for row in rows:
        times = f"{row.fsccl_ms:>9.1f} {row.gloo_ms:>9.1f} {row.link_ms:>9.1f}"
        print(f"{row.bytes:>10} {times} {row.link_share:>7.0%} {row.over_gloo:>7.2f}")
    if options.output:
        options.output.write_text(json.dumps(report(rows, options), indent=2) + "\n")
    return 4 if any(row.misses for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
