"""A rank's part: our measurement and the baseline's by turns, for each operation and size."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from flagscale.bench import rendezvous
from flagscale.bench.agreement import definitions
from flagscale.bench.agreement.baseline import GlooBaseline, NcclBaseline, time_of
from flagscale.bench.agreement.cli import AgreementPlan
from flagscale.bench.agreement.nccl import Nccl
from flagscale.bench.agreement.verdict import Pair, conclusion, table, write_figure
from flagscale.bench.collectives import collective_calls, devices
from flagscale.bench.collectives.collective_calls import PreparedBuffers, prepare, release
from flagscale.bench.collectives.devices import form
from flagscale.bench.collectives.spec import BenchSpec, Case
from flagscale.bench.collectives.timing import measure
from flagscale.bench.machine import facts
from flagscale.bench.world import BenchWorld
from flagscale.comm import registry
from flagscale.sample_statistics import median_ratio

_SECONDS = 600.0


def run_rank(plan: AgreementPlan, world: BenchWorld) -> int:
    """Measure as one of the ranks; rank 0 prints and keeps the result. The exit code."""
    spec, limit, speaks = plan.spec, plan.limit, world.rank == 0
    sides = Sides(spec, world, plan.rounds)
    way = "graphs" if spec.iterations.replays and not sides.device.is_host else "calls one by one"
    about = facts("flagscale", "torch") | {
        **{"library": sides.version, "device": sides.device.product, "ranks": world.size},
        **{"type": spec.types[0].name, "way": way, "rounds": plan.rounds, "limit": limit},
    }
    pairs = []
    if speaks:
        print(f"# {world.size} ranks, {sides.device.product}, {sides.version}, {way}")
        print(table([], limit)[0], flush=True)
    for pair in sides.run():
        pairs.append(pair)
        if speaks:
            print(table([pair], limit)[1], flush=True)
    sides.close()
    text, fine = conclusion(pairs, limit)
    if speaks:
        print(f"# {text}")
        kept = {**about, "text": text, "rows": [pair.to_json(limit) for pair in pairs]}
        if plan.json is not None:
            plan.json.write_text(json.dumps(kept, indent=1) + "\n")
        if plan.plot is not None:
            write_figure(kept, plan.plot)
    return 0 if fine else 4


class Sides:
    """Both sides on this rank, connected."""

    def __init__(self, spec: BenchSpec, world: BenchWorld, rounds: int) -> None:
        self._spec, self._world, self._rounds = spec, world, rounds
        store = rendezvous.rendezvous(world, _SECONDS)
        self.device = devices.choose(spec.placement.device, world.local_rank)
        timeout = timedelta(seconds=_SECONDS)
        rendezvous.join(PrefixStore("control", store), world, "gloo", timeout=timeout)
        # What nccl-tests measures, or what stands for it on a CPU: it is about NVIDIA's library.
        name = "nccl" if self.device.kind == "cuda" else "gloo"
        everyone = (tuple(range(world.size)),)
        adapter = registry.usable(name, self.device.kind)
        self._group = form(adapter, everyone, world.rank, self.device, _SECONDS, {})
        self.baseline: GlooBaseline | NcclBaseline
        if name == "gloo":
            self.baseline, self.version = GlooBaseline(self._group.process_group), "gloo"
            return
        nccl = Nccl()
        if world.rank == 0:
            store.set("identity", nccl.unique_id().hex())
        identity = bytes.fromhex(store.get("identity").decode())
        self.baseline = NcclBaseline(nccl, identity, world.size, world.rank)
        self.version = f"NCCL {nccl.version()}"

    def run(self) -> Iterator[Pair]:
        """Measure everything; every rank gets every pair."""
        for case in self._spec.cases(self._world.size):
            if case.operation.name in self.baseline.operations:
                yield from (self._pair(case, size) for size in self._spec.sizes)

    def _pair(self, case: Case, size: int) -> Pair:
        shapes, _ = collective_calls.shapes(case, size, self._group, self._spec)
        ready = prepare(case, shapes, self._group, self.device, self._spec)
        name, element, ranks = case.operation.name, case.type.bytes, self._world.size
        actual = sum(shape.elements for shape in shapes) * element
        calls = self.baseline.calls(name, actual, case.type)
        loop = self._spec.iterations
        ours: list[float] = []
        theirs: list[float] = []
        for number in range(self._rounds):
            # By turns, and each first as often as last: a drift hits both alike.
            for side in ("ours", "theirs") if number % 2 else ("theirs", "ours"):
                if side == "ours":
                    ours.append(self._ours(ready))
                    continue
                seconds = time_of(
                    calls,
                    self.device,
                    iterations=loop.measured,
                    warmup=loop.warmup,
                    launches=None if self.device.is_host else loop.replays,
                    together=self._together,
                )
                theirs.append(seconds * 1e6)
        release(ready, self.device)
        our_turns, their_turns = self._means(ours), self._means(theirs)
        time, other = statistics.median(our_turns), statistics.median(their_turns)
        count = definitions.counts(name, ranks, actual, element).count
        return Pair(
            *(name, actual, time, other),
            our_busbw=actual / time / 1e3 * case.operation.bus_factor(ranks),
            baseline_busbw=definitions.bandwidths(name, ranks, count, element, other / 1e6)[1],
            ratio=median_ratio(our_turns, their_turns),
        )

    def _ours(self, ready: PreparedBuffers) -> float:
        """Microseconds of an operation as the benchmark reports them, on this rank."""
        loop = self._spec.iterations
        steps, warmup = ready.steps(loop.measured), ready.steps(loop.warmup)
        return measure(steps, warmup, self.device, self._spec, [], self._together).average

    def _means(self, own: list[float]) -> list[float]:
        """Of each turn the mean over the ranks, as both sides report it."""
        found: list[list[float]] = [[] for _ in range(self._world.size)]
        dist.all_gather_object(found, own)
        return [statistics.fmean(of_ranks) for of_ranks in zip(*found, strict=True)]

    def _together(self) -> None:
        self.device.synchronize()
        dist.barrier()

    def close(self) -> None:
        """Leave, all ranks together."""
        self._together()
        if isinstance(self.baseline, NcclBaseline):
            self.baseline.close()
        dist.destroy_process_group()
        rendezvous.clean_up(self._world)
