#!/usr/bin/env python3
"""Measure the overhead of the timing loop of `flagscale bench collectives`.

  tools/comm/overhead.py [--ranks 2] [--bytes 1024] [--rounds 400] [--iters 50]

Two loops of `dist.all_reduce` over gloo run by turns on the same tensor and group: the benchmark's
loop, and a loop without any other code. Prints the ratio of their times per iteration with its
95 % interval. Exits with 1 if the whole interval is above 1.03.

In the benchmark's terms, the operation on its buffers is a *part*. The *body* of an iteration
consists of one or more parts, here of one. Its *step* is the function that the loop calls.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from flagscale.accelerators.device import Device
from flagscale.bench.collectives.cli import read_specs
from flagscale.bench.collectives.collective_calls import BufferSizes, build_body, build_part
from flagscale.bench.collectives.devices import RankGroup
from flagscale.bench.collectives.spec import BenchSpec
from flagscale.bench.collectives.timing import measure
from flagscale.bench.statistics import median_ratio

MAX_RATIO = 1.03


def _time_plain_loop(tensor: torch.Tensor, iterations: int) -> float:
    """Return the microseconds per iteration of a loop without any other code."""
    dist.barrier()
    begin = time.perf_counter_ns()
    for _ in range(iterations):
        dist.all_reduce(tensor)
    return (time.perf_counter_ns() - begin) / 1e3 / iterations


def _measure_loop_overhead(device: Device, spec: BenchSpec) -> float:
    """Return the microseconds per iteration of the benchmark's loop with an empty function."""
    steps = [lambda: None] * 10_000
    spec = replace(spec, iterations=replace(spec.iterations, measured=len(steps)))
    turns = [
        measure(steps, warmup=[], device=device, spec=spec, marks=[], barrier=lambda: None)
        for _ in range(20)
    ]
    return min(turn.average for turn in turns)


def _run_rank(rank: int, options: argparse.Namespace, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=options.ranks
    )
    line = ["all_reduce", "-d", "fp32", "-n", str(options.iters), "-w", "0"]
    (spec,) = read_specs(line)
    case, device = next(spec.cases(options.ranks)), Device.from_torch(torch.device("cpu"))
    world = dist.group.WORLD
    if world is None:
        raise RuntimeError("there is no default group")
    group = RankGroup("gloo", tuple(range(options.ranks)), rank, world)
    elements = options.bytes // 4
    buffer_sizes = BufferSizes(elements=elements, input_elements=elements, output_elements=elements)
    part = build_part(case, buffer_sizes, group, device)
    body = build_body((part,), device, group, "all_reduce")
    steps = [body.step] * options.iters
    benchmark_times: list[float] = []
    plain_times: list[float] = []
    _time_plain_loop(part.output, options.iters)
    # As in the benchmark: exclude all existing objects from the garbage collection before its
    # loops.
    gc.collect()
    gc.freeze()
    for round_number in range(options.rounds):
        for loop in ("benchmark", "plain") if round_number % 2 else ("plain", "benchmark"):
            if loop == "benchmark":
                turn = measure(
                    steps, warmup=[], device=device, spec=spec, marks=[], barrier=dist.barrier
                )
                benchmark_times.append(turn.average)
            else:
                plain_times.append(_time_plain_loop(part.output, options.iters))
    if rank == 0:
        ratio = median_ratio(benchmark_times, plain_times)
        print(
            f"added by the loop itself: {_measure_loop_overhead(device, spec):.3f} us an iteration"
        )
        print(
            f"all_reduce of {options.bytes} bytes over gloo, {options.ranks} ranks: "
            f"{median(plain_times):.1f} us in the plain loop; ratio {ratio.value:.4f}, "
            f"95 % interval {ratio.low:.4f} to {ratio.high:.4f} "
            f"({options.rounds} pairs of {options.iters})"
        )
        Path(f"{store}.verdict").write_text("1" if ratio.low > MAX_RATIO else "0")
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    """Measure, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--bytes", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--iters", type=int, default=50)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        store = f"{directory}/store"
        spawn(_run_rank, args=(options, store), nprocs=options.ranks)  # type: ignore[no-untyped-call]
        return int(Path(f"{store}.verdict").read_text())


if __name__ == "__main__":
    sys.exit(main())
