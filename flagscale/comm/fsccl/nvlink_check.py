"""Proves the NVLink engine on the GPUs at hand, measures it beside NCCL, and keeps its table.

``python -m flagscale.comm.fsccl.nvlink_check`` takes one process a GPU; on a machine with one GPU,
``--one-gpu 4`` plays four ranks on it, which proves the protocol and measures nothing. Everything
found goes to ``--json``; the exit code is 0 only if every result was right.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException, spawn

from flagscale.comm.fsccl import nvlink_cases as checks
from flagscale.comm.fsccl.build import load_extension
from flagscale.comm.fsccl.nvlink_measure import MEASURED, SIZES, Measurement, making_groups
from flagscale.comm.fsccl.nvlink_world import Group, World
from flagscale.comm.fsccl.tune import Timing, best, choose, store
from flagscale.errors import ConfigError

_RANKS_MOST = 8
_GROUPS = 33
_EAGER_SIZES = (1 << 10, 1 << 14, 1 << 16, 1 << 20)
_MIB = 1 << 20


@dataclass(frozen=True)
class Plan:
    """What every process does."""

    ranks: int
    one_gpu: bool
    quick: bool
    check: bool
    measure: bool
    largest: int
    port: int
    json: Path | None
    store: bool


def _say(world: World, text: str) -> None:
    if 0 in world.local:
        print(text, flush=True)


def _check(world: World, plan: Plan) -> dict[str, Any]:
    """Every check until one fails; what ran, and what was wrong."""
    everyone = Group(world, range(world.size))
    groups = [everyone, Group(world, range(world.size))]
    if world.size > 2:
        groups += [Group(world, range(0, world.size, 2)), Group(world, range(1, world.size))]
        groups = [g for g in groups if g.size > 1]
    turns, replays = (40, 5) if plan.quick else (150, 20)
    steps: dict[str, Callable[[], tuple[int, list[str]]]] = {
        "operations": lambda: checks.check_operations(world, everyone, plan.quick),
        "registered": lambda: checks.check_registered(world, groups[1]),
        "groups": lambda: checks.check_groups(world, groups, turns),
        "lines": lambda: checks.check_lines(world, everyone, 10 * turns),
        "graph": lambda: checks.check_graph(world, everyone, replays),
        "absent": lambda: (1, checks.check_absent(world)),
    }
    found: dict[str, Any] = {}
    for name, step in steps.items():
        began = time.monotonic()
        ran, wrong = step()
        right = world.all_true(ran > 0 and not wrong)
        found[name] = {"ran": ran, "right": right, "wrong": wrong[:20]}
        took = time.monotonic() - began
        _say(world, f"{name:<12} {ran:>6} ran  {'right' if right else 'WRONG'}  {took:.1f} s")
        for text in wrong[:5]:
            print(f"  {text}", flush=True)
        if not right:
            break
    found["right"] = all(one["right"] for one in found.values())
    return found


def _measure(world: World, plan: Plan, report: dict[str, Any], keep: Callable[[], None]) -> None:
    """Times beside NCCL, into ``report``; kept after each step, for they take minutes."""
    sizes = [size for size in SIZES if size <= plan.largest]
    measurement = Measurement(world, plan.largest)
    timings: list[Timing] = []
    report.update(timings=[], one_by_one=[])
    groups = report["groups"] = making_groups(world, _GROUPS)
    _say(world, f"{_GROUPS} groups: {groups['seconds']:.3f} s, {groups['MiB a GPU']:.0f} MiB a GPU")
    for collective in MEASURED:
        for size in _EAGER_SIZES:
            ours_us, nccl_us = measurement.one_by_one(collective, size)
            report["one_by_one"].append(
                {"collective": collective, "size": size, "ours": ours_us, "nccl": nccl_us}
            )
            _say(world, f"{collective:<15}{size:>11}{nccl_us:>10.1f}{ours_us:>10.1f}  no graph")
    keep()
    _say(world, f"{'':<15}{'bytes':>11}{'NCCL us':>10}{'ours us':>10}{'ratio':>7}  shape")
    for collective in MEASURED:
        for size in sizes:
            found = measurement.timings(collective, size)
            timings += found
            for memory in ("ordinary", "registered"):
                for ours, other in best(found, memory).values():
                    shape = f"{ours.algorithm} {ours.blocks}x{ours.threads} {memory}"
                    _say(
                        world,
                        f"{collective:<15}{size:>11}{other.microseconds:>10.1f}"
                        f"{ours.microseconds:>10.1f}"
                        f"{other.microseconds / ours.microseconds:>7.2f}  {shape}",
                    )
        report["timings"] = [asdict(t) for t in timings]
        keep()
    report["table"] = choose(timings)


def _versions(world: World) -> dict[str, str]:
    nccl = "none"
    if not world.alone:
        version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        nccl = ".".join(str(number) for number in version)
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "nccl": nccl,
    }


def _process(index: int, plan: Plan) -> None:
    device = 0 if plan.one_gpu else index
    local = range(plan.ranks) if plan.one_gpu else [index]
    if not plan.one_gpu:
        torch.cuda.set_device(device)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl",
            init_method=f"tcp://127.0.0.1:{plan.port}",
            rank=index,
            world_size=plan.ranks,
            timeout=datetime.timedelta(seconds=300),
        )
    world = World(plan.ranks, local, device)
    name = torch.cuda.get_device_name(device)
    report: dict[str, Any] = {"gpu": name, "ranks": plan.ranks, "one_gpu": plan.one_gpu}
    report.update(_versions(world))
    _say(world, f"{plan.ranks} ranks, {name}, torch {torch.__version__}")

    def keep() -> None:
        if plan.json and 0 in world.local:
            plan.json.write_text(json.dumps(report, indent=1) + "\n")

    right = True
    if plan.check:
        report["checks"] = _check(world, plan)
        right = report["checks"]["right"]
        keep()
    if right and plan.measure and not plan.one_gpu:
        _measure(world, plan, report, keep)
        keep()
    if right and plan.store and "table" in report and 0 in world.local:
        kept = store(name, plan.ranks, report["table"], _versions(world))
        print(f"kept the table in {kept}", flush=True)
    if not plan.one_gpu:
        dist.destroy_process_group()
    if not right:
        raise SystemExit(1)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _parse(argv: Sequence[str] | None, prog: str) -> Plan:
    parser = argparse.ArgumentParser(prog=prog, description="Check and measure the NVLink engine.")
    parser.add_argument("--ranks", type=int, help="GPUs to use; default: all, at most 8")
    parser.add_argument("--one-gpu", type=int, metavar="RANKS", help="play so many ranks on one")
    parser.add_argument("--quick", action="store_true", help="fewer checks")
    parser.add_argument("--no-check", action="store_true", help="only measure")
    parser.add_argument("--no-measure", action="store_true", help="only check")
    parser.add_argument("--largest", type=int, default=256, metavar="MIB", help="largest message")
    parser.add_argument("--json", type=Path, help="where to write everything that was found")
    parser.add_argument("--store", action="store_true", help="keep the table for later runs")
    given = parser.parse_args(argv)
    there = torch.cuda.device_count()
    ranks = given.one_gpu or given.ranks or min(there, _RANKS_MOST)
    if there == 0 or (not given.one_gpu and ranks > there):
        raise ConfigError(f"{prog} needs {max(ranks, 2)} GPUs, found {there}")
    if not 2 <= ranks <= _RANKS_MOST:
        raise ConfigError(
            f"the engine's groups have 2 to {_RANKS_MOST} ranks, asked for {ranks}",
            hint="--one-gpu 4 plays several ranks on a single GPU",
        )
    return Plan(
        ranks=ranks,
        one_gpu=bool(given.one_gpu),
        quick=given.quick,
        check=not given.no_check,
        measure=not given.no_measure,
        largest=given.largest * _MIB,
        port=_free_port(),
        json=given.json.absolute() if given.json else None,
        store=given.store,
    )


def main(argv: Sequence[str] | None = None, prog: str = "nvlink_check") -> int:
    """Run the checks and measurements.

    Returns:
        0 if every result was right, else 1.

    Raises:
        ConfigError: the GPUs that are asked for are not there.
        BuildError: the extension or the kernels cannot be compiled.
    """
    plan = _parse(argv, prog)
    # Multicast is not ours to use, so not the one to compare with either.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if plan.one_gpu:
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"  # a queue for every rank
    load_extension()  # once, before the processes ask for it
    context = spawn(  # type: ignore[no-untyped-call]
        _process, (plan,), nprocs=1 if plan.one_gpu else plan.ranks, join=False
    )
    try:
        while not context.join():
            pass
    except ProcessException as error:
        print(error, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
