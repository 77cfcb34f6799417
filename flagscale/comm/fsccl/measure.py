"""Measures collectives of several backends side by side in one run, on this machine.

``python -m flagscale.comm.fsccl.measure --ranks 4 --against gloo`` starts the ranks, takes turns
between the backends (so that both meet the same neighbours on the machine), checks every result,
and prints for each size the median and the best of the slowest rank's times, in microseconds.
"""

from __future__ import annotations

import argparse
import datetime
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, ReduceScatterOptions
from torch.multiprocessing.spawn import spawn

import flagscale.comm.fsccl  # noqa: F401 - registers the backend
from flagscale.errors import ConfigError

_SIZES = (1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26)
_BUDGET_SECONDS = 1.5  # for one backend and size
_WARM_UPS = 3
_TURNS = 5


@dataclass(frozen=True)
class Plan:
    """What every rank measures."""

    ranks: int
    port: int
    op: str
    backends: tuple[str, ...]
    sizes: tuple[int, ...]


Call = Callable[[dist.ProcessGroup], None]


def _all_reduce(size: int, ranks: int) -> tuple[Call, Callable[[], bool]]:
    x = torch.ones(size // 4)

    def call(group: dist.ProcessGroup) -> None:
        dist.all_reduce(x, group=group)

    def check() -> bool:
        return bool((x == x[0]).all())

    return call, check


def _all_gather(size: int, ranks: int) -> tuple[Call, Callable[[], bool]]:
    out = torch.empty(size // 4 // ranks * ranks)
    mine = torch.full((out.numel() // ranks,), float(dist.get_rank()))

    def call(group: dist.ProcessGroup) -> None:
        options = AllgatherOptions()
        options.asyncOp = False
        group._allgather_base(out, mine, options).wait()

    def check() -> bool:
        expected = torch.arange(ranks, dtype=out.dtype).unsqueeze(1)
        return bool((out.view(ranks, -1) == expected).all())

    return call, check


def _reduce_scatter(size: int, ranks: int) -> tuple[Call, Callable[[], bool]]:
    given = torch.ones(size // 4 // ranks * ranks)
    out = torch.empty(given.numel() // ranks)

    def call(group: dist.ProcessGroup) -> None:
        options = ReduceScatterOptions()
        options.asyncOp = False
        group._reduce_scatter_base(out, given, options).wait()

    def check() -> bool:
        return bool((out == ranks).all())

    return call, check


def _broadcast(size: int, ranks: int) -> tuple[Call, Callable[[], bool]]:
    x = torch.full((size // 4,), float(dist.get_rank()))

    def call(group: dist.ProcessGroup) -> None:
        dist.broadcast(x, 0, group=group)

    def check() -> bool:
        return bool((x == 0).all())

    return call, check


_OPS = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
}


def _slowest(times: Sequence[float]) -> torch.Tensor:
    """Of every iteration the time of the slowest rank, in microseconds."""
    t = torch.tensor(times, dtype=torch.float64) * 1e6
    dist.all_reduce(t, op=dist.ReduceOp.MAX)
    return t


def _measure(
    plan: Plan, groups: dict[str, dist.ProcessGroup], size: int
) -> dict[str, torch.Tensor]:
    times: dict[str, list[float]] = {name: [] for name in groups}
    rounds = {}
    for name, group in groups.items():
        call, check = _OPS[plan.op](size, plan.ranks)
        for _ in range(_WARM_UPS):
            start = time.perf_counter()
            call(group)
        if not check():
            raise RuntimeError(f"{name}: wrong result of {plan.op} at {size} bytes")
        spent = _slowest([time.perf_counter() - start])[0].item() / 1e6
        rounds[name] = max(5, min(500, int(_BUDGET_SECONDS / max(spent, 1e-6))))
    call, _ = _OPS[plan.op](size, plan.ranks)
    for _ in range(_TURNS):
        for name, group in groups.items():
            for _ in range(-(-rounds[name] // _TURNS)):
                dist.barrier()
                start = time.perf_counter()
                call(group)
                times[name].append(time.perf_counter() - start)
    return {name: _slowest(t) for name, t in times.items()}


def _line(size: int, found: dict[str, torch.Tensor]) -> str:
    cells = [f"{size:>11}"]
    for t in found.values():
        cells.append(f"{t.median().item():>12.1f} {t.min().item():>12.1f}")
    first, *others = (t.median().item() for t in found.values())
    cells.extend(f"{other / first:>9.2f}" for other in others)
    return " ".join(cells)


def _rank(rank: int, plan: Plan) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "fsccl",
        init_method=f"tcp://127.0.0.1:{plan.port}",
        rank=rank,
        world_size=plan.ranks,
        timeout=datetime.timedelta(seconds=120),
    )
    groups = {name: dist.new_group(backend=name) for name in plan.backends}
    if rank == 0:
        names = " ".join(f"{name + ' median':>12} {'best':>12}" for name in groups)
        ratios = " ".join(f"{'x ' + name:>9}" for name in plan.backends[1:])
        print(f"# {plan.op}, {plan.ranks} ranks, float32, us, torch {torch.__version__}")
        print(f"{'bytes':>11} {names} {ratios}", flush=True)
    for size in plan.sizes:
        found = _measure(plan, groups, size)
        if rank == 0:
            print(_line(size, found), flush=True)
    dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def parse_sizes(text: str) -> tuple[int, ...]:
    units = {"k": 10, "m": 20, "g": 30}
    out = []
    for one in text.lower().split(","):
        shift = units.get(one[-1:], 0)
        digits = one[:-1] if shift else one
        if not digits.isdigit():
            raise ConfigError(f"--sizes {text}: expected numbers such as 1k,64k,1m; found {one!r}")
        out.append(int(digits) << shift)
    return tuple(out)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m flagscale.comm.fsccl.measure")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--op", choices=sorted(_OPS), default="all_reduce")
    parser.add_argument("--against", default="gloo", help="another backend of torch, or several")
    parser.add_argument("--sizes", type=parse_sizes, default=_SIZES, help="such as 1k,64k,1m")
    given = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    backends = ("fsccl", *given.against.split(","))
    plan = Plan(given.ranks, _free_port(), given.op, backends, given.sizes)
    spawn(_rank, (plan,), nprocs=plan.ranks)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
