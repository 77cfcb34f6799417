"""Fresh processes for each measurement: starting them, and what they do."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from flagscale.bench import meeting
from flagscale.bench.collectives import devices
from flagscale.bench.collectives.facts import folded
from flagscale.bench.groups.arms import Arm, Sample, measure, members_of
from flagscale.bench.spawn import spawn
from flagscale.bench.world import MEETING_VARIABLE, World
from flagscale.comm import registry
from flagscale.comm.base import DeviceType
from flagscale.errors import JobError

if TYPE_CHECKING:
    from flagscale.bench.groups.launch import Plan


def device_kind(wanted: str) -> DeviceType:
    """The kind of device that ``wanted`` means on this machine."""
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return "cuda" if wanted == "cuda" else "cpu"


def run_rank(arm: str, count: int, plan: Plan, world: World, result: Path) -> int:
    """One measurement, as one of its ranks; rank 0 writes ``result``."""
    store = meeting.meet(world, address=None, port=None, seconds=plan.place.timeout)
    device = devices.choose(plan.place.device, world.local_rank)
    name = plan.place.backend
    values = registry.options_of(name, plan.comm)
    backend = registry.usable(name, device.kind, given_by="--backend")
    backend.export(values)
    # All but one, as in a sub-group of a node; two ranks at least have something to say.
    members = plan.members or max(min(2, world.size), world.size - 1)
    groups = members_of(count, members, world.size)
    sample = measure(cast(Arm, arm), groups, world, store, device, backend, values)
    if world.rank == 0:
        result.write_text(json.dumps(asdict(sample)))
    dist.destroy_process_group()
    meeting.leave(world)
    meeting.part(store, world, plan.place.timeout)
    return 0


class Starter:
    """Starts the processes of every measurement: all of them here, or under a launcher each rank
    its own, which then meet at a port that rank 0 picks."""

    def __init__(self, plan: Plan, size: int, world: World | None) -> None:
        self._plan, self._size, self._world = plan, size, world
        self._number = 0
        place = plan.place
        self._store: Store | None = None
        if world is not None:
            self._store = meeting.meet(
                world, address=place.address, port=place.port, seconds=place.timeout
            )

    def hosts(self) -> str:
        """Which ranks are on which host."""
        if self._world is None or self._store is None:
            return f"{socket.gethostname()} [{folded(range(self._size))}]"
        self._store.set(f"host/{self._world.rank}", socket.gethostname())
        ranks: dict[str, list[int]] = {}
        for rank in range(self._size):
            host = self._store.get(f"host/{rank}").decode()
            ranks.setdefault(host, []).append(rank)
        return ", ".join(f"{host} [{folded(some)}]" for host, some in ranks.items())

    def run(self, arms: Sequence[str]) -> dict[tuple[Arm, int], list[Sample]]:
        """All measurements, the arms by turns. Under a launcher every rank gets them."""
        results: dict[tuple[Arm, int], list[Sample]] = {
            (cast(Arm, arm), count): [] for arm in arms for count in self._plan.counts
        }
        for repeat in range(self._plan.repeats):
            turns = list(results)
            for arm, count in turns if repeat % 2 == 0 else reversed(turns):
                results[arm, count].append(self._once(arm, count))
        if self._world is not None and self._store is not None:
            meeting.part(self._store, self._world, self._plan.place.timeout)
        return results

    def _once(self, arm: Arm, count: int) -> Sample:
        with tempfile.TemporaryDirectory(prefix="flagscale-groups-") as directory:
            result = Path(directory) / "result.json"
            plan = self._plan
            place = plan.place
            command = [sys.executable, "-m", "flagscale.bench.groups", "--backend", place.backend]
            command += ["--device", place.device, "--measure", arm, str(count)]
            command += ["--comm", *plan.comm] if plan.comm else []
            command += ["--members", str(plan.members)] if plan.members is not None else []
            command += ["--result", str(result)]
            if self._world is None or self._store is None:
                code = spawn(command, self._size)
            else:
                code = self._beside(command, self._world, self._store)
            if code:
                raise JobError(f"the measurement of {count} group(s), {arm}, failed ({code})")
            text = result.read_text() if result.exists() else None
        return self._shared(text)

    def _beside(self, command: Sequence[str], world: World, store: Store) -> int:
        """This rank's process of one measurement, under a launcher."""
        key = f"place/{self._number}"
        if world.rank == 0:
            with socket.socket() as probe:
                probe.bind(("", 0))
                known = self._plan.place.address or world.address or socket.gethostname()
                store.set(key, f"{known} {probe.getsockname()[1]}")
        host, port = store.get(key).decode().split()
        environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC_", "PMI"))},
            "RANK": str(world.rank),
            "WORLD_SIZE": str(world.size),
            "LOCAL_RANK": str(world.local_rank),
            "LOCAL_WORLD_SIZE": str(world.local_size),
            "MASTER_ADDR": "127.0.0.1" if world.one_host else host,
            "MASTER_PORT": port,
        }
        environment.pop(MEETING_VARIABLE, None)
        return subprocess.run(command, env=environment, check=False).returncode

    def _shared(self, text: str | None) -> Sample:
        """The sample that rank 0's process has written, for every rank."""
        self._number += 1
        if self._store is not None:
            key = f"sample/{self._number}"
            if text is not None:
                self._store.set(key, text)
            self._store.wait([key], timedelta(seconds=self._plan.place.timeout))
            text = self._store.get(key).decode()
        if text is None:
            raise JobError("rank 0 left no result")
        return Sample(**json.loads(text))
