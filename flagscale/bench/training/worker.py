"""A process of one arm: it trains its model in the arm's turns and tells what it measured.

Processes of all arms and ranks meet at one store. The schedule is the same for all, so the turns
need no leader: whoever is the last to finish a turn calls the next.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.nn.parallel import DistributedDataParallel

from flagscale.accelerators.device import Device
from flagscale.bench.collectives import devices
from flagscale.bench.command_line import judge
from flagscale.bench.training.counting import connections, grown, read_nccl
from flagscale.bench.training.models.trainee import Trainee, make
from flagscale.bench.training.plan import ArmPlan
from flagscale.bench.training.schedule import Block
from flagscale.bench.training.timing import Clock
from flagscale.bench.world import BenchWorld
from flagscale.comm import registry
from flagscale.errors import JobError
from flagscale.records import encode

_FOREVER = timedelta(days=30)
"""A turn of others ends when they are done, or when this process is ended because they failed."""


@dataclass(frozen=True)
class RankStep:
    """One rank's measurement of a step, seconds."""

    step: int
    round: int
    counts: bool
    seconds: float
    exposed: float
    communication: float | None
    loss: float | None


@dataclass(frozen=True)
class RankReport:
    """What one rank of one arm tells at its end."""

    host: str
    device: str
    version: str
    steps: tuple[RankStep, ...]
    parameters: int
    buckets: tuple[int, ...]
    digest: str
    """Of all parameters, as they ended."""
    to_ranks: dict[str, int]
    """Bytes sent to each rank by messages, by the backend's own count; empty where it has none."""
    datagrams: dict[str, int]
    """And by datagrams."""
    connections: dict[str, int]
    """Bytes sent on each TCP connection, by the kernel's."""
    algorithms: dict[str, int]
    last_algorithm: str
    tail: dict[str, float]


def report_key(arm: int, rank: int) -> str:
    """Where a report lies in the store."""
    return f"report/{arm}/{rank}"


def run_arm(plan: ArmPlan, world: BenchWorld) -> int:
    """Train one arm as one of its ranks; the exit code.

    Raises:
        JobError: a sum failed, or the others have ended.
    """
    try:
        return _run(plan, world)
    except (dist.DistError, RuntimeError) as error:
        # The text of a device's error or a lost connection; what follows is addresses.
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        name = plan.of.arms[plan.arm].name
        raise JobError(f"arm {name}, rank {world.rank}: {first}") from error


def _run(plan: ArmPlan, world: BenchWorld) -> int:
    session = plan.of
    timeout = timedelta(seconds=session.placement.timeout)
    store = TCPStore(plan.address, plan.port, None, False, timeout, wait_for_workers=False)
    worker = _join(plan, world, store)
    blocks, own = session.blocks, plan.arm
    if store.add("ready", 1) == world.size * len(session.arms):
        store.set("turn/0", "1")
    store.wait(["turn/0"], timeout)
    before: _Sent | None = None
    for block in (block for block in blocks if block.arm == own):
        store.wait([f"turn/{block.number}"], _FOREVER)
        if block.round and before is None:
            before = worker.sent()
        worker.train(block)
        if world.rank == 0 and not session.quiet:
            print(f"# {worker.progress(block)}", flush=True)
        if store.add(f"done/{block.number}", 1) == world.size:
            store.set(f"turn/{block.number + 1}", "1")
    store.set(report_key(own, world.rank), encode(worker.report(plan, before or _Sent({}, {}, {}))))
    # Nobody leaves while others may still be sending: rank 0 has to have all reports.
    store.wait(["end"], _FOREVER)
    dist.destroy_process_group()
    return 0


def _join(plan: ArmPlan, world: BenchWorld, store: TCPStore) -> _Worker:
    session, training = plan.of, plan.of.training
    arm, place = session.arms[plan.arm], session.placement
    device = devices.choose(place.device, world.local_rank)
    if place.pin:
        devices.pin(world.local_rank)
    backend = registry.usable(arm.backend, device.kind, given_by=f"arm {arm.name}")
    values = judge([one.backend for one in session.arms], session.comm)[arm.backend]
    backend.export(values)
    trainee = make(
        session.model, seed=training.seed, batch=training.batch, sequence=training.sequence
    )
    with backend.creating():
        dist.init_process_group(
            backend.torch_backend(device.kind),
            store=PrefixStore(f"arm{plan.arm}", store),
            rank=world.rank,
            world_size=world.size,
            timeout=timedelta(seconds=place.timeout),
            **backend.init_options(device.torch_device, values),
        )
    version = f"{backend.name} {backend.version() or ''}".strip()
    return _Worker(trainee, device, world, plan, version)


@dataclass(frozen=True)
class _Sent:
    """Bytes that this rank has sent until now, by both counts."""

    to_ranks: Mapping[str, int]
    datagrams: Mapping[str, int]
    connections: Mapping[str, int]


class _Worker:
    """A model in training under one arm."""

    def __init__(
        self, trainee: Trainee, device: Device, world: BenchWorld, plan: ArmPlan, version: str
    ) -> None:
        self._trainee, self._device, self._world = trainee, device, world
        self._training, self._version = plan.of.training, version
        self._name = plan.of.arms[plan.arm].name
        trainee.module.to(device.torch_device)
        group = dist.group.WORLD
        assert group is not None
        self._clock = Clock(device, group)
        with warnings.catch_warnings():
            # Statistics of batches stay a rank's own: to spread them would be traffic of no arm.
            # torch 2.13 calls that argument old, and 2.11 has no other.
            warnings.simplefilter("ignore", FutureWarning)
            self._model = DistributedDataParallel(
                trainee.module, broadcast_buffers=False, bucket_cap_mb=self._training.bucket_mb
            )
        hook: Callable[..., Any] = self._clock.hook
        self._model.register_comm_hook(None, hook)
        self._optimizer = trainee.optimizer()
        self._backend: Any = group._get_backend(device.torch_device)
        self._steps: list[RankStep] = []

    def train(self, block: Block) -> None:
        """Train the steps of a turn."""
        for number in range(block.count):
            counts = block.round > 0 and number >= self._training.settle
            self._step(block.first + number, block, counts=counts)

    def _step(self, step: int, block: Block, *, counts: bool) -> None:
        batch = {
            name: tensor.to(self._device.torch_device)
            for name, tensor in self._trainee.batch(
                self._training.seed, step, self._world.rank
            ).items()
        }
        self._device.synchronize()
        begin = time.perf_counter()
        self._optimizer.zero_grad(set_to_none=False)
        self._clock.start()
        loss: Tensor = self._model(**batch)
        loss.backward()  # type: ignore[no-untyped-call]
        wait = self._clock.waited()
        self._optimizer.step()
        self._device.synchronize()
        seconds, value = time.perf_counter() - begin, float(loss.detach())
        self._steps.append(
            RankStep(
                *(step, block.round, counts, seconds),
                exposed=min(wait.seconds, seconds),
                communication=self._clock.communication(),
                loss=value if math.isfinite(value) else None,
            )
        )

    def progress(self, block: Block) -> str:
        """A line on the turn that has just been trained."""
        own = self._steps[-block.count :]
        where = f"round {block.round}" if block.round else "warm-up"
        spent = sum(one.seconds for one in own) / block.count
        loss = own[-1].loss
        told = "no number" if loss is None else f"{loss:.4g}"
        return f"{where}: {self._name} {spent:.4g} s a step, loss {told}"

    def sent(self) -> _Sent:
        """What this rank has sent so far."""
        return _Sent(self._counted("traffic"), self._counted("datagrams"), connections())

    def _counted(self, name: str) -> dict[str, int]:
        """Bytes by rank, of what the backend tells: how often and how much."""
        count = getattr(self._backend, name, None)
        told = dict(count()) if count is not None else {}
        return {str(rank): int(sent[1]) for rank, sent in told.items()}

    def report(self, plan: ArmPlan, before: _Sent) -> RankReport:
        """What this rank tells at the end."""
        after = self.sent()
        tail = getattr(self._backend, "tail_statistics", None)
        last = getattr(self._backend, "last_algorithm", None)
        told = dict(tail()) if tail is not None and not plan.of.arms[plan.arm].exact else {}
        return RankReport(
            host=os.uname().nodename,
            device=self._device.name,
            version=self._version,
            steps=tuple(self._steps),
            parameters=sum(p.numel() for p in self._trainee.module.parameters()),
            buckets=tuple(self._clock.buckets),
            digest=self._digest(),
            to_ranks=grown(before.to_ranks, after.to_ranks),
            datagrams=grown(before.datagrams, after.datagrams),
            connections=grown(before.connections, after.connections),
            algorithms=read_nccl(plan.log) if plan.log is not None else {},
            last_algorithm=str(last()) if last is not None else "",
            tail={k: float(v) for k, v in told.items() if isinstance(v, int | float)},
        )

    def _digest(self) -> str:
        found = hashlib.sha256()
        for parameter in self._trainee.module.parameters():
            whole = parameter.detach().to("cpu").contiguous().view(torch.uint8)
            found.update(whole.numpy().tobytes())
        return found.hexdigest()
