#!/usr/bin/env python3
"""Compare all_reduces of fsccl and gloo between two hosts with a slow link, and with the link's
capacity.

    tools/comm/slow_link.py --rate 1gbit --sizes 4m,16m,64m --output docs/results/slow_link.json

The hosts are network namespaces of this machine (tests/bed: needs root) with two ranks each. The
rate of the link between them is limited by a token bucket on both ends. In every round each backend
reduces the same tensor once. Then two plain TCP connections transfer as many bytes in both
directions at the same time. This measures the capacity of the link, because no algorithm needs
fewer bytes. Times are those of the slowest rank. Ratios are calculated for every round, so that
temporary load affects both times, and the medians are printed. Every result is checked.

Exits with 4 if, from 16 MiB on, fsccl reaches less than 95 % of the plain connections' rate, or
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
STORE_PORT, PLAIN_PORT = 29500, 29501  # on the first host
BACKENDS = ("fsccl", "gloo")
MIN_LINK_SHARE, MIN_SPEEDUP_OVER_GLOO, MIN_CHECKED_BYTES = 0.95, 1.4, 16 << 20


@dataclass(frozen=True)
class LinkPlan:
    """Plan of every rank."""

    address: str
    """Address of the first host."""
    sizes: tuple[int, ...]
    """Sizes of the tensor in bytes."""
    rounds: int


@dataclass(frozen=True)
class LinkRow:
    """Medians over the rounds at one size: times, and ratios of times in the same round."""

    bytes: int
    fsccl_ms: float
    gloo_ms: float
    link_ms: float
    """Time of the plain connections."""
    link_share: float
    """``link_ms`` divided by ``fsccl_ms``."""
    over_gloo: float
    """``gloo_ms`` divided by ``fsccl_ms``."""

    @property
    def is_too_slow(self) -> bool:
        below_limit = self.link_share < MIN_LINK_SHARE or self.over_gloo < MIN_SPEEDUP_OVER_GLOO
        return self.bytes >= MIN_CHECKED_BYTES and below_limit


class PlainConnections:
    """Two TCP connections between the hosts' first ranks, one for each direction. On these ranks a
    call sends and receives ``size`` bytes; on the others it does nothing.
    """

    def __init__(self, rank: int, address: str) -> None:
        import torch.distributed as dist

        self.sockets: list[socket.socket] = []
        server = socket.create_server((address, PLAIN_PORT)) if rank == 0 else None
        dist.barrier()
        if server is not None:
            self.sockets = [server.accept()[0] for _ in range(2)]
            # Connections may be accepted in any order, so the client sends their names.
            self.sockets.sort(key=lambda s: s.recv(1))
        elif rank == RANKS // 2:
            for name in (b"a", b"b"):
                self.sockets.append(socket.create_connection((address, PLAIN_PORT)))
                self.sockets[-1].sendall(name)
            self.sockets.reverse()

    def __call__(self, size: int) -> None:
        if not self.sockets:
            return
        send_socket, receive_socket = self.sockets
        sender = threading.Thread(target=send_socket.sendall, args=(bytes(size),))
        sender.start()
        buffer = memoryview(bytearray(1 << 20))
        while size > 0:
            size -= receive_socket.recv_into(buffer[: min(size, 1 << 20)])
        sender.join()


def measure_as_rank(rank: int, plan: LinkPlan) -> list[LinkRow]:
    """Run all rounds as one rank, and return the rows of all ranks."""
    import torch
    import torch.distributed as dist

    import flagscale.comm.fsccl  # noqa: F401 - registers the backend

    torch.set_num_threads(1)
    dist.init_process_group(
        "fsccl",
        init_method=f"tcp://{plan.address}:{STORE_PORT}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(minutes=2),
    )
    groups = {name: dist.new_group(backend=name) for name in BACKENDS}
    plain_connections = PlainConnections(rank, plan.address)
    rows = []
    for size in plan.sizes:
        tensor = torch.empty(size // 4)
        calls: dict[str, Callable[[], object]] = {
            name: partial(dist.all_reduce, tensor, group=group) for name, group in groups.items()
        }
        calls["link"] = partial(plain_connections, size)
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(1 + plan.rounds):
            for name, call in calls.items():
                tensor.fill_(rank + 1)
                dist.barrier()
                begin = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - begin)
                if name in groups and not bool((tensor == sum(range(1, RANKS + 1))).all()):
                    raise RuntimeError(f"{name}: wrong sums at {size} bytes")
        slowest_times = torch.tensor([times[name][1:] for name in calls])  # the first one warms up
        dist.all_reduce(slowest_times, op=dist.ReduceOp.MAX)
        fsccl, gloo, link = slowest_times
        medians = torch.stack([*(1e3 * slowest_times), link / fsccl, gloo / fsccl]).median(1).values
        rows.append(LinkRow(size, *medians.tolist()))
    dist.barrier()
    dist.destroy_process_group()
    return rows


def run_on_bed(rate: str, sizes: tuple[int, ...], rounds: int) -> list[LinkRow]:
    """Start the ranks on two hosts of the test bed, and return the first rank's rows."""
    from bed.lab import Bed  # type: ignore[import-not-found]

    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        bed = stack.enter_context(Bed.open(Path(directory) / "bed", 2))
        bed[1].limit_rate(rate, burst="128kb")
        plan = json.dumps(asdict(LinkPlan(bed[0].address, sizes, rounds)))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
        ranks = []
        for rank in range(RANKS):
            enter_namespace = ["nsenter", "-t", str(bed[rank // (RANKS // 2)].pid), "-a", "--"]
            argv = [*enter_namespace, sys.executable, __file__, "--rank", str(rank), "--plan", plan]
            process = subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, text=True)
            stack.callback(process.kill)
            ranks.append(process)
        outputs = [process.communicate()[0] for process in ranks]
        if any(process.returncode for process in ranks):
            raise SystemExit("a rank failed: see above")
    return [LinkRow(**row) for row in json.loads(outputs[0])]


def make_record(rows: Sequence[LinkRow], options: argparse.Namespace) -> dict[str, Any]:
    from flagscale.bench.machine import describe_machine

    return {
        **describe_machine("flagscale", "torch"),
        "method": f"all_reduce of float32, 2+2 ranks, token bucket of {options.rate} on both ends "
        f"of the cable; slowest rank, medians of {options.rounds} rounds; link: the same bytes by "
        "a bare TCP connection each way at once; ratios are taken round by round",
        "bars": {
            "link_share": MIN_LINK_SHARE,
            "over_gloo": MIN_SPEEDUP_OVER_GLOO,
            "from_bytes": MIN_CHECKED_BYTES,
        },
        "rows": [{name: round(value, 3) for name, value in asdict(row).items()} for row in rows],
    }


def _parse_sizes(text: str) -> tuple[int, ...]:
    from flagscale.bench.collectives.sizes import parse_size

    return tuple(parse_size(word) for word in text.split(","))


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tools/comm/slow_link.py")
    parser.add_argument("--rate", default="1gbit", help="rate of the link, in tc's notation")
    parser.add_argument("--sizes", type=_parse_sizes, default="1M,4M,16M,64M")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, help="a JSON file for the result")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--plan", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options(argv)
    if options.rank is not None:
        plan = LinkPlan(**json.loads(options.plan))
        print(json.dumps([asdict(row) for row in measure_as_rank(options.rank, plan)]))
        return 0
    rows = run_on_bed(options.rate, options.sizes, options.rounds)
    print(
        f"{'bytes':>10} {'fsccl ms':>9} {'gloo ms':>9} {'link ms':>9} {'of link':>8} {'x gloo':>7}"
    )
    for row in rows:
        times = f"{row.fsccl_ms:>9.1f} {row.gloo_ms:>9.1f} {row.link_ms:>9.1f}"
        print(f"{row.bytes:>10} {times} {row.link_share:>7.0%} {row.over_gloo:>7.2f}")
    if options.output:
        options.output.write_text(json.dumps(make_record(rows, options), indent=2) + "\n")
    return 4 if any(row.is_too_slow for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
