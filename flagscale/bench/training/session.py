"""One rank of a session: it starts a process of every arm, each in its arm's environment, watches
them, and rank 0 puts together what they tell."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from statistics import fmean

import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from flagscale.accelerators.registry import chosen
from flagscale.bench import rendezvous
from flagscale.bench.rank import Job
from flagscale.bench.spawn import interruptible, rank_environment
from flagscale.bench.training.arms import require
from flagscale.bench.training.counting import added, between, matrix, seen
from flagscale.bench.training.plan import ArmPlan, SessionPlan
from flagscale.bench.training.results import ArmResult, SessionResult, Steps, Trained
from flagscale.bench.training.worker import RankReport, report_key
from flagscale.bench.world import RENDEZVOUS_VARIABLE, STARTER_VARIABLE, BenchWorld
from flagscale.errors import JobError
from flagscale.files import write_atomic
from flagscale.hosts.kernel import die_with
from flagscale.records import decode, encode

_POLL_SECONDS = 0.05
_END_SECONDS = 3.0
_RUN = "flagscale.bench.training.worker:run_arm"
_OTHERS = ("TORCHELASTIC_", RENDEZVOUS_VARIABLE, STARTER_VARIABLE)
"""Variables that would lead a process of an arm elsewhere."""


@interruptible()
def run_rank(plan: SessionPlan, world: BenchWorld) -> int:
    """Carry out a session as one of its ranks; the exit code.

    Raises:
        ConfigError: this host cannot have an arm.
        JobError: a process of an arm failed.
    """
    require(plan.arms, chosen(plan.placement.device).name)
    place = plan.placement
    store = rendezvous.rendezvous(world, place.timeout, place.address, place.port)
    if not isinstance(store, TCPStore):
        raise JobError(f"the ranks met at a {type(store).__name__}; trials need a TCPStore")
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="flagscale-arms-")))
        arms = _Arms(plan, world, store, directory)
        stack.callback(arms.end)
        arms.wait_for_reports()
        if world.rank == 0:
            result = _gathered(plan, world, store)
            write_atomic(plan.result, encode(result), durable=False)
            store.set("end", "1")
        arms.wait()
    rendezvous.clean_up(world)
    rendezvous.exit_store(store, world, place.timeout)
    return 0


class _Arms:
    """This rank's processes, one an arm."""

    def __init__(
        self, plan: SessionPlan, world: BenchWorld, store: TCPStore, directory: Path
    ) -> None:
        self._plan, self._world, self._store = plan, world, store
        self._processes = [self._start(arm, directory) for arm in range(len(plan.arms))]
        self._reports = [
            report_key(arm, rank) for arm in range(len(plan.arms)) for rank in range(world.size)
        ]

    def _start(self, number: int, directory: Path) -> subprocess.Popen[bytes]:
        arm, world = self._plan.arms[number], self._world
        log = directory / f"nccl_{number}" if arm.backend == "nccl" else None
        plan = ArmPlan(number, self._plan, self._store.host, self._store.port, log)
        own = rank_environment(world.rank, world.size, world.local_rank, world.local_size)
        environment = {k: v for k, v in own.items() if not k.startswith(_OTHERS)}
        environment |= {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        environment |= dict(arm.environment)
        environment |= {"NCCL_DEBUG_FILE": str(log)} if log is not None else {}
        process = subprocess.Popen(
            Job.of(_RUN, plan).command,
            env=environment,
            stdin=subprocess.PIPE,
            preexec_fn=die_with(os.getpid(), signal.SIGKILL),  # noqa: PLW1509 - no lock
        )
        assert process.stdin is not None
        # One that is killed before it reads is told of by who waits for it.
        with suppress(BrokenPipeError), process.stdin as stdin:
            stdin.write(encode(Job.of(_RUN, plan)).encode())
        return process

    def wait_for_reports(self) -> None:
        """Until every process of all ranks has told what it measured.

        Raises:
            JobError: one of this rank's has failed.
        """
        while not self._all_told():
            self._look()
            if all(process.poll() is not None for process in self._processes):
                raise JobError(f"rank {self._world.rank}: its processes ended without a report")
            time.sleep(_POLL_SECONDS)

    def _all_told(self) -> bool:
        try:
            return bool(self._store.check(self._reports))
        except (dist.DistError, RuntimeError) as error:
            text = f"rank {self._world.rank}: rank 0, at whose store all meet, has ended"
            raise JobError(text) from error

    def wait(self) -> None:
        """Until all of this rank's processes have ended, well.

        Raises:
            JobError: one has failed.
        """
        while any(process.poll() is None for process in self._processes):
            self._look()
            time.sleep(_POLL_SECONDS)
        self._look()

    def _look(self) -> None:
        for arm, process in zip(self._plan.arms, self._processes, strict=True):
            if code := process.poll():
                what = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                raise JobError(
                    f"arm {arm.name}, rank {self._world.rank}: its process failed: {what}"
                )

    def end(self) -> None:
        """End what still runs: these are this process's own children."""
        for process in self._processes:
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + _END_SECONDS
        for process in self._processes:
            try:
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _gathered(plan: SessionPlan, world: BenchWorld, store: Store) -> SessionResult:
    found = []
    for number in range(len(plan.arms)):
        texts = [store.get(report_key(number, rank)) for rank in range(world.size)]
        found.append([decode(RankReport, text) for text in texts])
    first = found[0]
    return SessionResult(
        model=Trained(plan.model.name, plan.model.title),
        setting=plan.setting,
        ranks=world.size,
        device=first[0].device,
        hosts=tuple(report.host for report in first),
        arms=tuple(joined(plan, number, reports) for number, reports in enumerate(found)),
    )


def joined(plan: SessionPlan, arm: int, reports: Sequence[RankReport]) -> ArmResult:
    """What an arm did, of what each of its ranks tells."""
    first = reports[0]
    datagrams = between([report.datagrams for report in reports])
    sent = added(between([report.to_ranks for report in reports]), datagrams)
    own = any(map(any, sent))
    if not own:
        sent = matrix([report.connections for report in reports])
    steps = sum(step.round > 0 for step in first.steps)
    counted = seen(sent, sum(first.buckets) * steps)
    backend = first.version.partition(" ")[0]
    return ArmResult(
        arm=plan.arms[arm],
        version=first.version,
        steps=_steps(reports, counting=True),
        settling=_steps(reports, counting=False),
        parameters=first.parameters,
        buckets=first.buckets,
        replicas_equal=len({report.digest for report in reports}) == 1,
        sent=sent if counted else (),
        datagrams=datagrams if counted and any(map(any, datagrams)) else (),
        counted_by=(backend if own else "the kernel, by connection") if counted else "",
        algorithms=first.algorithms,
        last_algorithm=first.last_algorithm,
        tail=_total([report.tail for report in reports]),
    )


def _steps(reports: Sequence[RankReport], *, counting: bool) -> Steps:
    """Of each step what counts of all ranks' measurements; see :class:`.Steps`."""
    rows = zip(*(report.steps for report in reports), strict=True)
    chosen = [row for row in rows if row[0].counts == counting]
    summing = [[one.communication for one in row] for row in chosen]
    known = [[x for x in row if x is not None] for row in summing]
    return Steps(
        step=tuple(row[0].step for row in chosen),
        round=tuple(row[0].round for row in chosen),
        seconds=tuple(max(one.seconds for one in row) for row in chosen),
        exposed=tuple(min(one.exposed for one in row) for row in chosen),
        communication=tuple(map(min, known)) if known == summing else (),
        loss=tuple(_mean([one.loss for one in row]) for row in chosen),
    )


def _mean(losses: Sequence[float | None]) -> float | None:
    known = [loss for loss in losses if loss is not None]
    return fmean(known) if len(known) == len(losses) else None


def _total(tails: Sequence[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for tail in tails for name in tail)
    return {name: sum(tail.get(name, 0.0) for tail in tails) for name in names}
