"""Processes of a host that measure its devices, one per device. Imports torch.

The worker has imported torch when it forks them, so that a host with eight devices imports it once.
A process that ends, as NCCL does after a lost peer, is forked again for the next job.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from flagscale.accelerators.cpu import processor_name
from flagscale.accelerators.health import DeviceReading, Rate
from flagscale.accelerators.rates import best_rate
from flagscale.accelerators.registry import get_accelerator
from flagscale.errors import FlagscaleError
from flagscale.health.messages import DeviceMeasurement
from flagscale.hosts.connection import Closeable
from flagscale.hosts.kernel import signal_on_parent_death

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from flagscale.accelerators.base import Accelerator

_MESSAGE_BYTES = {True: 8 << 20, False: 64 << 20}
"""Bytes that a rank sends at once, by whether its memory is that of the host."""
_MACHINE_MODEL = Path("/sys/class/dmi/id/product_name")
_REASON_CHARACTERS = 300
_SOURCE_PLACE = re.compile(r"^\[[^\]]*:\d+\]\s*")
_STORE_SECONDS = 30.0


@dataclass(frozen=True)
class RankSettings:
    """Kind of device, number of the rank on its host, and threads of a rank on a CPU."""

    kind: str
    local_rank: int
    threads: int


@dataclass(frozen=True)
class MeasureJob:
    """Measure the rank's device; ``seconds`` is the length of a window."""

    seconds: float


@dataclass(frozen=True)
class HostCopyJob:
    """Measure copies between the rank's device and its host."""

    seconds: float


@dataclass(frozen=True)
class ExchangeJob:
    """Exchange data with other ranks, which get the same ``name``, ``address`` and ``port``."""

    operation: Literal["all_reduce", "exchange"]
    name: str
    address: str
    port: int
    rank: int
    world: int
    seconds: float
    timeout: float
    """Seconds until a rank that does not answer is given up."""


Job = MeasureJob | HostCopyJob | ExchangeJob


@dataclass(frozen=True)
class Problem:
    """Reason why a job failed."""

    reason: str


class RankProcesses(Closeable):
    """The processes of one host. Must be created before this process uses a device."""

    def __init__(self, kind: str, count: int, threads: int) -> None:
        self._context = multiprocessing.get_context("fork")
        self._settings = [RankSettings(kind, number, threads) for number in range(count)]
        self._store = self._fork(_serve_store)
        self.port = int(self._store.receive(_STORE_SECONDS))
        self._ranks: list[_Process | None] = [None] * count

    def run(self, jobs: Sequence[Job], timeout: float) -> list[Any]:
        """Give each job to the rank of the same number, and return the replies: the result of the
        method of :class:`_Rank`, or a :class:`Problem`.
        """
        return self.run_on(dict(enumerate(jobs)), timeout)

    def run_on(self, jobs: Mapping[int, Job], timeout: float) -> list[Any]:
        """Give jobs to ranks by their number; otherwise as :meth:`run`."""
        processes = {number: self._require_rank(number) for number in jobs}
        for number, process in processes.items():
            process.send(jobs[number])
        replies = []
        deadline = time.monotonic() + timeout
        for number, process in processes.items():
            try:
                replies.append(process.receive(max(0.0, deadline - time.monotonic())))
            except (EOFError, TimeoutError) as error:
                self._ranks[number] = None
                replies.append(Problem(process.explain_end(error, timeout)))
        return replies

    @property
    def pids(self) -> list[int]:
        """Pids of the processes that run, by the number of the rank."""
        return [process.pid for process in self._ranks if process is not None]

    def close(self) -> None:
        """End all processes."""
        for process in (self._store, *self._ranks):
            if process is not None:
                process.kill()

    def _require_rank(self, number: int) -> _Process:
        process = self._ranks[number]
        if process is None or not process.is_alive:
            process = self._fork(_serve_rank, self._settings[number])
            self._ranks[number] = process
        return process

    def _fork(self, target: Callable[..., None], *arguments: object) -> _Process:
        return _Process(self._context, target, *arguments)


class _Process:
    """A forked process that serves one pipe."""

    def __init__(self, context: Any, target: Callable[..., None], *arguments: object) -> None:
        self._connection, inner = context.Pipe()
        self._process = context.Process(
            target=_run_forked, args=(target, inner, os.getpid(), *arguments), daemon=True
        )
        self._process.start()
        inner.close()

    @property
    def is_alive(self) -> bool:
        return bool(self._process.is_alive())

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def send(self, job: object) -> None:
        try:
            self._connection.send(job)
        except OSError:
            return  # it has ended, which `receive` reports

    def receive(self, timeout: float) -> Any:
        """Return a reply.

        Raises:
            TimeoutError: there is none in time; the process was killed.
            EOFError: the process has ended.
        """
        try:
            if self._connection.poll(timeout):
                return self._connection.recv()
        except OSError as error:
            raise EOFError from error
        self._process.kill()
        raise TimeoutError

    def explain_end(self, error: Exception, timeout: float) -> str:
        if isinstance(error, TimeoutError):
            return f"no answer within {timeout:g} s"
        self._process.join(1.0)
        code = self._process.exitcode
        if code is not None and code < 0:
            return f"the measuring process was ended by {signal.Signals(-code).name}"
        return f"the measuring process ended with exit code {code}"


def _machine_model() -> str:
    """Return the vendor's name of this machine's model; empty if the kernel does not report it."""
    try:
        return _MACHINE_MODEL.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _run_forked(
    target: Callable[..., None], connection: Connection, parent: int, *arguments: object
) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal_on_parent_death(parent, signal.SIGKILL)()
    os.dup2(2, 1)  # stdout is the worker's control channel
    target(connection, *arguments)


def _serve_store(connection: Connection) -> None:
    """Serve the store in which ranks of this and of other hosts meet."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    connection.send(store.port)
    connection.poll(None)


def _serve_rank(connection: Connection, settings: RankSettings) -> None:
    """Work on jobs until the worker ends."""
    rank = _Rank(settings)
    while True:
        job = connection.recv()
        try:
            connection.send(rank.execute(job))
        except (FlagscaleError, ImportError, OSError, RuntimeError, ValueError) as error:
            connection.send(Problem(describe_error(error)))


def describe_error(error: Exception) -> str:
    """Return the first line of an error's message, without the place in a library's source that
    Gloo puts before it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = _SOURCE_PLACE.sub("", lines[0]) if lines else ""
    return reason[:_REASON_CHARACTERS] or type(error).__name__


class _Rank:
    """One rank's device and its measurements."""

    def __init__(self, settings: RankSettings) -> None:
        self._settings = settings
        self._accelerator: Accelerator = get_accelerator(settings.kind)
        self._selected: torch.device | None = None

    @property
    def _device(self) -> torch.device:
        if self._selected is None:
            if self._accelerator.is_host:
                torch.set_num_threads(self._settings.threads)
            self._selected = self._accelerator.select(self._settings.local_rank)
        return self._selected

    def execute(self, job: Job) -> DeviceMeasurement | tuple[Rate, ...] | float:
        """Execute a job, and return its result."""
        if isinstance(job, MeasureJob):
            return self.measure(job)
        if isinstance(job, HostCopyJob):
            return tuple(self._accelerator.measure_host_copies(self._device, job.seconds))
        return self.meet(job)

    def measure(self, job: MeasureJob) -> DeviceMeasurement:
        accelerator, device = self._accelerator, self._device
        readings: list[DeviceReading | None] = []
        rates = accelerator.measure_rates(
            device, job.seconds, lambda: readings.append(accelerator.read_health(device))
        )
        reading = readings[0] if readings else accelerator.read_health(device)
        product, machine = accelerator.product_name(device), _machine_model()
        if accelerator.is_host:
            product += f", {self._settings.threads} thread(s)"
        else:
            machine = ", ".join(filter(None, (machine, processor_name())))
        label = f"{accelerator.unit} {self._settings.local_rank}"
        return DeviceMeasurement(
            label, product, machine, accelerator.is_host, tuple(rates), reading
        )

    def meet(self, job: ExchangeJob) -> float:
        """Form a group with the other ranks of the job, and return the rate in GB/s."""
        device, timeout = self._device, timedelta(seconds=job.timeout)
        store = TCPStore(
            job.address, job.port, is_master=False, timeout=timeout, wait_for_workers=False
        )
        try:
            dist.init_process_group(
                self._accelerator.default_backend,
                store=PrefixStore(job.name, store),
                rank=job.rank,
                world_size=job.world,
                timeout=timeout,
            )
            return self._measure_exchange(job, device)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    def _measure_exchange(self, job: ExchangeJob, device: torch.device) -> float:
        size = _MESSAGE_BYTES[self._accelerator.is_host]
        sent = torch.ones(size, device=device, dtype=torch.uint8)
        received = torch.empty_like(sent)
        partner = (job.rank + job.world // 2) % job.world

        def exchange() -> None:
            operations = [dist.P2POp(dist.isend, sent, partner)]
            operations.append(dist.P2POp(dist.irecv, received, partner))
            for work in dist.batch_isend_irecv(operations):
                work.wait()

        def all_reduce() -> None:
            dist.all_reduce(sent)

        def agree(count: int) -> int:
            agreed_count = torch.tensor([count], device=device)
            dist.broadcast(agreed_count, 0)
            return int(agreed_count.item())

        is_sum = job.operation == "all_reduce"
        calls = best_rate(
            all_reduce if is_sum else exchange,
            lambda: self._accelerator.synchronize(device),
            job.seconds,
            agree,
        )
        # Bus bandwidth, as nccl-tests defines it.
        factor = 2 * (job.world - 1) / job.world if is_sum else 1.0
        return calls * size * factor / 1e9
