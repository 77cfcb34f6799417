"""Rank of a training session: starts one process per arm (:mod:`.worker`) and monitors them.

A session is one model trained under one network setting by all arms, the compared ways to reduce
gradients (:mod:`.arms`). Each process has the environment variables of its arm. Rank 0 combines
their reports. Started by :mod:`.cli`.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from flagscale.accelerators.registry import choose_accelerator
from flagscale.bench import rendezvous
from flagscale.bench.rank import rank_function
from flagscale.bench.training.arms import require_supported
from flagscale.bench.training.byte_counts import (
    add_matrices,
    covers_gradients,
    matrix_from_connections,
    matrix_from_counts,
)
from flagscale.bench.training.plan import ArmPlan, SessionPlan
from flagscale.bench.training.results import ArmResult, SessionResult, Steps, TrainingSubject
from flagscale.bench.training.worker import RankReport, report_key
from flagscale.bench.world import (
    RENDEZVOUS_VARIABLE,
    STARTER_VARIABLE,
    BenchWorld,
    rank_environment,
)
from flagscale.errors import JobError
from flagscale.files import write_atomic
from flagscale.hosts.connection import Closeable
from flagscale.hosts.workers.children import ChildProcesses, unwind_on_signal
from flagscale.hosts.workers.task import WorkerTask
from flagscale.records import decode, encode

_POLL_SECONDS = 0.05
_ARM_FUNCTION = "flagscale.bench.training.worker:run_arm"
_LAUNCHER_VARIABLES = ("TORCHELASTIC_", RENDEZVOUS_VARIABLE, STARTER_VARIABLE)
"""Prefixes of variables that a process of an arm must not inherit: with them it would join this
rank's rendezvous.
"""


@rank_function
@unwind_on_signal()
def run_rank(plan: SessionPlan, world: BenchWorld) -> int:
    """Run a session as one of its ranks, and return the exit code.

    Raises:
        ConfigError: this host does not support an arm.
        JobError: a process of an arm failed.
    """
    require_supported(plan.arms, choose_accelerator(plan.placement.device).name)
    placement = plan.placement
    store = rendezvous.rendezvous(world, placement.timeout, placement.address, placement.port)
    if not isinstance(store, TCPStore):
        raise JobError(f"the ranks met at a {type(store).__name__}; training needs a TCPStore")
    with (
        tempfile.TemporaryDirectory(prefix="flagscale-arms-") as directory,
        ArmProcesses(plan, world, store, Path(directory)) as arms,
    ):
        arms.wait_for_reports()
        if world.rank == 0:
            result = _collect_results(plan, world, store)
            write_atomic(plan.result, encode(result), durable=False)
            store.set("end", "1")
        arms.wait()
    rendezvous.remove_files(world)
    rendezvous.leave_store(store, world, placement.timeout)
    return 0


class ArmProcesses(Closeable):
    """This rank's processes, one per arm. As a context manager it ends them on exit."""

    def __init__(
        self, plan: SessionPlan, world: BenchWorld, store: TCPStore, directory: Path
    ) -> None:
        self._plan = plan
        self._world = world
        self._store = store
        self._children = ChildProcesses()
        try:
            for arm in range(len(plan.arms)):
                self._start(arm, directory)
        except BaseException:
            self.close()
            raise
        self._report_keys = [
            report_key(arm, rank) for arm in range(len(plan.arms)) for rank in range(world.size)
        ]

    def _start(self, number: int, directory: Path) -> None:
        arm, world = self._plan.arms[number], self._world
        nccl_log = directory / f"nccl_{number}" if arm.backend == "nccl" else None
        task = WorkerTask.create(
            _ARM_FUNCTION, ArmPlan(number, self._plan, self._store.host, self._store.port, nccl_log)
        )
        variables = rank_environment(world.rank, world.size, world.local_rank, world.local_size)
        environment = {k: v for k, v in variables.items() if not k.startswith(_LAUNCHER_VARIABLES)}
        environment |= {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        environment |= dict(arm.environment)
        environment |= {"NCCL_DEBUG_FILE": str(nccl_log)} if nccl_log is not None else {}
        self._children.start(task.command, environment, stdin=task.to_stdin())

    def wait_for_reports(self) -> None:
        """Wait until every process of all ranks has reported its measurements.

        Raises:
            JobError: a process of this rank has failed.
        """
        while not self._all_reported():
            self._raise_on_failure()
            if None not in self._children.poll():
                raise JobError(f"rank {self._world.rank}: its processes ended without a report")
            time.sleep(_POLL_SECONDS)

    def _all_reported(self) -> bool:
        try:
            return bool(self._store.check(self._report_keys))
        except (dist.DistError, RuntimeError) as error:
            text = f"rank {self._world.rank}: rank 0, at whose store all meet, has ended"
            raise JobError(text) from error

    def wait(self) -> None:
        """Wait until all processes of this rank have ended.

        Raises:
            JobError: one has failed.
        """
        while None in self._children.poll():
            self._raise_on_failure()
            time.sleep(_POLL_SECONDS)
        self._raise_on_failure()

    def close(self) -> None:
        """End the processes that still run."""
        self._children.close()

    def _raise_on_failure(self) -> None:
        for arm, code in zip(self._plan.arms, self._children.poll(), strict=True):
            if code:
                ending = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                raise JobError(
                    f"arm {arm.name}, rank {self._world.rank}: its process failed: {ending}"
                )


def _collect_results(plan: SessionPlan, world: BenchWorld, store: Store) -> SessionResult:
    arm_reports = []
    for number in range(len(plan.arms)):
        texts = [store.get(report_key(number, rank)) for rank in range(world.size)]
        arm_reports.append([decode(RankReport, text) for text in texts])
    first_arm_reports = arm_reports[0]
    return SessionResult(
        model=TrainingSubject(plan.model.name, plan.model.title),
        setting=plan.setting,
        ranks=world.size,
        device=first_arm_reports[0].device,
        hosts=tuple(report.host for report in first_arm_reports),
        arms=tuple(
            combine_reports(plan, number, reports) for number, reports in enumerate(arm_reports)
        ),
    )


def combine_reports(plan: SessionPlan, arm: int, reports: Sequence[RankReport]) -> ArmResult:
    """Combine the reports of an arm's ranks."""
    first_report = reports[0]
    datagrams = matrix_from_counts([report.datagrams for report in reports])
    sent = add_matrices(matrix_from_counts([report.to_ranks for report in reports]), datagrams)
    counted_by_backend = any(map(any, sent))
    if not counted_by_backend:
        sent = matrix_from_connections([report.connections for report in reports])
    steps = sum(step.round > 0 for step in first_report.steps)
    is_counted = covers_gradients(sent, sum(first_report.buckets) * steps)
    backend = first_report.version.partition(" ")[0]
    return ArmResult(
        arm=plan.arms[arm],
        version=first_report.version,
        steps=_combine_steps(reports, counting=True),
        settling=_combine_steps(reports, counting=False),
        parameters=first_report.parameters,
        buckets=first_report.buckets,
        replicas_equal=len({report.digest for report in reports}) == 1,
        sent=sent if is_counted else (),
        datagrams=datagrams if is_counted and any(map(any, datagrams)) else (),
        counted_by=(backend if counted_by_backend else "the kernel, by connection")
        if is_counted
        else "",
        algorithms=first_report.algorithms,
        last_algorithm=first_report.last_algorithm,
        tail=_sum_statistics([report.tail for report in reports]),
    )


def _combine_steps(reports: Sequence[RankReport], *, counting: bool) -> Steps:
    """Combine all ranks' measurements of each step as described in :class:`.Steps`. ``counting``
    selects the steps that count, or those that do not.
    """
    rows = zip(*(report.steps for report in reports), strict=True)
    steps_by_rank = [row for row in rows if row[0].counts == counting]
    communication = [[step.communication for step in row] for row in steps_by_rank]
    measured_times = [[x for x in row if x is not None] for row in communication]
    return Steps(
        step=tuple(row[0].step for row in steps_by_rank),
        round=tuple(row[0].round for row in steps_by_rank),
        seconds=tuple(max(step.seconds for step in row) for row in steps_by_rank),
        exposed=tuple(min(step.exposed for step in row) for row in steps_by_rank),
        communication=tuple(map(min, measured_times)) if measured_times == communication else (),
        loss=tuple(_mean_loss([step.loss for step in row]) for row in steps_by_rank),
    )


def _mean_loss(losses: Sequence[float | None]) -> float | None:
    finite = [loss for loss in losses if loss is not None]
    return fmean(finite) if len(finite) == len(losses) else None


def _sum_statistics(tails: Sequence[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for tail in tails for name in tail)
    return {name: sum(tail.get(name, 0.0) for tail in tails) for name in names}
