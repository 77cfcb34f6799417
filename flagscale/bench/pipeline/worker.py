"""Rank of ``flagscale bench pipeline``: checks and times fsccl's pipelined schedules."""

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
from flagscale.bench.collectives.devices import RankGroup, select_rank_device
from flagscale.bench.collectives.operations import OPERATIONS, DataType
from flagscale.bench.collectives.sizes import round_to_parts
from flagscale.bench.collectives.spec import BenchSpec, Case
from flagscale.bench.machine import describe_machine
from flagscale.bench.pipeline.cli import (
    PipelinePlan,
    PipelineRow,
    Schedule,
    format_heading,
    format_row,
)
from flagscale.bench.rank import rank_function
from flagscale.bench.world import BenchWorld
from flagscale.comm import registry
from flagscale.errors import JobError

_TIMEOUT_SECONDS = 600.0


class CheckedCall:
    """An operation in one buffer of this rank, with the check of its result."""

    def __init__(
        self, name: str, type_: DataType, size: int, group: RankGroup, device: Device
    ) -> None:
        operation = OPERATIONS[name]
        reduction = "sum" if operation.reduces else "none"
        self._case = Case(operation, type_, reduction, root=-1, in_place=True)
        spec = BenchSpec((operation,), (type_,), (size,))
        (buffer_sizes,), _ = collective_calls.compute_buffer_sizes(self._case, size, group, spec)
        self.part = collective_calls.build_part(self._case, buffer_sizes, group, device)
        self.run = self.part.run
        self._group = group

    def check(self, number: int) -> bool:
        """Run once on fresh data, and return whether the whole result is right."""
        golden = Golden(self._case, self._group, "random", number)
        golden.fill_buffers(self.part)
        self.run()
        return not golden.verify(self.part).wrong_count

    def clear(self) -> None:
        """Fill the buffers with zeros, so that repeated sums in place do not overflow."""
        self.part.input.zero_()
        self.part.output.zero_()


@rank_function
def run_rank(plan: PipelinePlan, world: BenchWorld) -> int:
    """Measure as one of the ranks, and return the exit code. Rank 0 prints and writes the
    result.
    """
    json_path, plot = (plan.json, plan.plot) if world.rank == 0 else (None, None)
    store = rendezvous.rendezvous(world, _TIMEOUT_SECONDS)
    device = select_rank_device(plan.device, world.local_rank)
    backend = registry.get_usable_backend("fsccl", device.kind)
    backend.init_options(device.torch_device)
    with backend.creation_context():
        rendezvous.init_default_group(
            store, world, "fsccl", timeout=timedelta(seconds=_TIMEOUT_SECONDS)
        )
    dist.barrier()
    rendezvous.remove_files(world)
    conditions = describe_machine("flagscale", "torch") if json_path is not None else {}
    rows = [row for s in plan.schedules for row in _measure_schedule(s, plan, device, world)]
    if json_path is not None:
        conditions |= {"ranks": world.size, "device": device.kind, "type": plan.type.name}
        conditions |= {
            name: getattr(plan, name) for name in ("check_iters", "warmup_iters", "iters")
        }
        records = [asdict(row) | {"busbw": round(row.busbw(world.size), 3)} for row in rows]
        json_path.write_text(json.dumps({**conditions, "results": records}, indent=1) + "\n")
    if plot is not None:
        write_plot(plot, _make_curves(rows, world.size))
    dist.destroy_process_group()
    return 0


def _measure_schedule(
    schedule: Schedule, plan: PipelinePlan, device: Device, world: BenchWorld
) -> list[PipelineRow]:
    from flagscale.comm.fsccl import load_extension

    options = load_extension().Options(pipeline_k=schedule.k, pipeline_nelem=schedule.nelem)
    process_group = dist.new_group(backend="fsccl", pg_options=options)
    group = RankGroup("fsccl", tuple(range(world.size)), world.rank, process_group)
    is_printing = world.rank == 0
    if is_printing:
        print("\n".join(format_heading(schedule, plan, world.size)), flush=True)
    rows = []
    for requested_size in plan.sizes:
        size = round_to_parts(requested_size, plan.type.bytes, world.size)
        call = CheckedCall(schedule.operation, plan.type, size, group, device)
        times = _time_call(call, plan, device, process_group)
        row = PipelineRow(
            schedule.operation,
            schedule.k,
            schedule.nelem,
            size,
            sum(times) / len(times),
            min(times),
        )
        rows.append(row)
        if is_printing:
            print(format_row(row, plan.unit), flush=True)
    if is_printing:
        print(flush=True)
    dist.destroy_process_group(process_group)
    return rows


def _time_call(
    call: CheckedCall, plan: PipelinePlan, device: Device, group: dist.ProcessGroup
) -> list[float]:
    """Return the microseconds of the slowest rank in every iteration.

    Raises:
        JobError: a result is wrong on some rank.
    """
    checks = [
        call.check(number) for number in range(plan.check_iters)
    ]  # every rank runs all of them
    wrong_ranks = torch.tensor([int(not all(checks))], device=device.torch_device)
    dist.all_reduce(wrong_ranks)
    if wrong_ranks.item():
        raise JobError(f"wrong results on {int(wrong_ranks.item())} of {group.size()} ranks")
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
    slowest_times = torch.tensor(times, dtype=torch.float64, device=device.torch_device)
    dist.all_reduce(slowest_times, op=dist.ReduceOp.MAX)
    return list(slowest_times.tolist())


def _make_curves(rows: list[PipelineRow], ranks: int) -> list[Curve]:
    points_by_label: dict[str, list[Point]] = {}
    for row in rows:
        label = Schedule(row.operation, row.k, row.nelem_per_send).label
        points_by_label.setdefault(label, []).append(Point(row.size, row.avg_us, row.busbw(ranks)))
    return [Curve(label, tuple(points)) for label, points in points_by_label.items()]
