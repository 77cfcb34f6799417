"""Entry point of a benchmark rank: rendezvous, exchange of rank descriptions, measurement, exit."""

from __future__ import annotations

import gc
import os
import socket
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from flagscale.accelerators.device import Device
from flagscale.bench import rendezvous
from flagscale.bench.collectives import devices, patterns
from flagscale.bench.collectives.presenter import (
    Presenter,
    RankDescription,
    RowsByFile,
    describe_conditions,
    list_rank_devices,
    make_record,
)
from flagscale.bench.collectives.session import ResultListener, Session
from flagscale.bench.collectives.spec import Batch, BenchSpec
from flagscale.bench.collectives.watch import ProgressWatch, RankHeartbeat
from flagscale.bench.rank import rank_function
from flagscale.bench.statistics import warn_about_few_samples
from flagscale.bench.world import BenchWorld
from flagscale.comm import registry
from flagscale.comm.base import CommBackend, DeviceType
from flagscale.errors import ConfigError, FlagscaleError, JobError
from flagscale.records import decode, encode

_STARTUP_SECONDS = 300.0


@rank_function
def run_rank(plan: Batch, world: BenchWorld) -> int:
    """Run ``plan`` as one rank of ``world``, and return the exit code. An exit code other than 0
    ends the process at once.

    Raises:
        FlagscaleError: on the rank that reports the error; the others exit silently with its
            code.
    """
    code = _measure(plan.specs, world)
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        # Groups whose ranks died cannot be destroyed in order: it could wait for them for ever.
        os._exit(code)
    if dist.is_initialized():
        dist.destroy_process_group()
    return code


def _measure(specs: Sequence[BenchSpec], world: BenchWorld) -> int:
    placement = specs[0].placement
    # Loading torch, and compiling a backend on its first use, may take longer than an iteration.
    startup_timeout_seconds = placement.timeout + _STARTUP_SECONDS
    store = rendezvous.rendezvous(world, startup_timeout_seconds, placement.address, placement.port)
    description = _describe_rank(specs, world)
    descriptions = _exchange_descriptions(store, description, world, startup_timeout_seconds)
    rendezvous.remove_files(world)
    if code := _report_refusals(descriptions, world):
        rendezvous.leave_store(store, world, placement.timeout)
        return code
    device = devices.select_rank_device(placement.device, world.local_rank)
    watch = ProgressWatch(
        store,
        RankHeartbeat(world.rank, description.host, description.pid),
        world.size,
        placement.timeout,
    )
    watch.start()
    try:
        watch.enter_stage("the meeting of all ranks")
        # Control group for the ranks' reports; it is not measured. The watch reports a hang
        # before this group's timeout, with more details.
        timeout = timedelta(seconds=placement.timeout * 2 + 60)
        rendezvous.init_default_group(PrefixStore("control", store), world, "gloo", timeout=timeout)
        # Exclude all existing objects from garbage collection, so that collecting before each loop
        # is fast.
        gc.collect()
        gc.freeze()
        rows_by_file: RowsByFile = defaultdict(list)
        code = max(
            _run_spec(spec, Session(world, device, watch), descriptions, rows_by_file)
            for spec in specs
        )
        dist.barrier()
        watch.finish()
        return code
    except ConfigError:
        # Every rank has the same error; rank 0 reports it.
        if world.rank:
            return ConfigError.exit_code
        raise
    except (dist.DistError, RuntimeError) as failure:
        # Exactly one rank reports which rank died.
        if message := watch.diagnose():
            lines = str(failure).strip().splitlines() or [repr(failure)]
            print(f"error: {message}\n  {lines[0][:300]}", file=sys.stderr)
        return 1


def _describe_rank(specs: Sequence[BenchSpec], world: BenchWorld) -> RankDescription:
    """Return the description of this rank, or the reason why it cannot take part."""
    placement = specs[0].placement
    identity = (world.rank, socket.gethostname(), os.getpid())
    try:
        device = devices.select_rank_device(placement.device, world.local_rank)
        for spec in specs:
            for name in spec.backends:
                backend = registry.get_usable_backend(name, device.kind, source=spec.backends_flag)
                backend.export_options(spec.options_of(name))
                _load_backend(backend)
            _without_unsupported(spec, device.kind)
        if placement.pin:
            devices.pin_to_cpu(world.local_rank)
        return RankDescription(*identity, device.product, str(device.torch_device))
    except FlagscaleError as error:
        return RankDescription(*identity, "", "", str(error), error.exit_code)


def _load_backend(backend: CommBackend) -> None:
    """Import what the backend needs, and compile it if necessary, before other ranks wait for
    this one.

    Raises:
        FlagscaleError: it does not load.
    """
    try:
        with backend.creation_context():
            pass
    except (ImportError, OSError, RuntimeError) as error:
        raise ConfigError(f"{backend.name} cannot be loaded: {error}") from error


def _without_unsupported(spec: BenchSpec, kind: DeviceType) -> BenchSpec:
    """Return the specification without operations that a backend does not support on this kind of
    device.

    Raises:
        ConfigError: no operation remains.
    """
    unsupported = {
        op.name: name
        for name in spec.backends
        for op in spec.operations
        if op.name not in registry.get_backend(name).operations_for(kind)
    }
    supported = tuple(op for op in spec.operations if op.name not in unsupported)
    if not supported:
        operation, name = next(iter(unsupported.items()))
        registry.get_usable_backend(name, kind, [operation], source=spec.backends_flag)
    notes = [f"{op}: left out, {name} cannot do it on {kind}" for op, name in unsupported.items()]
    return replace(spec, operations=supported, notes=(*spec.notes, *notes))


def _exchange_descriptions(
    store: Store, description: RankDescription, world: BenchWorld, timeout_seconds: float
) -> list[RankDescription]:
    """Return the descriptions of all ranks. They are exchanged through the store, so that errors
    can be reported without a process group.
    """
    store.set(f"facts/{description.rank}", encode(description))
    keys = [f"facts/{rank}" for rank in range(world.size)]
    try:
        store.wait(keys, timedelta(seconds=timeout_seconds))
    except dist.DistError as error:
        absent_ranks = [rank for rank, key in enumerate(keys) if not store.check([key])]
        text = f"ranks {absent_ranks} of {world.size} did not come within {timeout_seconds:g} s"
        raise JobError(text) from error
    descriptions = [decode(RankDescription, value) for value in store.multi_get(keys)]
    # Rank 0's store must exist until the slowest rank has read it.
    rendezvous.barrier(store, world, "facts", timedelta(seconds=timeout_seconds))
    return descriptions


def _report_refusals(descriptions: Sequence[RankDescription], world: BenchWorld) -> int:
    """Report on rank 0 which ranks cannot take part. Returns the exit code, 0 if all can."""
    refusals = [description for description in descriptions if description.error is not None]
    if not refusals:
        return 0
    if world.rank == 0:
        for error in dict.fromkeys(description.error for description in refusals):
            refusals_with_error = [
                description for description in refusals if description.error == error
            ]
            prefix = (
                ""
                if len(refusals_with_error) == len(descriptions)
                else f"rank {refusals_with_error[0].rank} on {refusals_with_error[0].host}: "
            )
            print(f"error: {prefix}{error}", file=sys.stderr)
    return refusals[0].exit_code


def _run_spec(
    spec: BenchSpec,
    session: Session,
    descriptions: Sequence[RankDescription],
    rows_by_file: RowsByFile,
) -> int:
    world = session.world
    spec = _without_unsupported(spec, session.device.kind)
    # Without --seed the seed is the time, which differs between ranks: rank 0's is used.
    spec = replace(spec, check=replace(spec.check, seed=_broadcast_from_rank_0(spec.check.seed)))
    if world.rank:
        session.run(spec, ResultListener())
        # Launchers report a rank whose code differs as a failure of their own.
        return _broadcast_from_rank_0(0)
    device = session.device
    spec = replace(spec, notes=(*spec.notes, *_list_notes(spec, device)))
    names = [registry.get_backend(name).resolve_for(device.kind).name for name in spec.backends]
    groups = patterns.groups_for(world.size, spec.groups.custom, spec.groups.dimension)
    lines = describe_conditions(spec, world, descriptions, names, groups)
    if spec.output.format == "nccl-tests":
        lines += list_rank_devices(descriptions)
    record = make_record(spec, descriptions, names)
    with Presenter(spec, rows_by_file, lines, record) as presenter:
        session.run(spec, presenter)
    return _broadcast_from_rank_0(presenter.finish())


def _list_notes(spec: BenchSpec, device: Device) -> Iterator[str]:
    """Yield notes on unknown limits, flags without effect on this device, and too few
    iterations.
    """
    if (
        spec.comparison.probe
        and spec.comparison.peak is None
        and device.nominal_bus_gb_per_second is None
    ):
        yield "peak: the nominal limit of this device is not known; give it with --peak"
    ineffective_flags = {
        "-R": (spec.buffers.registered > 0, "host memory is not registered"),
        "--timing events": (spec.timing == "events", "there are none on a CPU"),
        "-z": (spec.blocking, "every operation is awaited on a CPU"),
        "-C": (spec.cpu_time, "an operation ends when it has been issued on a CPU"),
    }
    for flag, (is_set, reason) in ineffective_flags.items():
        if is_set and device.is_host:
            yield f"{flag}: {reason}"
    samples = spec.iterations.measured * (spec.iterations.replays or 1)
    if text := warn_about_few_samples(spec.output.statistics, samples):
        yield text


def _broadcast_from_rank_0(value: int) -> int:
    """Broadcast rank 0's value."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]
