"""Rank of ``flagscale bench agreement``: measures each operation and size by ``flagscale bench
collectives`` (*ours*) and by the baseline, by turns.
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

_TIMEOUT_SECONDS = 600.0


@rank_function
def run_rank(plan: AgreementPlan, world: BenchWorld) -> int:
    """Measure as one of the ranks, and return the exit code. Rank 0 prints and writes the
    result.
    """
    spec, limit, is_printing = plan.spec, plan.limit, world.rank == 0
    comparison = ComparedSides(spec, world, plan.rounds)
    issue_mode = (
        "graphs"
        if spec.iterations.replays and not comparison.device.is_host
        else "calls one by one"
    )
    conditions = describe_machine("flagscale", "torch") | {
        **{"library": comparison.version, "device": comparison.device.product, "ranks": world.size},
        **{"type": spec.types[0].name, "way": issue_mode, "rounds": plan.rounds, "limit": limit},
    }
    pairs = []
    if is_printing:
        print(
            f"# {world.size} ranks, {comparison.device.product}, {comparison.version}, {issue_mode}"
        )
        print(make_table([], limit)[0], flush=True)
    for pair in comparison.run():
        pairs.append(pair)
        if is_printing:
            print(make_table([pair], limit)[1], flush=True)
    comparison.close()
    text, none_differs = conclude(pairs, limit)
    if is_printing:
        print(f"# {text}")
        record = {
            **conditions,
            "text": text,
            "rows": [pair.to_json_record(limit) for pair in pairs],
        }
        if plan.json is not None:
            plan.json.write_text(json.dumps(record, indent=1) + "\n")
        if plan.plot is not None:
            write_figure(record, plan.plot)
    return 0 if none_differs else 4


class ComparedSides:
    """Both sides on this rank: ``flagscale bench collectives`` and the baseline, connected to the
    other ranks.
    """

    def __init__(self, spec: BenchSpec, world: BenchWorld, rounds: int) -> None:
        self._spec, self._world, self._rounds = spec, world, rounds
        store = rendezvous.rendezvous(world, _TIMEOUT_SECONDS)
        self.device = devices.select_rank_device(spec.placement.device, world.local_rank)
        timeout = timedelta(seconds=_TIMEOUT_SECONDS)
        rendezvous.init_default_group(PrefixStore("control", store), world, "gloo", timeout=timeout)
        # nccl-tests measures NCCL. On a CPU gloo takes its place.
        name = "nccl" if self.device.kind == "cuda" else "gloo"
        all_ranks = (tuple(range(world.size)),)
        backend = registry.get_usable_backend(name, self.device.kind)
        self._group = create_group(
            backend, all_ranks, world.rank, self.device, _TIMEOUT_SECONDS, {}
        )
        self.baseline: GlooBaseline | NcclBaseline
        if name == "gloo":
            self.baseline, self.version = GlooBaseline(self._group.process_group), "gloo"
            return
        nccl = NcclLibrary()
        if world.rank == 0:
            store.set("unique_id", nccl.create_unique_id().hex())
        unique_id = bytes.fromhex(store.get("unique_id").decode())
        self.baseline = NcclBaseline(nccl, unique_id, world.size, world.rank)
        self.version = f"NCCL {nccl.version()}"

    def run(self) -> Iterator[TimePair]:
        """Measure everything; every rank yields every comparison."""
        for case in self._spec.cases(self._world.size):
            if case.operation.name in self.baseline.operations:
                yield from (self._compare_size(case, size) for size in self._spec.sizes)

    def _compare_size(self, case: Case, size: int) -> TimePair:
        part_sizes, _ = collective_calls.compute_buffer_sizes(case, size, self._group, self._spec)
        prepared_buffers = prepare_buffers(case, part_sizes, self._group, self.device, self._spec)
        name, element_bytes, ranks = case.operation.name, case.type.bytes, self._world.size
        actual_size = sum(part.elements for part in part_sizes) * element_bytes
        calls = self.baseline.create_calls(name, actual_size, case.type)
        iterations = self._spec.iterations
        our_times_us: list[float] = []
        baseline_times_us: list[float] = []
        for round_number in range(self._rounds):
            # Alternating order: a drift of the machine affects both sides alike.
            for side in ("ours", "baseline") if round_number % 2 else ("baseline", "ours"):
                if side == "ours":
                    our_times_us.append(self._time_ours(prepared_buffers))
                    continue
                seconds = time_calls(
                    calls,
                    self.device,
                    iterations=iterations.measured,
                    warmup=iterations.warmup,
                    launches=None if self.device.is_host else iterations.replays,
                    barrier=self._barrier,
                )
                baseline_times_us.append(seconds * 1e6)
        release_buffers(prepared_buffers, self.device)
        our_means_us, baseline_means_us = (
            self._mean_over_ranks(our_times_us),
            self._mean_over_ranks(baseline_times_us),
        )
        our_us = statistics.median(our_means_us)
        baseline_us = statistics.median(baseline_means_us)
        count = definitions.count_elements(name, ranks, actual_size, element_bytes).count
        _, baseline_busbw = definitions.compute_bandwidths(
            name, ranks, count, element_bytes, baseline_us / 1e6
        )
        return TimePair(
            operation=name,
            size=actual_size,
            our_us=our_us,
            baseline_us=baseline_us,
            our_busbw=actual_size / our_us / 1e3 * case.operation.bus_factor(ranks),
            baseline_busbw=baseline_busbw,
            ratio=median_ratio(our_means_us, baseline_means_us),
        )

    def _time_ours(self, prepared_buffers: PreparedBuffers) -> float:
        """Return the microseconds of an operation on this rank, as ``flagscale bench collectives``
        measures them.
        """
        iterations = self._spec.iterations
        steps, warmup = (
            prepared_buffers.steps(iterations.measured),
            prepared_buffers.steps(iterations.warmup),
        )
        turn_times = measure(
            steps, warmup, self.device, self._spec, marks=[], barrier=self._barrier
        )
        return turn_times.average

    def _mean_over_ranks(self, turn_times: list[float]) -> list[float]:
        """Return the mean over the ranks of each turn's time, which both sides report."""
        by_rank: list[list[float]] = [[] for _ in range(self._world.size)]
        dist.all_gather_object(by_rank, turn_times)
        return [statistics.fmean(rank_times) for rank_times in zip(*by_rank, strict=True)]

    def _barrier(self) -> None:
        self.device.synchronize()
        dist.barrier()

    def close(self) -> None:
        """Destroy the groups, on all ranks at the same time."""
        self._barrier()
        if isinstance(self.baseline, NcclBaseline):
            self.baseline.close()
        dist.destroy_process_group()
        rendezvous.remove_files(self._world)
