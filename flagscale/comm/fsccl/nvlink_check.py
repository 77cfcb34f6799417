"""Check the NVLink engine on this machine's GPUs, compare its speed with NCCL's, and store its
tuning table (tune.py).

``python -m flagscale.comm.fsccl.nvlink_check``, or ``flagscale comm tune``, starts one process per
GPU. On a machine with one GPU, ``--one-gpu 4`` runs four ranks on it, which checks the protocol and
measures nothing. ``--json`` stores all results. The exit code is 0 only if every result was
correct.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
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
from flagscale.comm.fsccl.nvlink_measure import (
    MEASURED_COLLECTIVES,
    MESSAGE_SIZES,
    NvlinkMeasurement,
    measure_group_creation,
)
from flagscale.comm.fsccl.nvlink_world import NvlinkGroup, NvlinkWorld
from flagscale.comm.fsccl.tune import KernelTiming, choose_fastest, pair_with_baseline, store_table
from flagscale.errors import ConfigError
from flagscale.free_port import free_port

_MAX_RANKS = 8
_GROUP_COUNT = 33
# Sizes in bytes that are also measured eagerly: each call launched by itself, not in a CUDA graph.
_EAGER_SIZES = (1 << 10, 1 << 14, 1 << 16, 1 << 20)
_MIB = 1 << 20


@dataclass(frozen=True)
class CheckOptions:
    """Options of a run, the same in every process."""

    ranks: int
    one_gpu: bool
    quick: bool
    run_checks: bool
    run_measurements: bool
    max_message_bytes: int
    port: int
    report_path: Path | None
    store_tuning_table: bool


def _print_on_rank_0(world: NvlinkWorld, text: str) -> None:
    if 0 in world.local_ranks:
        print(text, flush=True)


def _run_checks(world: NvlinkWorld, options: CheckOptions) -> dict[str, Any]:
    """Run all checks until one fails.

    Returns:
        For each check its number of operations, whether it passed, and its errors.
    """
    all_ranks = NvlinkGroup(world, range(world.size))
    groups = [all_ranks, NvlinkGroup(world, range(world.size))]
    if world.size > 2:
        groups += [
            NvlinkGroup(world, range(0, world.size, 2)),
            NvlinkGroup(world, range(1, world.size)),
        ]
        groups = [g for g in groups if g.size > 1]
    repetitions, replays = (40, 5) if options.quick else (150, 20)
    checks_by_name: dict[str, Callable[[], tuple[int, list[str]]]] = {
        "operations": lambda: checks.check_operations(world, all_ranks, options.quick),
        "registered": lambda: checks.check_registered(world, groups[1]),
        "groups": lambda: checks.check_groups(world, groups, repetitions),
        # Lines are cells of 128 bytes with a flag (csrc/nvlink/cells.h), which must arrive as a
        # whole.
        "lines": lambda: checks.check_lines(world, all_ranks, 10 * repetitions),
        "graph": lambda: checks.check_graph(world, all_ranks, replays),
        # A rank that does not take part: kernels must end by their timeout and name the rank.
        "absent": lambda: (1, checks.check_absent(world)),
    }
    results: dict[str, Any] = {}
    for name, run_check in checks_by_name.items():
        start = time.monotonic()
        runs, errors = run_check()
        is_correct = world.all_true(runs > 0 and not errors)
        results[name] = {"ran": runs, "right": is_correct, "wrong": errors[:20]}
        seconds = time.monotonic() - start
        _print_on_rank_0(
            world,
            f"{name:<12} {runs:>6} ran  {'right' if is_correct else 'WRONG'}  {seconds:.1f} s",
        )
        for error in errors[:5]:
            print(f"  {error}", flush=True)
        if not is_correct:
            break
    results["right"] = all(result["right"] for result in results.values())
    return results


def _run_measurements(
    world: NvlinkWorld, options: CheckOptions, report: dict[str, Any], save: Callable[[], None]
) -> None:
    """Measure the engine and NCCL, add the results to ``report``, and call ``save`` after each
    collective.
    """
    sizes = [size for size in MESSAGE_SIZES if size <= options.max_message_bytes]
    measurement = NvlinkMeasurement(world, options.max_message_bytes)
    timings: list[KernelTiming] = []
    report.update(timings=[], one_by_one=[])  # one_by_one: the eager timings
    groups = report["groups"] = measure_group_creation(world, _GROUP_COUNT)
    _print_on_rank_0(
        world,
        f"{_GROUP_COUNT} groups: {groups['seconds']:.3f} s, {groups['MiB a GPU']:.0f} MiB a GPU",
    )
    for collective in MEASURED_COLLECTIVES:
        for size in _EAGER_SIZES:
            engine_us, nccl_us = measurement.measure_eager(collective, size)
            report["one_by_one"].append(
                {"collective": collective, "size": size, "ours": engine_us, "nccl": nccl_us}
            )
            _print_on_rank_0(
                world, f"{collective:<15}{size:>11}{nccl_us:>10.1f}{engine_us:>10.1f}  eager"
            )
    save()
    _print_on_rank_0(
        world, f"{'':<15}{'bytes':>11}{'NCCL us':>10}{'ours us':>10}{'ratio':>7}  shape"
    )
    for collective in MEASURED_COLLECTIVES:
        for size in sizes:
            size_timings = measurement.measure_shapes(collective, size)
            timings += size_timings
            for memory in ("ordinary", "registered"):
                for engine, nccl in pair_with_baseline(size_timings, memory).values():
                    shape = f"{engine.algorithm} {engine.blocks}x{engine.threads} {memory}"
                    _print_on_rank_0(
                        world,
                        f"{collective:<15}{size:>11}{nccl.microseconds:>10.1f}"
                        f"{engine.microseconds:>10.1f}"
                        f"{nccl.microseconds / engine.microseconds:>7.2f}  {shape}",
                    )
        report["timings"] = [asdict(t) for t in timings]
        save()
    report["table"] = choose_fastest(timings)


def _collect_versions(world: NvlinkWorld) -> dict[str, str]:
    nccl_version = "none"
    if not world.is_single_process:
        version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        nccl_version = ".".join(str(number) for number in version)
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "nccl": nccl_version,
    }


def _run_process(index: int, options: CheckOptions) -> None:
    device = 0 if options.one_gpu else index
    local_ranks = range(options.ranks) if options.one_gpu else [index]
    if not options.one_gpu:
        torch.cuda.set_device(device)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl",
            init_method=f"tcp://127.0.0.1:{options.port}",
            rank=index,
            world_size=options.ranks,
            timeout=datetime.timedelta(seconds=300),
        )
    world = NvlinkWorld(options.ranks, local_ranks, device)
    gpu_name = torch.cuda.get_device_name(device)
    report: dict[str, Any] = {"gpu": gpu_name, "ranks": options.ranks, "one_gpu": options.one_gpu}
    report.update(_collect_versions(world))
    _print_on_rank_0(world, f"{options.ranks} ranks, {gpu_name}, torch {torch.__version__}")

    def save_report() -> None:
        if options.report_path and 0 in world.local_ranks:
            options.report_path.write_text(json.dumps(report, indent=1) + "\n")

    is_correct = True
    if options.run_checks:
        report["checks"] = _run_checks(world, options)
        is_correct = report["checks"]["right"]
        save_report()
    if is_correct and options.run_measurements and not options.one_gpu:
        _run_measurements(world, options, report, save_report)
        save_report()
    if is_correct and options.store_tuning_table and "table" in report and 0 in world.local_ranks:
        path = store_table(gpu_name, options.ranks, report["table"], _collect_versions(world))
        print(f"stored the table in {path}", flush=True)
    if not options.one_gpu:
        dist.destroy_process_group()
    if not is_correct:
        raise SystemExit(1)


def _parse_arguments(argv: Sequence[str] | None, prog: str) -> CheckOptions:
    parser = argparse.ArgumentParser(prog=prog, description="Check and measure the NVLink engine.")
    parser.add_argument("--ranks", type=int, help="GPUs to use; default: all, at most 8")
    parser.add_argument(
        "--one-gpu", type=int, metavar="RANKS", help="run this many ranks on one GPU"
    )
    parser.add_argument("--quick", action="store_true", help="fewer checks")
    parser.add_argument("--no-check", action="store_true", help="only measure")
    parser.add_argument("--no-measure", action="store_true", help="only check")
    parser.add_argument("--largest", type=int, default=256, metavar="MIB", help="largest message")
    parser.add_argument("--json", type=Path, help="file for all results")
    parser.add_argument("--store", action="store_true", help="store the table for later runs")
    arguments = parser.parse_args(argv)
    gpus = torch.cuda.device_count()
    ranks = arguments.one_gpu or arguments.ranks or min(gpus, _MAX_RANKS)
    if gpus == 0 or (not arguments.one_gpu and ranks > gpus):
        raise ConfigError(f"{prog} needs {max(ranks, 2)} GPUs, found {gpus}")
    if not 2 <= ranks <= _MAX_RANKS:
        raise ConfigError(
            f"the engine's groups have 2 to {_MAX_RANKS} ranks, asked for {ranks}",
            hint="--one-gpu 4 runs several ranks on a single GPU",
        )
    return CheckOptions(
        ranks=ranks,
        one_gpu=bool(arguments.one_gpu),
        quick=arguments.quick,
        run_checks=not arguments.no_check,
        run_measurements=not arguments.no_measure,
        max_message_bytes=arguments.largest * _MIB,
        port=free_port(),
        report_path=arguments.json.absolute() if arguments.json else None,
        store_tuning_table=arguments.store,
    )


def main(argv: Sequence[str] | None = None, prog: str = "nvlink_check") -> int:
    """Run the checks and measurements.

    Returns:
        0 if every result was correct, else 1.

    Raises:
        ConfigError: there are fewer GPUs than requested.
        BuildError: the extension or the kernels cannot be compiled.
    """
    options = _parse_arguments(argv, prog)
    # The engine does not use multicast, so NCCL is measured without it, too.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if options.one_gpu:
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"  # a hardware queue per rank
    load_extension()  # once, before the processes load it
    context = spawn(  # type: ignore[no-untyped-call]
        _run_process, (options,), nprocs=1 if options.one_gpu else options.ranks, join=False
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
