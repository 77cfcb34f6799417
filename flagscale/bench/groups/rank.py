"""Fresh processes for each measurement: starting them, and what comes of all of them."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch
from torch._C._distributed_c10d import Store

from flagscale.bench import codec, rendezvous
from flagscale.bench.collectives.facts import folded
from flagscale.bench.groups.plan import ON_ACCELERATORS, GroupsPlan, Sample, TrialPlan, Variant
from flagscale.bench.groups.summary import Results, findings, table
from flagscale.bench.machine import facts
from flagscale.bench.rank import Job
from flagscale.bench.spawn import interruptible, rank_environment, run_job
from flagscale.bench.world import RENDEZVOUS_VARIABLE, BenchWorld
from flagscale.comm import registry
from flagscale.errors import ConfigError, JobError

_TRIAL = "flagscale.bench.groups.trial:run_rank"


@interruptible()
def run_rank(plan: GroupsPlan, world: BenchWorld | None) -> int:
    """Everything, as one of the ranks of a launcher, or as their one starter; the exit code."""
    wanted = plan.placement.device
    on_gpu = wanted == "cuda" or (wanted == "auto" and torch.cuda.is_available())
    name = plan.placement.backend
    backend = registry.usable(name, "cuda" if on_gpu else "cpu", given_by="--backend")
    variants = [v for v in plan.variants if on_gpu or v not in ON_ACCELERATORS]
    left_out = [v for v in plan.variants if v not in variants]
    if not variants:
        raise ConfigError(f"{', '.join(left_out)}: only accelerators can be bound")
    speaks = world is None or world.rank == 0
    starter = _Starter(plan, world)
    hosts = starter.hosts()
    if speaks:
        given = f" ({', '.join(plan.comm)})" if plan.comm else ""
        version = f"backend {backend.name} {backend.version() or ''}".rstrip()
        print(f"# {starter.size} ranks, {version}{given}")
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
            job = Job.of(_TRIAL, TrialPlan(variant, count, self._plan, result))
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
        given = codec.encode(job).encode()
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
        return codec.decode(Sample, text)
