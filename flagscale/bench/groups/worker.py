"""Ranks of ``flagscale bench groups``, and the table and findings of all measurements.

A rank (:func:`run_rank`) starts a fresh process for each trial (:func:`run_trial`). That process
creates the default group and other groups, and runs the first two operations on these; ``--help``
lists the variants. ``warm`` is the control: without it the process's first communicator is counted
as the cost of the subgroup. With a ``device_id``, as in ``bound``, ``new_group`` may split the
default group's communicator (ncclCommSplit).
"""

from __future__ import annotations

import json
import socket
import statistics
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
from flagscale.accelerators.registry import choose_accelerator
from flagscale.bench import rendezvous
from flagscale.bench.collectives import devices
from flagscale.bench.groups.cli import ACCELERATOR_VARIANTS, GroupsPlan, Sample, TrialPlan, Variant
from flagscale.bench.machine import describe_machine
from flagscale.bench.rank import rank_function
from flagscale.bench.rendezvous import barrier
from flagscale.bench.starters.local import run_local_task
from flagscale.bench.statistics import median_ratio
from flagscale.bench.world import RENDEZVOUS_VARIABLE, BenchWorld, rank_environment
from flagscale.comm import registry
from flagscale.errors import ConfigError, JobError
from flagscale.hosts.names import format_ranges
from flagscale.hosts.workers.children import ChildProcesses, unwind_on_signal
from flagscale.hosts.workers.task import WorkerTask
from flagscale.records import decode, encode

_TIMEOUT = timedelta(minutes=10)
_MIB = 2**20


@rank_function
def run_trial(plan: TrialPlan, world: BenchWorld) -> int:
    """Run one measurement as one of its ranks; rank 0 writes the result."""
    placement = plan.plan_of_all.placement
    store = rendezvous.rendezvous(world, placement.timeout)
    # All but one rank, as in a subgroup of a node; at least two, because one has no peer.
    members = plan.plan_of_all.members or max(min(2, world.size), world.size - 1)
    groups = [list(plan.plan_of_all.ranks)] * plan.count if plan.plan_of_all.ranks else []
    groups = groups or rotate_members(plan.count, members, world.size)
    sample = _measure_variant(plan, groups, world, store)
    if world.rank == 0:
        plan.result.write_text(encode(sample))
    dist.destroy_process_group()
    rendezvous.remove_files(world)
    rendezvous.leave_store(store, world, placement.timeout)
    return 0


def rotate_members(count: int, members: int, world: int) -> list[list[int]]:
    """Return ``count`` groups of ``members`` ranks, each starting one rank after the previous
    one.
    """
    return [sorted((first + i) % world for i in range(members)) for first in range(count)]


def _measure_variant(
    plan: TrialPlan, groups: list[list[int]], world: BenchWorld, store: Store
) -> Sample:
    """Measure one variant in this fresh process; every rank of ``world`` calls it."""
    placement, variant = plan.plan_of_all.placement, plan.variant
    device = devices.select_rank_device(placement.device, world.local_rank)
    backend_options = registry.parse_backend_options(placement.backend, plan.plan_of_all.comm)
    backend = registry.get_usable_backend(placement.backend, device.kind, source="--backend")
    backend.export_options(backend_options)
    initial_bytes = _used_bytes(device)
    barrier(store, world, "start", _TIMEOUT)
    begin = time.perf_counter()
    with backend.creation_context():
        pg_options = backend.init_options(device.torch_device, backend_options).get("pg_options")
        options: dict[str, Any] = {"timeout": _TIMEOUT, "pg_options": pg_options}
        group_options: dict[str, Any] = {"backend": backend.torch_backend(device.kind), **options}
        device_arguments: dict[str, Any] = (
            {"device_id": device.torch_device} if variant in ACCELERATOR_VARIANTS else {}
        )
        rendezvous.init_default_group(
            PrefixStore("world", store), world, **group_options, **device_arguments
        )
        world_seconds = time.perf_counter() - begin
        if variant == "warm":
            _all_reduce(None, device, plan.plan_of_all.bytes)
        barrier(store, world, "create", _TIMEOUT)
        begin = time.perf_counter()
        if variant == "split":
            handles = [dist.split_group(None, [ranks], **options) for ranks in groups]
        else:
            handles = [dist.new_group(ranks, **group_options) for ranks in groups]
    device.synchronize()
    create_seconds = time.perf_counter() - begin
    own_groups = [h for h, ranks in zip(handles, groups, strict=True) if world.rank in ranks]
    first_seconds, second_seconds = (
        _time_operations(name, own_groups, store, world, device, plan)
        for name in ("first", "second")
    )
    memory = (_used_bytes(device) - initial_bytes) / _MIB
    sample = Sample(
        world_seconds,
        create_seconds,
        first_seconds,
        second_seconds,
        memory,
        splits=_count_splits(device),
    )
    return _max_over_ranks(sample, world, store)


def _time_operations(
    name: str, handles: list[Any], store: Store, world: BenchWorld, device: Device, plan: TrialPlan
) -> float:
    """Return the seconds of an operation on each of this rank's groups, one after the other."""
    barrier(store, world, name, _TIMEOUT)
    begin = time.perf_counter()
    for handle in handles:
        _all_reduce(handle, device, plan.plan_of_all.bytes)
    return time.perf_counter() - begin


def _all_reduce(group: dist.ProcessGroup | None, device: Device, size: int) -> None:
    dist.all_reduce(torch.ones(size // 4, device=device.torch_device), group=group)
    device.synchronize()


def _used_bytes(device: Device) -> float:
    """Return the device memory in use by all processes, because NCCL's is not counted by torch."""
    return float(device.accelerator.used_memory(device.torch_device))


def _count_splits(device: Device) -> int:
    """Return the backend's count of splits of the default group's communicator."""
    backend: Any = _get_default_group()._get_backend(device.torch_device)
    return int(backend.comm_split_count()) if hasattr(backend, "comm_split_count") else -1


def _max_over_ranks(sample: Sample, world: BenchWorld, store: Store) -> Sample:
    """Return the maximum of every number over the ranks."""
    store.set(f"sample/{world.rank}", encode(sample))
    texts = [store.get(f"sample/{rank}") for rank in range(world.size)]
    samples = [asdict(decode(Sample, text)) for text in texts]
    barrier(store, world, "end", _TIMEOUT)
    return Sample(**{name: max(s[name] for s in samples) for name in samples[0]})


Results = Mapping[tuple[Variant, int], Sequence[Sample]]
"""Samples of each variant and number of groups, in the order of measurement."""

_COLUMNS = ("world", "create", "first", "second", "total")
_MIN_TRIALS = 10


def make_table(results: Results) -> list[str]:
    """Return medians in milliseconds, and MiB of device memory."""
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
        splits_text = "n/a" if splits == {-1} else "/".join(str(s) for s in sorted(splits))
        lines.append(
            f"{variant:>7}  {count:>6}  {len(samples):>4}{cells}  {memory:>8.0f}  {splits_text:>6}"
        )
    return lines


def list_findings(results: Results) -> list[str]:
    """Return sentences on the measurements: whether communicators were split, and the ratios of
    times between variants.
    """
    lines = []
    for count in dict.fromkeys(count for _, count in results):
        samples_by_variant = {
            variant: results[variant, count] for variant, c in results if c == count
        }
        lines += _findings_for_count(samples_by_variant, count)
    min_trials = min(len(samples) for samples in results.values())
    if min_trials < _MIN_TRIALS:
        trials_text = f"{min_trials} run{'s' if min_trials > 1 else ''} a variant"
        lines.append(f"{trials_text}: take at least {_MIN_TRIALS} before a ratio is relied on.")
    if any(variant in ACCELERATOR_VARIANTS for variant, _ in results):
        lines.append(
            "A bound default group runs unbatched sends and receives one after the other on one "
            "communicator: weigh that against the gain."
        )
    return lines


def _findings_for_count(
    samples_by_variant: Mapping[Variant, Sequence[Sample]], count: int
) -> list[str]:
    groups = f"{count} group{'s' if count > 1 else ''}"
    lines = []
    control, cold = samples_by_variant.get("warm"), samples_by_variant.get("cold")
    for variant in (variant for variant in ACCELERATOR_VARIANTS if variant in samples_by_variant):
        samples = samples_by_variant[variant]
        lines.append(f"{variant}: {_describe_splits(samples, count)}")
        if control is not None:
            lines.append(
                f"{variant} against the warmed control: {_compare_usable(control, samples)}"
            )
        if cold is not None:
            contains = "contains the process's first communicator and is not a gain of splitting"
            lines.append(
                f"{variant} against cold: {_compare_usable(cold, samples)}; this {contains}"
            )
    if control is not None and cold is not None:
        ratio = _compare_usable(cold, control)
        lines.append(f"warm against cold (the first communicator alone): {ratio}")
    return [f"{groups}, {line}" for line in lines]


def _describe_splits(samples: Sequence[Sample], count: int) -> str:
    split_counts = {s.splits for s in samples}
    if split_counts == {-1}:
        return "the backend does not tell whether it split"
    if all(s >= count for s in split_counts):
        return f"proved: the backend counts {max(split_counts)} splits"
    return f"NOT split: the backend counts {max(split_counts)} splits of {count}"


def _compare_usable(slow: Sequence[Sample], fast: Sequence[Sample]) -> str:
    if min(len(slow), len(fast)) < 2:
        return "a single run each, which shows no difference"
    ratio = median_ratio([s.usable for s in slow], [s.usable for s in fast])
    saved_seconds = statistics.median(s.usable for s in slow) - statistics.median(
        s.usable for s in fast
    )
    verdict = "" if ratio.is_significant else " (no difference shown)"
    interval = f"95 % interval {ratio.low:.2f} to {ratio.high:.2f}{verdict}"
    return (
        f"usable {ratio.value:.2f} times as fast, {interval}; {saved_seconds * 1e3:+.1f} ms saved"
    )


@rank_function
def run_rank(plan: GroupsPlan, world: BenchWorld) -> int:
    """Run all measurements as a rank of a launcher, and return the exit code."""
    return measure_groups(plan, world)


@unwind_on_signal()
def measure_groups(plan: GroupsPlan, world: BenchWorld | None) -> int:
    """Run all measurements and return the exit code. Without a world this process starts the ranks
    of every measurement on this host."""
    accelerator = choose_accelerator(plan.placement.device)
    backend = registry.get_usable_backend(
        plan.placement.backend, accelerator.name, source="--backend"
    )
    variants = [
        v for v in plan.variants if not accelerator.is_host or v not in ACCELERATOR_VARIANTS
    ]
    unsupported = [v for v in plan.variants if v not in variants]
    if not variants:
        raise ConfigError(f"{', '.join(unsupported)}: only accelerators can be bound")
    is_printing = world is None or world.rank == 0
    starter = _TrialStarter(plan, world)
    hosts = starter.hosts()
    if is_printing:
        comm_options = f" ({', '.join(plan.comm)})" if plan.comm else ""
        version = f"torch {torch.__version__}, backend {backend.name} {backend.version() or ''}"
        print(f"# {starter.size} ranks, {version.rstrip()}{comm_options}")
        print(f"# {hosts}; started by {world.launcher if world is not None else 'local'}")
        for variant in unsupported:
            print(f"# {variant}: left out, only accelerators can be bound")
        sys.stdout.flush()
    conditions = describe_machine("flagscale", "torch") if plan.json is not None else {}
    results = starter.run(variants)
    if not is_printing:
        return 0
    for line in (*make_table(results), "", *list_findings(results)):
        print(line)
    if plan.json is not None:
        rows = [
            {"arm": variant, "groups": count, "samples": [asdict(s) for s in samples]}
            for (variant, count), samples in results.items()
        ]
        conditions |= {"ranks": starter.size, "hosts": hosts.count(" ["), "backend": backend.name}
        conditions |= {"options": list(plan.comm)} if plan.comm else {}
        plan.json.write_text(json.dumps({**conditions, "results": rows}, indent=1) + "\n")
    return 0


class _TrialStarter:
    """Starts the processes of every measurement: all of them on this host, or under a launcher
    one per rank, which meet at a port that rank 0 chooses.
    """

    def __init__(self, plan: GroupsPlan, world: BenchWorld | None) -> None:
        self._plan, self._world = plan, world
        self._trial_number = 0
        self._store: Store | None = None
        self.size = plan.placement.ranks or 1
        if world is not None:
            placement, self.size = plan.placement, world.size
            self._store = rendezvous.rendezvous(
                world, placement.timeout, placement.address, placement.port
            )

    def hosts(self) -> str:
        """Return the ranks of each host in words."""
        if self._world is None or self._store is None:
            return f"{socket.gethostname()} [{format_ranges(range(self.size))}]"
        self._store.set(f"host/{self._world.rank}", socket.gethostname())
        ranks: dict[str, list[int]] = {}
        for rank in range(self.size):
            host = self._store.get(f"host/{rank}").decode()
            ranks.setdefault(host, []).append(rank)
        return ", ".join(
            f"{host} [{format_ranges(host_ranks)}]" for host, host_ranks in ranks.items()
        )

    def run(self, variants: Sequence[Variant]) -> Results:
        """Run all measurements with the variants by turns. Under a launcher every rank returns
        the results.
        """
        results: dict[tuple[Variant, int], list[Sample]] = {
            (variant, count): [] for variant in variants for count in self._plan.counts
        }
        for repeat in range(self._plan.repeats):
            turns = list(results)
            for variant, count in turns if repeat % 2 == 0 else reversed(turns):
                results[variant, count].append(self._run_trial_processes(variant, count))
        if self._world is not None and self._store is not None:
            rendezvous.leave_store(self._store, self._world, self._plan.placement.timeout)
        return results

    def _run_trial_processes(self, variant: Variant, count: int) -> Sample:
        with tempfile.TemporaryDirectory(prefix="flagscale-groups-") as directory:
            result = Path(directory) / "result.json"
            plan = TrialPlan(variant, count, self._plan, result)
            task = WorkerTask.create("flagscale.bench.groups.worker:run_trial", plan)
            if self._world is None or self._store is None:
                code = run_local_task(task, self.size)
            else:
                code = self._run_own_process(task, self._world, self._store)
            if code:
                raise JobError(f"the measurement of {count} group(s), {variant}, failed ({code})")
            text = result.read_text() if result.exists() else None
        return self._share_sample(text)

    def _run_own_process(self, task: WorkerTask, world: BenchWorld, store: Store) -> int:
        """Run this rank's process of one measurement under a launcher."""
        key = f"place/{self._trial_number}"
        if world.rank == 0:
            with socket.socket() as sock:
                sock.bind(("", 0))
                host_name = self._plan.placement.address or world.address or socket.gethostname()
                store.set(key, f"{host_name} {sock.getsockname()[1]}")
        host, port = store.get(key).decode().split()
        variables = rank_environment(world.rank, world.size, world.local_rank, world.local_size)
        launcher_prefixes = ("TORCHELASTIC_", "PMI", RENDEZVOUS_VARIABLE)
        environment = {k: v for k, v in variables.items() if not k.startswith(launcher_prefixes)}
        environment |= {"MASTER_ADDR": "127.0.0.1" if world.one_host else host, "MASTER_PORT": port}
        with ChildProcesses() as children:
            return children.start(task.command, environment, stdin=task.to_stdin()).wait()

    def _share_sample(self, text: str | None) -> Sample:
        """Return the sample that rank 0's process has written, on every rank."""
        self._trial_number += 1
        if self._store is not None:
            key = f"sample/{self._trial_number}"
            if text is not None:
                self._store.set(key, text)
            self._store.wait([key], timedelta(seconds=self._plan.placement.timeout))
            text = self._store.get(key).decode()
        if text is None:
            raise JobError("rank 0 left no result")
        return decode(Sample, text)
