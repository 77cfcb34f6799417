"""What the ranks of a measurement do."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from datetime import timedelta

import torch
import torch.distributed as dist

from flagscale.accelerators.device import Device
from flagscale.bench import rendezvous
from flagscale.bench.collectives import collective_calls
from flagscale.bench.collectives.checks import Golden
from flagscale.bench.collectives.curves import Curve, Point, write_plot
from flagscale.bench.collectives.devices import RankGroup, choose
from flagscale.bench.collectives.operations import OPERATIONS, DataType
from flagscale.bench.collectives.sizes import fit
from flagscale.bench.collectives.spec import BenchSpec, Case
from flagscale.bench.machine import facts
from flagscale.bench.pipeline.cli import PipelinePlan, Row, Schedule, heading, line
from flagscale.bench.world import BenchWorld
from flagscale.comm import registry
from flagscale.errors import JobError

_SECONDS = 600.0


class Call:
    """An operation in one buffer of this rank: how it is run, and what must come out."""

    def __init__(
        self, name: str, type_: DataType, size: int, group: RankGroup, device: Device
    ) -> None:
        operation = OPERATIONS[name]
        reduction = "sum" if operation.reduces else "none"
        self._case = Case(operation, type_, reduction, root=-1, in_place=True)
        spec = BenchSpec((operation,), (type_,), (size,))
        (shape,), _ = collective_calls.shapes(self._case, size, group, spec)
        self.part = collective_calls.build(self._case, shape, group, device)
        self.run = self.part.run
        self._group = group

    def check(self, number: int) -> bool:
        """Run once on fresh data; whether the whole result is right."""
        golden = Golden(self._case, self._group, "random", number)
        golden.fill(self.part)
        self.run()
        return not golden.verify(self.part).wrong

    def clear(self) -> None:
        """Data that stay as they are however often they are summed."""
        self.part.input.zero_()
        self.part.output.zero_()


def run_rank(plan: PipelinePlan, world: BenchWorld) -> int:
    """Measure as one of the ranks; rank 0 prints and keeps the result. The exit code."""
    keep, plot = (plan.json, plan.plot) if world.rank == 0 else (None, None)
    store = rendezvous.rendezvous(world, _SECONDS)
    device = choose(plan.device, world.local_rank)
    backend = registry.usable("fsccl", device.kind)
    backend.init_options(device.torch_device)
    with backend.creating():
        rendezvous.join(store, world, "fsccl", timeout=timedelta(seconds=_SECONDS))
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


def _measure_all(s: Schedule, plan: PipelinePlan, device: Device, world: BenchWorld) -> list[Row]:
    from flagscale.comm.fsccl import load_extension

    options = load_extension().Options(pipeline_k=s.k, pipeline_nelem=s.nelem)
    process_group = dist.new_group(backend="fsccl", pg_options=options)
    group = RankGroup("fsccl", tuple(range(world.size)), world.rank, process_group)
    speaks = world.rank == 0
    if speaks:
        print("\n".join(heading(s, plan, world.size)), flush=True)
    rows = []
    for asked in plan.sizes:
        size = fit(asked, plan.type.bytes, world.size)
        call = Call(s.operation, plan.type, size, group, device)
        times = _measure(call, plan, device, process_group)
        row = Row(s.operation, s.k, s.nelem, size, sum(times) / len(times), min(times))
        rows.append(row)
        if speaks:
            print(line(row, plan.unit), flush=True)
    if speaks:
        print(flush=True)
    dist.destroy_process_group(process_group)
    return rows


def _measure(
    call: Call, plan: PipelinePlan, device: Device, group: dist.ProcessGroup
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
    return list(slowest.tolist())


def _curves(rows: list[Row], ranks: int) -> list[Curve]:
    found: dict[str, list[Point]] = {}
    for row in rows:
        label = Schedule(row.operation, row.k, row.nelem_per_send).label
        found.setdefault(label, []).append(Point(row.size, row.avg_us, row.busbw(ranks)))
    return [Curve(label, tuple(points)) for label, points in found.items()]
