"""A rank's whole life: meet the others, tell who one is, measure, leave."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from flagscale.bench import rendezvous
from flagscale.bench.collectives import devices, patterns
from flagscale.bench.collectives.facts import (
    Facts,
    about,
    gather_facts,
    header,
    rank_lines,
)
from flagscale.bench.collectives.presenter import Kept, Presenter, finish
from flagscale.bench.collectives.session import Listener, Session
from flagscale.bench.collectives.spec import BenchSpec
from flagscale.bench.collectives.statistics import warning
from flagscale.bench.collectives.watch import Beat, Watch
from flagscale.bench.world import BenchWorld
from flagscale.comm import registry
from flagscale.comm.base import CommBackend, DeviceType
from flagscale.errors import ConfigError, FlagscaleError, JobError

_START_SECONDS = 300.0


def run_rank(specs: Sequence[BenchSpec], world: BenchWorld) -> int:
    """Run ``specs`` as one rank of ``world``; the exit code. Where that is not 0, it ends the
    process.

    Raises:
        FlagscaleError: on the rank that has the word; others end silently with its exit code.
    """
    code = _measure(specs, world)
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
    store = rendezvous.rendezvous(
        world, address=placement.address, port=placement.port, seconds=patience
    )
    own, error = _prepare(specs, world)
    facts = _exchange(store, own, world, patience)
    rendezvous.clean_up(world)
    if code := _refused(facts, world):
        rendezvous.exit_store(store, world, placement.timeout)
        return code
    if error is not None:
        raise error
    device = devices.choose(placement.device, world.local_rank)
    watch = Watch(store, Beat(world.rank, own.host, own.pid), world.size, placement.timeout)
    watch.start()
    try:
        watch.enter("the meeting of all ranks")
        _join(store, world, placement.timeout)
        # What is loaded by now stays; collections before each loop then look at little.
        gc.collect()
        gc.freeze()
        kept = Kept()
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
        _explain(failure, watch)
        return 1


def _join(store: Store, world: BenchWorld, seconds: float) -> None:
    """The group through which ranks tell each other what they measured; not the measured one."""
    dist.init_process_group(
        "gloo",
        store=PrefixStore("control", store),
        rank=world.rank,
        world_size=world.size,
        # The watch speaks first and knows more.
        timeout=timedelta(seconds=seconds * 2 + 60),
    )


def _prepare(specs: Sequence[BenchSpec], world: BenchWorld) -> tuple[Facts, FlagscaleError | None]:
    """This rank's facts, and what keeps it from taking part."""
    placement = specs[0].placement
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
        return gather_facts(world.rank, device), None
    except FlagscaleError as error:
        return Facts(
            world.rank, os.uname().nodename, os.getpid(), "", "", str(error), error.exit_code
        ), error


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
    store.set(f"facts/{own.rank}", json.dumps(asdict(own)))
    keys = [f"facts/{rank}" for rank in range(world.size)]
    try:
        store.wait(keys, timedelta(seconds=seconds))
    except dist.DistError as error:
        absent = [rank for rank, key in enumerate(keys) if not store.check([key])]
        raise JobError(
            f"ranks {absent} of {world.size} did not come within {seconds:g} s"
        ) from error
    found = [Facts(**json.loads(value)) for value in store.multi_get(keys)]
    # Rank 0's store must outlive the slowest reader.
    if store.add("facts/read", 1) == world.size:
        store.set("facts/all", "1")
    store.wait(["facts/all"], timedelta(seconds=seconds))
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
    names = tuple(
        registry.backend(name).resolve(session.device.kind).name for name in spec.backends
    )
    if spec.comparison.peak is None and session.device.nominal_gb is None and spec.comparison.probe:
        note = "peak: the nominal limit of this device is not known; give it with --peak"
        spec = replace(spec, notes=(*spec.notes, note))
    if world.rank:
        session.run(spec, Listener())
        # Launchers report a rank whose code differs as a failure of their own.
        return _from_first(0)
    spec = replace(spec, notes=(*spec.notes, *_without_meaning(spec, session.device.kind)))
    samples = spec.iterations.measured * (spec.iterations.replays or 1)
    if text := warning(spec.output.statistics, samples):
        spec = replace(spec, notes=(*spec.notes, text))
    groups = patterns.groups_for(world.size, spec.groups.custom, spec.groups.dimension)
    lines = header(spec, world, facts, names, groups)
    if spec.output.format == "nccl-tests":
        lines += rank_lines(facts)
    known = about(spec, facts, names)
    with Presenter(spec, kept, lines, known) as presenter:
        session.run(spec, presenter)
    return _from_first(finish(spec, presenter.all_rows, kept, lines, known))


def _without_meaning(spec: BenchSpec, kind: DeviceType) -> list[str]:
    """What was asked for and changes nothing on this kind of device."""
    if kind == "cuda":
        return []
    asked = {
        "-R": (spec.buffers.registered > 0, "host memory is not registered"),
        "--timing events": (spec.timing == "events", "there are none on a CPU"),
        "-z": (spec.blocking, "every operation is awaited on a CPU"),
        "-C": (spec.cpu_time, "an operation ends when it has been issued on a CPU"),
    }
    return [f"{flag}: {reason}" for flag, (given, reason) in asked.items() if given]


def _from_first(own: int) -> int:
    """Rank 0's value."""
    values = [own]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def _explain(failure: Exception, watch: Watch) -> None:
    """Say who died, on the one rank that has the word."""
    message = watch.diagnose()
    if message is not None:
        lines = str(failure).strip().splitlines()
        print(f"error: {message}\n  {lines[0][:300] if lines else failure!r}", file=sys.stderr)
