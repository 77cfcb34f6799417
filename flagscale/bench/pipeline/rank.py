"""What the ranks of a measurement do."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, ReduceScatterOptions

from flagscale.bench import rendezvous
from flagscale.bench.collectives.curves import Curve, Point
from flagscale.bench.collectives.devices import BenchDevice, choose
from flagscale.bench.collectives.plots import write_plot
from flagscale.bench.collectives.sizes import fit
from flagscale.bench.machine import facts
from flagscale.bench.pipeline.plan import PipelinePlan, Row, Schedule, heading, line
from flagscale.bench.world import BenchWorld
from flagscale.comm import registry
from flagscale.errors import JobError

_Options = TypeVar("_Options", AllreduceOptions, AllgatherOptions, ReduceScatterOptions)

_SECONDS = 600.0
_VALUES = 7
"""Elements are below it, so that sums are exact in every type."""


class Call:
    """An operation on this rank's buffers: how it is run, and what must come out."""

    def __init__(self, operation: str, group: dist.ProcessGroup, whole: torch.Tensor) -> None:
        self._group, self._rank, self._ranks = group, group.rank(), group.size()
        self._whole = whole  # what an all-gather collects, the input of the others
        self._part = whole.view(self._ranks, -1)[self._rank]
        self.run: Callable[[], None] = getattr(self, f"_{operation}")
        self._expected: Callable[[], bool] = getattr(self, f"_{operation}_is_right")
        self._shift = 0

    def check(self, number: int) -> bool:
        """Run once on fresh data; whether the whole result is right."""
        self._shift = number
        self._whole.copy_(self._values(self._rank))
        self.run()
        return self._expected()

    def clear(self) -> None:
        """Data that stay as they are however often they are summed."""
        self._whole.zero_()

    def _values(self, rank: int) -> torch.Tensor:
        ramp = torch.arange(self._whole.numel(), device=self._whole.device)
        return ((ramp + rank + self._shift) % _VALUES).to(self._whole.dtype)

    def _sum(self) -> torch.Tensor:
        total = self._values(0)
        for rank in range(1, self._ranks):
            total += self._values(rank)
        return total

    def _all_reduce(self) -> None:
        self._group.allreduce([self._whole], _synchronous(AllreduceOptions())).wait()

    def _all_reduce_is_right(self) -> bool:
        return torch.equal(self._whole, self._sum())

    def _all_gather(self) -> None:
        options = _synchronous(AllgatherOptions())
        self._group._allgather_base(self._whole, self._part, options).wait()

    def _all_gather_is_right(self) -> bool:
        wanted = torch.empty_like(self._whole).view(self._ranks, -1)
        for rank in range(self._ranks):
            wanted[rank] = self._values(rank).view(self._ranks, -1)[rank]
        return torch.equal(self._whole, wanted.view(-1))

    def _reduce_scatter(self) -> None:
        options = _synchronous(ReduceScatterOptions())
        self._group._reduce_scatter_base(self._part, self._whole, options).wait()

    def _reduce_scatter_is_right(self) -> bool:
        return torch.equal(self._part, self._sum().view(self._ranks, -1)[self._rank])


def _synchronous(options: _Options) -> _Options:
    options.asyncOp = False
    return options


def run_rank(plan: PipelinePlan, world: BenchWorld) -> int:
    """Measure as one of the ranks; rank 0 prints and keeps the result. The exit code."""
    keep, plot = (plan.json, plan.plot) if world.rank == 0 else (None, None)
    store = rendezvous.rendezvous(world, _SECONDS)
    device = choose(plan.device, world.local_rank)
    backend = registry.usable("fsccl", device.kind)
    backend.init_options(device.torch_device)
    with backend.creating():
        dist.init_process_group(
            "fsccl",
            store=store,
            rank=world.rank,
            world_size=world.size,
            timeout=timedelta(seconds=_SECONDS),
        )
    dist.barrier()
    rendezvous.clean_up(world)
    about = facts("flagscale", "torch") if keep is not None else {}
    rows = [row for s in plan.schedules for row in _measure_all(s, plan, device, world)]
    if keep is not None:
        about |= {"ranks": world.size, "device": device.kind, "type": plan.type.name}
        about |= {name: getattr(plan, name) for name in ("check_iters", "warmup_iters", "iters")}
        kept = [asdict(row) | {"busbw": round(row.busbw(world.size), 3)} for row in rows]
        keep.write_text(json.dumps({**about, "results": kept}, indent=1) + "\n")
    if plot is not None:
        write_plot(plot, _curves(rows, world.size))
    dist.destroy_process_group()
    return 0


def _measure_all(
    s: Schedule, plan: PipelinePlan, device: BenchDevice, world: BenchWorld
) -> list[Row]:
    from flagscale.comm.fsccl import load_extension

    options = load_extension().Options(pipeline_k=s.k, pipeline_nelem=s.nelem)
    group = dist.new_group(backend="fsccl", pg_options=options)
    speaks = world.rank == 0
    if speaks:
        print("\n".join(heading(s, plan, world.size)), flush=True)
    rows = []
    for asked in plan.sizes:
        size = fit(asked, plan.type.bytes, world.size)
        elements = size // plan.type.bytes
        dtype = getattr(torch, plan.type.torch)
        whole = torch.empty(elements, dtype=dtype, device=device.torch_device)
        times = _measure(Call(s.operation, group, whole), plan, device, group)
        row = Row(s.operation, s.k, s.nelem, size, sum(times) / len(times), min(times))
        rows.append(row)
        if speaks:
            print(line(row, plan.unit), flush=True)
    if speaks:
        print(flush=True)
    dist.destroy_process_group(group)
    return rows


def _measure(
    call: Call, plan: PipelinePlan, device: BenchDevice, group: dist.ProcessGroup
) -> list[float]:
    """Microseconds of the slowest rank in every iteration.

    Raises:
        JobError: a result is wrong on some rank.
    """
    checks = [call.check(number) for number in range(plan.check_iters)]  # all: others take part
    wrong = torch.tensor([int(not all(checks))], device=device.torch_device)
    dist.all_reduce(wrong)
    if wrong.item():
        raise JobError(f"wrong results on {int(wrong.item())} of {group.size()} ranks")
    call.clear()
    times = []
    for number in range(plan.warmup_iters + plan.iters):
        device.synchronize()
        dist.barrier(group=group)
        begin = time.perf_counter()
        call.run()
        device.synchronize()
        if number >= plan.warmup_iters:
            times.append((time.perf_counter() - begin) * 1e6)
    slowest = torch.tensor(times, dtype=torch.float64, device=device.torch_device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return [float(t) for t in slowest.tolist()]


def _curves(rows: list[Row], ranks: int) -> list[Curve]:
    found: dict[str, list[Point]] = {}
    for row in rows:
        label = Schedule(row.operation, row.k, row.nelem_per_send).label
        found.setdefault(label, []).append(Point(row.size, row.avg_us, row.busbw(ranks)))
    return [Curve(label, tuple(points)) for label, points in found.items()]
