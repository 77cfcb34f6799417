"""A rank's whole life: meet the others, tell who one is, measure, leave."""

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
from flagscale.bench.collectives.presenter import Facts, Kept, Presenter, about, header, rank_lines
from flagscale.bench.collectives.session import Listener, Session
from flagscale.bench.collectives.spec import Batch, BenchSpec
from flagscale.bench.collectives.statistics import warning
from flagscale.bench.collectives.watch import Beat, Watch
from flagscale.bench.world import BenchWorld
from flagscale.comm import registry
from flagscale.comm.base import CommBackend, DeviceType
from flagscale.errors import ConfigError, FlagscaleError, JobError
from flagscale.records import decode, encode

_START_SECONDS = 300.0


def run_rank(plan: Batch, world: BenchWorld) -> int:
    """Run ``plan`` as one rank of ``world``; the exit code. Where that is not 0, it ends the
    process.

    Raises:
        FlagscaleError: on the rank that has the word; others end silently with its exit code.
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
    patience = placement.timeout + _START_SECONDS
    store = rendezvous.rendezvous(world, patience, placement.address, placement.port)
    own = _prepare(specs, world)
    facts = _exchange(store, own, world, patience)
    rendezvous.clean_up(world)
    if code := _refused(facts, world):
        rendezvous.exit_store(store, world, placement.timeout)
        return code
    device = devices.choose(placement.device, world.local_rank)
    watch = Watch(store, Beat(world.rank, own.host, own.pid), world.size, placement.timeout)
    watch.start()
    try:
        watch.enter("the meeting of all ranks")
        # The group through which ranks tell each other what they measured; not the measured one.
        # The watch speaks first and knows more.
        timeout = timedelta(seconds=placement.timeout * 2 + 60)
        rendezvous.join(PrefixStore("control", store), world, "gloo", timeout=timeout)
        # What is loaded by now stays; collections before each loop then look at little.
        gc.collect()
        gc.freeze()
        kept: Kept = defaultdict(list)
        code = max(_run(spec, Session(world, device, watch), facts, kept) for spec in specs)
        dist.barrier()
        watch.finish()
        return code
    except ConfigError:
        # Every rank found the same; rank 0 says it.
        if world.rank:
            return ConfigError.exit_code
        raise
    except (dist.DistError, RuntimeError) as failure:
        # The one rank that has the word says who died.
        if message := watch.diagnose():
            lines = str(failure).strip().splitlines() or [repr(failure)]
            print(f"error: {message}\n  {lines[0][:300]}", file=sys.stderr)
        return 1


def _prepare(specs: Sequence[BenchSpec], world: BenchWorld) -> Facts:
    """This rank's facts, and what keeps it from taking part."""
    placement = specs[0].placement
    me = (world.rank, socket.gethostname(), os.getpid())
    try:
        device = devices.choose(placement.device, world.local_rank)
        for spec in specs:
            for name in spec.backends:
                found = registry.usable(name, device.kind, given_by=spec.backends_flag)
                found.export(spec.options_of(name))
                _load(found)
            _possible(spec, device.kind)
        if placement.pin:
            devices.pin(world.local_rank)
        return Facts(*me, device.product, str(device.torch_device))
    except FlagscaleError as error:
        return Facts(*me, "", "", str(error), error.exit_code)


def _load(backend: CommBackend) -> None:
    """Import what the backend needs, compiled first if need be, before anybody is waited for.

    Raises:
        FlagscaleError: it does not load.
    """
    try:
        with backend.creating():
            pass
    except (ImportError, OSError, RuntimeError) as error:
        raise ConfigError(f"{backend.name} cannot be loaded: {error}") from error


def _possible(spec: BenchSpec, kind: DeviceType) -> BenchSpec:
    """The run without the operations that a backend cannot do on this kind of device, if others
    remain.

    Raises:
        ConfigError: none remains.
    """
    lacking = {
        op.name: name
        for name in spec.backends
        for op in spec.operations
        if op.name not in registry.backend(name).operations_on(kind)
    }
    kept = tuple(op for op in spec.operations if op.name not in lacking)
    if not kept:
        operation, name = next(iter(lacking.items()))
        registry.usable(name, kind, [operation], given_by=spec.backends_flag)
    notes = [f"{op}: left out, {name} cannot do it on {kind}" for op, name in lacking.items()]
    return replace(spec, operations=kept, notes=(*spec.notes, *notes))


def _exchange(store: Store, own: Facts, world: BenchWorld, seconds: float) -> list[Facts]:
    """Everyone's facts, through the store: no process group is needed to say what is wrong."""
    store.set(f"facts/{own.rank}", encode(own))
    keys = [f"facts/{rank}" for rank in range(world.size)]
    try:
        store.wait(keys, timedelta(seconds=seconds))
    except dist.DistError as error:
        absent = [rank for rank, key in enumerate(keys) if not store.check([key])]
        text = f"ranks {absent} of {world.size} did not come within {seconds:g} s"
        raise JobError(text) from error
    found = [decode(Facts, value) for value in store.multi_get(keys)]
    # Rank 0's store must outlive the slowest reader.
    rendezvous.together(store, world, "facts", timedelta(seconds=seconds))
    return found


def _refused(facts: Sequence[Facts], world: BenchWorld) -> int:
    """Say, on rank 0, which ranks cannot take part; the exit code, 0 when all can."""
    bad = [fact for fact in facts if fact.error is not None]
    if not bad:
        return 0
    if world.rank == 0:
        for text in dict.fromkeys(fact.error for fact in bad):
            ranks = [fact for fact in bad if fact.error == text]
            where = "" if len(ranks) == len(facts) else f"rank {ranks[0].rank} on {ranks[0].host}: "
            print(f"error: {where}{text}", file=sys.stderr)
    return bad[0].exit_code


def _run(spec: BenchSpec, session: Session, facts: Sequence[Facts], kept: Kept) -> int:
    world = session.world
    spec = _possible(spec, session.device.kind)
    # Without --seed every rank took its own clock.
    spec = replace(spec, check=replace(spec.check, seed=_from_first(spec.check.seed)))
    if world.rank:
        session.run(spec, Listener())
        # Launchers report a rank whose code differs as a failure of their own.
        return _from_first(0)
    device = session.device
    spec = replace(spec, notes=(*spec.notes, *_notes(spec, device)))
    names = [registry.backend(name).resolve(device.kind).name for name in spec.backends]
    groups = patterns.groups_for(world.size, spec.groups.custom, spec.groups.dimension)
    lines = header(spec, world, facts, names, groups)
    if spec.output.format == "nccl-tests":
        lines += rank_lines(facts)
    known = about(spec, facts, names)
    with Presenter(spec, kept, lines, known) as presenter:
        session.run(spec, presenter)
    return _from_first(presenter.finish())


def _notes(spec: BenchSpec, device: Device) -> Iterator[str]:
    """What is not known of this device, what was asked for and changes nothing on it, and what so
    few iterations do not tell."""
    if spec.comparison.probe and spec.comparison.peak is None and device.nominal_gb is None:
        yield "peak: the nominal limit of this device is not known; give it with --peak"
    asked = {
        "-R": (spec.buffers.registered > 0, "host memory is not registered"),
        "--timing events": (spec.timing == "events", "there are none on a CPU"),
        "-z": (spec.blocking, "every operation is awaited on a CPU"),
        "-C": (spec.cpu_time, "an operation ends when it has been issued on a CPU"),
    }
    for flag, (given, reason) in asked.items():
        if given and device.is_host:
            yield f"{flag}: {reason}"
    samples = spec.iterations.measured * (spec.iterations.replays or 1)
    if text := warning(spec.output.statistics, samples):
        yield text


def _from_first(own: int) -> int:
    """Rank 0's value."""
    values = [own]
    dist.broadcast_object_list(values, src=0)
    return values[0]
