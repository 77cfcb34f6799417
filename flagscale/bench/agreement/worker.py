"""Rank of the comparison: measures by the benchmark and by the baseline in turns, for each
operation and size.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from flagscale.bench import rendezvous
from flagscale.bench.agreement import definitions
from flagscale.bench.agreement.baseline import GlooBaseline, NcclBaseline, time_calls
from flagscale.bench.agreement.cli import AgreementPlan
from flagscale.bench.agreement.nccl import NcclLibrary
from flagscale.bench.agreement.verdict import TimePair, conclude, make_table, write_figure
from flagscale.bench.collectives import collective_calls, devices
from flagscale.bench.collectives.collective_calls import (
    PreparedBuffers,
    prepare_buffers,
    release_buffers,
)
from flagscale.bench.collectives.devices import create_group
from flagscale.bench.collectives.spec import BenchSpec, Case
from flagscale.bench.collectives.timing import measure
from flagscale.bench.machine import describe_machine
from flagscale.bench.rank import rank_function
from flagscale.bench.statistics import median_ratio
from flagscale.bench.world import BenchWorld
from flagscale.comm import registry

_SECONDS = 600.0


@rank_function
def run_rank(plan: AgreementPlan, world: BenchWorld) -> int:
    """Measure as one of the ranks, and return the exit code. Rank 0 prints and writes the
    result.
    """
    spec, limit, prints = plan.spec, plan.limit, world.rank == 0
    sides = ComparedSides(spec, world, plan.rounds)
    method = (
        "graphs" if spec.iterations.replays and not sides.device.is_host else "calls one by one"
    )
    about = describe_machine("flagscale", "torch") | {
        **{"library": sides.version, "device": sides.device.product, "ranks": world.size},
        **{"type": spec.types[0].name, "way": method, "rounds": plan.rounds, "limit": limit},
    }
    pairs = []
    if prints:
        print(f"# {world.size} ranks, {sides.device.product}, {sides.version}, {method}")
        print(make_table([], limit)[0], flush=True)
    for pair in sides.run():
        pairs.append(pair)
        if prints:
            print(make_table([pair], limit)[1], flush=True)
    sides.close()
    text, none_differs = conclude(pairs, limit)
    if prints:
        print(f"# {text}")
        record = {**about, "text": text, "rows": [pair.to_json_record(limit) for pair in pairs]}
        if plan.json is not None:
            plan.json.write_text(json.dumps(record, indent=1) + "\n")
        if plan.plot is not None:
            write_figure(record, plan.plot)
    return 0 if none_differs else 4


class ComparedSides:
    """Benchmark and baseline on this rank, connected to the other ranks."""

    def __init__(self, spec: BenchSpec, world: BenchWorld, rounds: int) -> None:
        self._spec, self._world, self._rounds = spec, world, rounds
        store = rendezvous.rendezvous(world, _SECONDS)
        self.device = devices.select_rank_device(spec.placement.device, world.local_rank)
        timeout = timedelta(seconds=_SECONDS)
        rendezvous.init_default_group(PrefixStore("control", store), world, "gloo", timeout=timeout)
        # What nccl-tests measures, or what stands for it on a CPU: it is about NVIDIA's library.
        name = "nccl" if self.device.kind == "cuda" else "gloo"
        everyone = (tuple(range(world.size)),)
        adapter = registry.get_usable_backend(name, self.device.kind)
        self._group = create_group(adapter, everyone, world.rank, self.device, _SECONDS, {})
        self.baseline: GlooBaseline | NcclBaseline
        if name == "gloo":
            self.baseline, self.version = GlooBaseline(self._group.process_group), "gloo"
            return
        nccl = NcclLibrary()
        if world.rank == 0:
            store.set("identity", nccl.create_unique_id().hex())
        identity = bytes.fromhex(store.get("identity").decode())
        self.baseline = NcclBaseline(nccl, identity, world.size, world.rank)
        self.version = f"NCCL {nccl.version()}"

    def run(self) -> Iterator[TimePair]:
        """Measure everything; every rank yields every comparison."""
        for case in self._spec.cases(self._world.size):
            if case.operation.name in self.baseline.operations:
                yield from (self._compare_size(case, size) for size in self._spec.sizes)

    def _compare_size(self, case: Case, size: int) -> TimePair:
        shapes, _ = collective_calls.make_shapes(case, size, self._group, self._spec)
        ready = prepare_buffers(case, shapes, self._group, self.device, self._spec)
        name, element, ranks = case.operation.name, case.type.bytes, self._world.size
        actual = sum(shape.elements for shape in shapes) * element
        calls = self.baseline.create_calls(name, actual, case.type)
        loop = self._spec.iterations
        ours: list[float] = []
        theirs: list[float] = []
        for number in range(self._rounds):
            # Alternating order: a drift of the machine affects both sides alike.
            for side in ("ours", "theirs") if number % 2 else ("theirs", "ours"):
                if side == "ours":
                    ours.append(self._time_benchmark(ready))
                    continue
                seconds = time_calls(
                    calls,
                    self.device,
                    iterations=loop.measured,
                    warmup=loop.warmup,
                    launches=None if self.device.is_host else loop.replays,
                    barrier=self._barrier,
                )
                theirs.append(seconds * 1e6)
        release_buffers(ready, self.device)
        our_turns, their_turns = self._mean_over_ranks(ours), self._mean_over_ranks(theirs)
        time, baseline_time = statistics.median(our_turns), statistics.median(their_turns)
        count = definitions.count_elements(name, ranks, actual, element).count
        _, baseline_busbw = definitions.compute_bandwidths(
            name, ranks, count, element, baseline_time / 1e6
        )
        return TimePair(
            operation=name,
            size=actual,
            ours=time,
            baseline=baseline_time,
            our_busbw=actual / time / 1e3 * case.operation.bus_factor(ranks),
            baseline_busbw=baseline_busbw,
            ratio=median_ratio(our_turns, their_turns),
        )

    def _time_benchmark(self, ready: PreparedBuffers) -> float:
        """Return the microseconds of an operation on this rank as the benchmark reports them."""
        loop = self._spec.iterations
        steps, warmup = ready.steps(loop.measured), ready.steps(loop.warmup)
        return measure(steps, warmup, self.device, self._spec, [], self._barrier).average

    def _mean_over_ranks(self, times: list[float]) -> list[float]:
        """Return the mean over the ranks for each turn, which both sides report."""
        by_rank: list[list[float]] = [[] for _ in range(self._world.size)]
        dist.all_gather_object(by_rank, times)
        return [statistics.fmean(of_ranks) for of_ranks in zip(*by_rank, strict=True)]

    def _barrier(self) -> None:
        self.device.synchronize()
        dist.barrier()

    def close(self) -> None:
        """Leave, all ranks at the same time."""
        self._barrier()
        if isinstance(self.baseline, NcclBaseline):
            self.baseline.close()
        dist.destroy_process_group()
        rendezvous.remove_files(self._world)
