"""What a rank does: start fresh processes for each measurement, or be one of these; and what all
measurements show, in a table and in words.

In a fresh process it makes the default group, further groups, and does the first two operations of
these; ``--help`` has the variants. ``warm`` is the control: without it the first communicator of
the process is counted as the cost of the sub-group. With a ``device_id``, as in ``bound``,
``new_group`` may split the default group's communicator (ncclCommSplit).
"""

from __future__ import annotations

import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.distributed_c10d import _get_default_group

from flagscale.accelerators.device import Device
from flagscale.accelerators.registry import chosen
from flagscale.bench import rendezvous
from flagscale.bench.collectives import devices
from flagscale.bench.groups.cli import ON_ACCELERATORS, GroupsPlan, Sample, TrialPlan, Variant
from flagscale.bench.machine import facts
from flagscale.bench.rank import Job
from flagscale.bench.rendezvous import together
from flagscale.bench.spawn import interruptible, rank_environment, run_job
from flagscale.bench.world import RENDEZVOUS_VARIABLE, BenchWorld
from flagscale.comm import registry
from flagscale.errors import ConfigError, JobError
from flagscale.hosts.names import folded
from flagscale.records import decode, encode
from flagscale.sample_statistics import median_ratio

_TIMEOUT = timedelta(minutes=10)
_MIB = 2**20


def run_trial(plan: TrialPlan, world: BenchWorld) -> int:
    """One measurement, as one of its ranks; rank 0 writes the result."""
    place = plan.of.placement
    store = rendezvous.rendezvous(world, place.timeout)
    # All but one, as in a sub-group of a node; two ranks at least have something to say.
    members = plan.of.members or max(min(2, world.size), world.size - 1)
    groups = [list(plan.of.ranks)] * plan.count if plan.of.ranks else []
    groups = groups or members_of(plan.count, members, world.size)
    sample = _measure(plan, groups, world, store)
    if world.rank == 0:
        plan.result.write_text(encode(sample))
    dist.destroy_process_group()
    rendezvous.clean_up(world)
    rendezvous.exit_store(store, world, place.timeout)
    return 0


def members_of(count: int, members: int, world: int) -> list[list[int]]:
    """``count`` groups of ``members`` ranks, each one rank further round than the one before."""
    return [sorted((first + i) % world for i in range(members)) for first in range(count)]


def _measure(plan: TrialPlan, groups: list[list[int]], world: BenchWorld, store: Store) -> Sample:
    """Measure one variant in this fresh process; every rank of ``world`` calls it."""
    place, variant = plan.of.placement, plan.variant
    device = devices.choose(place.device, world.local_rank)
    values = registry.options_of(place.backend, plan.of.comm)
    backend = registry.usable(place.backend, device.kind, given_by="--backend")
    backend.export(values)
    before = _used(device)
    together(store, world, "start", _TIMEOUT)
    begin = time.perf_counter()
    with backend.creating():
        given = backend.init_options(device.torch_device, values).get("pg_options")
        options: dict[str, Any] = {"timeout": _TIMEOUT, "pg_options": given}
        named: dict[str, Any] = {"backend": backend.torch_backend(device.kind), **options}
        bound: dict[str, Any] = (
            {"device_id": device.torch_device} if variant in ON_ACCELERATORS else {}
        )
        rendezvous.join(PrefixStore("world", store), world, **named, **bound)
        created_world = time.perf_counter() - begin
        if variant == "warm":
            _all_reduce(None, device, plan.of.bytes)
        together(store, world, "create", _TIMEOUT)
        begin = time.perf_counter()
        if variant == "split":
            handles = [dist.split_group(None, [ranks], **options) for ranks in groups]
        else:
            handles = [dist.new_group(ranks, **named) for ranks in groups]
    device.synchronize()
    create = time.perf_counter() - begin
    mine = [h for h, ranks in zip(handles, groups, strict=True) if world.rank in ranks]
    first, second = (_turn(name, mine, store, world, device, plan) for name in ("first", "second"))
    memory = (_used(device) - before) / _MIB
    own = Sample(created_world, create, first, second, memory, splits=_splits(device))
    return _most(own, world, store)


def _turn(
    name: str, handles: list[Any], store: Store, world: BenchWorld, device: Device, plan: TrialPlan
) -> float:
    """Seconds of an operation on each of this rank's groups, one after the other."""
    together(store, world, name, _TIMEOUT)
    begin = time.perf_counter()
    for handle in handles:
        _all_reduce(handle, device, plan.of.bytes)
    return time.perf_counter() - begin


def _all_reduce(group: dist.ProcessGroup | None, device: Device, size: int) -> None:
    dist.all_reduce(torch.ones(size // 4, device=device.torch_device), group=group)
    device.synchronize()


def _used(device: Device) -> float:
    """Bytes of the device that are in use, by anyone: what NCCL holds is not torch's."""
    return float(device.accelerator.used_memory(device.torch_device))


def _splits(device: Device) -> int:
    """The backend's own count of splits of the default group's communicator."""
    backend: Any = _get_default_group()._get_backend(device.torch_device)
    return int(backend.comm_split_count()) if hasattr(backend, "comm_split_count") else -1


def _most(own: Sample, world: BenchWorld, store: Store) -> Sample:
    """Of every number the most over the ranks."""
    store.set(f"sample/{world.rank}", encode(own))
    texts = [store.get(f"sample/{rank}") for rank in range(world.size)]
    samples = [asdict(decode(Sample, text)) for text in texts]
    together(store, world, "end", _TIMEOUT)
    return Sample(**{name: max(s[name] for s in samples) for name in samples[0]})


Results = Mapping[tuple[Variant, int], Sequence[Sample]]
"""The samples of each variant and number of groups, in the order they were taken."""

_COLUMNS = ("world", "create", "first", "second", "total")
_ENOUGH = 10


def table(results: Results) -> list[str]:
    """Medians: milliseconds, and MiB of device memory."""
    lines = [
        f"{'variant':>7}  {'groups':>6}  {'runs':>4}"
        + "".join(f"  {name + ' ms':>10}" for name in _COLUMNS)
        + f"  {'GPU MiB':>8}  {'splits':>6}"
    ]
    for (variant, count), samples in results.items():
        cells = "".join(
            f"  {statistics.median(getattr(s, name) for s in samples) * 1e3:>10.1f}"
            for name in _COLUMNS
        )
        memory = statistics.median(s.memory for s in samples)
        splits = {s.splits for s in samples}
        shown = "n/a" if splits == {-1} else "/".join(str(s) for s in sorted(splits))
        lines.append(
            f"{variant:>7}  {count:>6}  {len(samples):>4}{cells}  {memory:>8.0f}  {shown:>6}"
        )
    return lines


def findings(results: Results) -> list[str]:
    """What is proved, what is only the cost of a first communicator, and what is not shown."""
    lines = []
    for count in dict.fromkeys(count for _, count in results):
        here = {variant: results[variant, count] for variant, c in results if c == count}
        lines += _of_count(here, count)
    fewest = min(len(samples) for samples in results.values())
    if fewest < _ENOUGH:
        runs = f"{fewest} run{'s' if fewest > 1 else ''} a variant"
        lines.append(f"{runs}: take at least {_ENOUGH} before a ratio is relied on.")
    if any(variant in ON_ACCELERATORS for variant, _ in results):
        lines.append(
            "A bound default group runs unbatched sends and receives one after the other on one "
            "communicator: weigh that against the gain."
        )
    return lines


def _of_count(here: Mapping[Variant, Sequence[Sample]], count: int) -> list[str]:
    groups = f"{count} group{'s' if count > 1 else ''}"
    lines = []
    control, cold = here.get("warm"), here.get("cold")
    for variant in (variant for variant in ON_ACCELERATORS if variant in here):
        samples = here[variant]
        lines.append(f"{variant}: {_proof(samples, count)}")
        if control is not None:
            lines.append(f"{variant} against the warmed control: {_against(control, samples)}")
        if cold is not None:
            contains = "contains the process's first communicator and is no gain of splitting"
            lines.append(f"{variant} against cold: {_against(cold, samples)}; this {contains}")
    if control is not None and cold is not None:
        ratio = _against(cold, control)
        lines.append(f"warm against cold (the first communicator alone): {ratio}")
    return [f"{groups}, {line}" for line in lines]


def _proof(samples: Sequence[Sample], count: int) -> str:
    splits = {s.splits for s in samples}
    if splits == {-1}:
        return "the backend does not tell whether it split"
    if all(s >= count for s in splits):
        return f"proved: the backend counts {max(splits)} splits"
    return f"NOT split: the backend counts {max(splits)} splits of {count}"


def _against(slow: Sequence[Sample], fast: Sequence[Sample]) -> str:
    if min(len(slow), len(fast)) < 2:
        return "a single run each, which shows no difference"
    ratio = median_ratio([s.usable for s in slow], [s.usable for s in fast])
    saved = statistics.median(s.usable for s in slow) - statistics.median(s.usable for s in fast)
    verdict = "" if ratio.clear else " (no difference shown)"
    shown = f"95 % interval {ratio.low:.2f} to {ratio.high:.2f}{verdict}"
    return f"usable {ratio.value:.2f} times as fast, {shown}; {saved * 1e3:+.1f} ms saved"


@interruptible()
def run_rank(plan: GroupsPlan, world: BenchWorld | None) -> int:
    """Everything, as one of the ranks of a launcher, or as their one starter; the exit code."""
    kind = chosen(plan.placement.device)
    backend = registry.usable(plan.placement.backend, kind.name, given_by="--backend")
    variants = [v for v in plan.variants if not kind.is_host or v not in ON_ACCELERATORS]
    left_out = [v for v in plan.variants if v not in variants]
    if not variants:
        raise ConfigError(f"{', '.join(left_out)}: only accelerators can be bound")
    speaks = world is None or world.rank == 0
    starter = _Starter(plan, world)
    hosts = starter.hosts()
    if speaks:
        given = f" ({', '.join(plan.comm)})" if plan.comm else ""
        version = f"torch {torch.__version__}, backend {backend.name} {backend.version() or ''}"
        print(f"# {starter.size} ranks, {version.rstrip()}{given}")
        print(f"# {hosts}; started by {world.launcher if world is not None else 'local'}")
        for variant in left_out:
            print(f"# {variant}: left out, only accelerators can be bound")
        sys.stdout.flush()
    about = facts("flagscale", "torch") if plan.json is not None else {}
    results = starter.run(variants)
    if not speaks:
        return 0
    for line in (*table(results), "", *findings(results)):
        print(line)
    if plan.json is not None:
        rows = [
            {"arm": variant, "groups": count, "samples": [asdict(s) for s in samples]}
            for (variant, count), samples in results.items()
        ]
        about |= {"ranks": starter.size, "hosts": hosts.count(" ["), "backend": backend.name}
        about |= {"options": list(plan.comm)} if plan.comm else {}
        plan.json.write_text(json.dumps({**about, "results": rows}, indent=1) + "\n")
    return 0


class _Starter:
    """Starts the processes of every measurement: all of them here, or under a launcher each rank
    its own, which then meet at a port that rank 0 picks."""

    def __init__(self, plan: GroupsPlan, world: BenchWorld | None) -> None:
        self._plan, self._world = plan, world
        self._number = 0
        self._store: Store | None = None
        self.size = plan.placement.workers or 1
        if world is not None:
            place, self.size = plan.placement, world.size
            self._store = rendezvous.rendezvous(world, place.timeout, place.address, place.port)

    def hosts(self) -> str:
        """Which ranks are on which host."""
        if self._world is None or self._store is None:
            return f"{socket.gethostname()} [{folded(range(self.size))}]"
        self._store.set(f"host/{self._world.rank}", socket.gethostname())
        ranks: dict[str, list[int]] = {}
        for rank in range(self.size):
            host = self._store.get(f"host/{rank}").decode()
            ranks.setdefault(host, []).append(rank)
        return ", ".join(f"{host} [{folded(some)}]" for host, some in ranks.items())

    def run(self, variants: Sequence[Variant]) -> Results:
        """All measurements, the variants by turns. Under a launcher every rank gets them."""
        results: dict[tuple[Variant, int], list[Sample]] = {
            (variant, count): [] for variant in variants for count in self._plan.counts
        }
        for repeat in range(self._plan.repeats):
            turns = list(results)
            for variant, count in turns if repeat % 2 == 0 else reversed(turns):
                results[variant, count].append(self._once(variant, count))
        if self._world is not None and self._store is not None:
            rendezvous.exit_store(self._store, self._world, self._plan.placement.timeout)
        return results

    def _once(self, variant: Variant, count: int) -> Sample:
        with tempfile.TemporaryDirectory(prefix="flagscale-groups-") as directory:
            result = Path(directory) / "result.json"
            plan = TrialPlan(variant, count, self._plan, result)
            job = Job.of("flagscale.bench.groups.worker:run_trial", plan)
            if self._world is None or self._store is None:
                code = run_job(job, self.size)
            else:
                code = self._beside(job, self._world, self._store)
            if code:
                raise JobError(f"the measurement of {count} group(s), {variant}, failed ({code})")
            text = result.read_text() if result.exists() else None
        return self._shared(text)

    def _beside(self, job: Job, world: BenchWorld, store: Store) -> int:
        """This rank's process of one measurement, under a launcher."""
        key = f"place/{self._number}"
        if world.rank == 0:
            with socket.socket() as probe:
                probe.bind(("", 0))
                known = self._plan.placement.address or world.address or socket.gethostname()
                store.set(key, f"{known} {probe.getsockname()[1]}")
        host, port = store.get(key).decode().split()
        own = rank_environment(world.rank, world.size, world.local_rank, world.local_size)
        launchers = ("TORCHELASTIC_", "PMI", RENDEZVOUS_VARIABLE)
        environment = {k: v for k, v in own.items() if not k.startswith(launchers)}
        environment |= {"MASTER_ADDR": "127.0.0.1" if world.one_host else host, "MASTER_PORT": port}
        given = encode(job).encode()
        return subprocess.run(job.command, env=environment, input=given, check=False).returncode

    def _shared(self, text: str | None) -> Sample:
        """The sample that rank 0's process has written, for every rank."""
        self._number += 1
        if self._store is not None:
            key = f"sample/{self._number}"
            if text is not None:
                self._store.set(key, text)
            self._store.wait([key], timedelta(seconds=self._plan.placement.timeout))
            text = self._store.get(key).decode()
        if text is None:
            raise JobError("rank 0 left no result")
        return decode(Sample, text)
