"""Worker process of one arm and rank: trains its model in the arm's turns, and reports its
measurements.

Started by each rank of :mod:`.session`, once per arm, a compared way to reduce gradients
(:mod:`.arms`). The processes of all arms and ranks share one store. All have the same schedule
(:mod:`.schedule`), so that no coordinator is necessary: the last rank to finish a turn starts the
next one.
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
from flagscale.bench.options import parse_backend_options
from flagscale.bench.rank import rank_function
from flagscale.bench.training.byte_counts import connection_bytes, count_growth, read_nccl_log
from flagscale.bench.training.models.builder import ModelUnderTest, build_model
from flagscale.bench.training.plan import ArmPlan
from flagscale.bench.training.schedule import Block
from flagscale.bench.training.timing import StepClock
from flagscale.bench.world import BenchWorld
from flagscale.comm import registry
from flagscale.errors import JobError
from flagscale.records import encode

_NO_TIMEOUT = timedelta(days=30)
"""Timeout for another arm's turn. If that arm fails, its rank ends this process."""


@dataclass(frozen=True)
class RankStep:
    """One rank's measurement of a step, in seconds."""

    step: int
    round: int
    counts: bool
    """The step is part of the results."""
    seconds: float
    exposed: float
    """Time in which the backward pass only waited; see :mod:`.timing`."""
    communication: float | None
    loss: float | None


@dataclass(frozen=True)
class RankReport:
    """Report of one rank of one arm at its end."""

    host: str
    device: str
    version: str
    steps: tuple[RankStep, ...]
    parameters: int
    buckets: tuple[int, ...]
    digest: str
    """Hash of all parameters at the end."""
    to_ranks: dict[str, int]
    """Bytes sent to each rank in messages, as the backend counts them; empty if it does not."""
    datagrams: dict[str, int]
    """Bytes sent to each rank in datagrams."""
    connections: dict[str, int]
    """Bytes sent on each TCP connection, as the kernel counts them."""
    algorithms: dict[str, int]
    last_algorithm: str
    tail: dict[str, float]


def report_key(arm: int, rank: int) -> str:
    """Return the store's key of a report."""
    return f"report/{arm}/{rank}"


@rank_function
def run_arm(plan: ArmPlan, world: BenchWorld) -> int:
    """Train one arm as one of its ranks, and return the exit code.

    Raises:
        JobError: an all_reduce failed, or other ranks have ended.
    """
    try:
        return _train_arm(plan, world)
    except (dist.DistError, RuntimeError) as error:
        # The first line has the error of a device or connection; the others are a stack trace.
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        name = plan.session_plan.arms[plan.arm].name
        raise JobError(f"arm {name}, rank {world.rank}: {first_line}") from error


def _train_arm(plan: ArmPlan, world: BenchWorld) -> int:
    session = plan.session_plan
    timeout = timedelta(seconds=session.placement.timeout)
    store = TCPStore(plan.address, plan.port, None, False, timeout, wait_for_workers=False)
    trainer = _start_trainer(plan, world, store)
    blocks, arm = session.blocks, plan.arm
    if store.add("ready", 1) == world.size * len(session.arms):
        store.set("turn/0", "1")
    store.wait(["turn/0"], timeout)
    sent_before: _SentBytes | None = None
    for block in (block for block in blocks if block.arm == arm):
        store.wait([f"turn/{block.number}"], _NO_TIMEOUT)
        if block.round and sent_before is None:
            sent_before = trainer.sent_bytes()
        trainer.train(block)
        if world.rank == 0 and not session.quiet:
            print(f"# {trainer.format_progress(block)}", flush=True)
        if store.add(f"done/{block.number}", 1) == world.size:
            store.set(f"turn/{block.number + 1}", "1")
    store.set(
        report_key(arm, world.rank),
        encode(trainer.make_report(plan, sent_before or _SentBytes({}, {}, {}))),
    )
    # Other ranks may still be sending: do not exit before rank 0 has all reports.
    store.wait(["end"], _NO_TIMEOUT)
    dist.destroy_process_group()
    return 0


def _start_trainer(plan: ArmPlan, world: BenchWorld, store: TCPStore) -> _ArmTrainer:
    session, training = plan.session_plan, plan.session_plan.training
    arm, placement = session.arms[plan.arm], session.placement
    device = devices.select_rank_device(placement.device, world.local_rank)
    if placement.pin:
        devices.pin_to_cpu(world.local_rank)
    backend = registry.get_usable_backend(arm.backend, device.kind, source=f"arm {arm.name}")
    backend_options = parse_backend_options(
        [session_arm.backend for session_arm in session.arms], session.comm
    )[arm.backend]
    backend.export_options(backend_options)
    model = build_model(
        session.model, seed=training.seed, batch=training.batch, sequence=training.sequence
    )
    with backend.creation_context():
        dist.init_process_group(
            backend.torch_backend(device.kind),
            store=PrefixStore(f"arm{plan.arm}", store),
            rank=world.rank,
            world_size=world.size,
            timeout=timedelta(seconds=placement.timeout),
            **backend.init_options(device.torch_device, backend_options),
        )
    version = f"{backend.name} {backend.version() or ''}".strip()
    return _ArmTrainer(model, device, world, plan, version)


@dataclass(frozen=True)
class _SentBytes:
    """Bytes that this rank has sent so far, as counted by the backend and by the kernel; see
    :class:`RankReport`.
    """

    to_ranks: Mapping[str, int]
    datagrams: Mapping[str, int]
    connections: Mapping[str, int]


class _ArmTrainer:
    """A model in training under one arm."""

    def __init__(
        self,
        model_under_test: ModelUnderTest,
        device: Device,
        world: BenchWorld,
        plan: ArmPlan,
        version: str,
    ) -> None:
        self._model_under_test, self._device, self._world = model_under_test, device, world
        self._training, self._version = plan.session_plan.training, version
        self._name = plan.session_plan.arms[plan.arm].name
        model_under_test.module.to(device.torch_device)
        group = dist.group.WORLD
        assert group is not None
        self._clock = StepClock(device, group)
        with warnings.catch_warnings():
            # Batch statistics stay local to a rank: their broadcast would not use the arm's
            # algorithm. torch 2.13 deprecates this argument, and 2.11 has no other.
            warnings.simplefilter("ignore", FutureWarning)
            self._model = DistributedDataParallel(
                model_under_test.module,
                broadcast_buffers=False,
                bucket_cap_mb=self._training.bucket_mb,
            )
        hook: Callable[..., Any] = self._clock.hook
        self._model.register_comm_hook(None, hook)
        self._optimizer = model_under_test.new_optimizer()
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
            for name, tensor in self._model_under_test.batch(
                self._training.seed, step, self._world.rank
            ).items()
        }
        self._device.synchronize()
        begin = time.perf_counter()
        self._optimizer.zero_grad(set_to_none=False)
        self._clock.start()
        loss: Tensor = self._model(**batch)
        loss.backward()  # type: ignore[no-untyped-call]
        wait = self._clock.end_backward()
        self._optimizer.step()
        self._device.synchronize()
        seconds, value = time.perf_counter() - begin, float(loss.detach())
        self._steps.append(
            RankStep(
                step=step,
                round=block.round,
                counts=counts,
                seconds=seconds,
                exposed=min(wait.seconds, seconds),
                communication=self._clock.communication(),
                loss=value if math.isfinite(value) else None,
            )
        )

    def format_progress(self, block: Block) -> str:
        """Return a line on the turn that has just been trained."""
        steps = self._steps[-block.count :]
        turn = f"round {block.round}" if block.round else "warm-up"
        mean_seconds = sum(step.seconds for step in steps) / block.count
        loss = steps[-1].loss
        loss_text = "no number" if loss is None else f"{loss:.4g}"
        return f"{turn}: {self._name} {mean_seconds:.4g} s a step, loss {loss_text}"

    def sent_bytes(self) -> _SentBytes:
        """Return the bytes that this rank has sent so far."""
        return _SentBytes(
            self._count_by_rank("traffic"), self._count_by_rank("datagrams"), connection_bytes()
        )

    def _count_by_rank(self, counter_name: str) -> dict[str, int]:
        """Return bytes by rank from one of the backend's counters, each with a number of sends
        and bytes.
        """
        counter = getattr(self._backend, counter_name, None)
        counts = dict(counter()) if counter is not None else {}
        return {str(rank): int(counter[1]) for rank, counter in counts.items()}

    def make_report(self, plan: ArmPlan, sent_before: _SentBytes) -> RankReport:
        """Return this rank's report at the end."""
        sent_after = self.sent_bytes()
        tail_statistics = getattr(self._backend, "tail_statistics", None)
        last_algorithm = getattr(self._backend, "last_algorithm", None)
        statistics = (
            dict(tail_statistics())
            if tail_statistics is not None and not plan.session_plan.arms[plan.arm].exact
            else {}
        )
        return RankReport(
            host=os.uname().nodename,
            device=self._device.name,
            version=self._version,
            steps=tuple(self._steps),
            parameters=sum(p.numel() for p in self._model_under_test.module.parameters()),
            buckets=tuple(self._clock.buckets),
            digest=self._digest(),
            to_ranks=count_growth(sent_before.to_ranks, sent_after.to_ranks),
            datagrams=count_growth(sent_before.datagrams, sent_after.datagrams),
            connections=count_growth(sent_before.connections, sent_after.connections),
            algorithms=read_nccl_log(plan.log) if plan.log is not None else {},
            last_algorithm=str(last_algorithm()) if last_algorithm is not None else "",
            tail={k: float(v) for k, v in statistics.items() if isinstance(v, int | float)},
        )

    def _digest(self) -> str:
        digest = hashlib.sha256()
        for parameter in self._model_under_test.module.parameters():
            parameter_bytes = parameter.detach().to("cpu").contiguous().view(torch.uint8)
            digest.update(parameter_bytes.numpy().tobytes())
        return digest.hexdigest()
