#!/usr/bin/env python3
"""Compare the tail latency of all_reduce algorithms under background traffic, by turns.

    tools/comm/tail_bed.py --queue 128kb --tail 3 --arms ring,transpose,bounded --rounds 600
    tools/comm/tail_bed.py --rate none --sizes 16M --rounds 50      # load of one core

The hosts are network namespaces of this machine (tests/bed: needs root) with one rank each, behind
a token bucket with a queue of --queue bytes. `flagscale bench traffic` calibrates its bursts there
to the requested tail, the ratio p99/p50 of its probe, or replays stored traffic. Under this traffic
all algorithms run by turns. The time of an operation is from its start on the last rank until its
end on the last rank; all ranks share one clock.

The compared algorithms are called arms: values of FSCCL_ALGO, `bounded` (FSCCL_TAIL) and `gloo`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT / "tests"))

COUNTER_NAMES = (
    "pieces",
    "excluded",
    "packets",
    "lost",
    "scaled",
    "repeated",
    "exact",
    "seconds_ready",
)
WARMUP_OPERATIONS = 12
"""Operations of each arm that are not counted. In the first ones fsccl estimates the capacity."""


# -- a rank ----------------------------------------------------------------------------------------


def rank_main(settings: dict[str, Any]) -> None:
    """Run all rounds as one rank, and print the times as a line of JSON."""
    import torch
    import torch.distributed as dist

    import flagscale.comm.fsccl  # noqa: F401 - registers itself
    from flagscale.comm.fsccl.build import load_extension

    dist.init_process_group("fsccl", rank=settings["rank"], world_size=settings["ranks"])
    groups: dict[str, Any] = {}
    for arm in settings["arms"]:
        if arm == "gloo":
            groups[arm] = dist.new_group(backend="gloo")
        else:
            options = {"tail": "bounded"} if arm == "bounded" else {"algorithm": arm}
            fsccl_options = load_extension().Options(**options)
            groups[arm] = dist.new_group(backend="fsccl", pg_options=fsccl_options)
    result: dict[str, Any] = {"times": {}, "cpu": {}, "counts": {}}
    for size in settings["sizes"]:
        tensor = torch.ones(size // 4)
        times: dict[str, list[tuple[float, float]]] = {arm: [] for arm in groups}
        cpu_seconds = dict.fromkeys(times, 0.0)
        counts: list[dict[str, float]] = []
        for round_number in range(-WARMUP_OPERATIONS, settings["rounds"]):
            for arm, group in groups.items():
                dist.barrier()
                tensor.fill_(1.0)
                cpu_begin, begin = _cpu_seconds(), time.monotonic()
                dist.all_reduce(tensor, group=group)
                end = time.monotonic()
                if round_number >= 0:
                    times[arm].append((begin, end))
                    cpu_seconds[arm] += _cpu_seconds() - cpu_begin
                    if arm == "bounded":
                        backend = group._get_backend(torch.device("cpu"))
                        counts.append(_select_counters(backend.tail_statistics()))
        result["times"][size], result["cpu"][size], result["counts"][size] = (
            times,
            cpu_seconds,
            counts,
        )
    dist.barrier()
    print(json.dumps(result), flush=True)
    os._exit(0)


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _select_counters(counts: dict[str, float]) -> dict[str, float]:
    return {name: counts.get(name, 0.0) for name in (*COUNTER_NAMES, "rate_mbit", "kernel_drops")}


# -- all ranks -------------------------------------------------------------------------------------


def measure(bed: Any, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the ranks on all hosts, and return the output of each."""
    settings = {"ranks": options.hosts, "arms": options.arms, "sizes": options.sizes}
    settings["rounds"] = options.rounds
    environment = {"MASTER_ADDR": bed[0].address, "MASTER_PORT": "29500", "OMP_NUM_THREADS": "1"}
    environment |= {"GLOO_SOCKET_IFNAME": "eth0", "FSCCL_SOCKET_IFNAME": "eth0"}
    environment |= {"FSCCL_TAIL_LIMIT": "100", "PYTHONPATH": str(PROJECT)}
    environment |= dict(word.split("=", 1) for word in options.env)
    ranks = []
    with ExitStack() as stack:
        for number, host in enumerate(bed.hosts):
            enter_namespace = ["nsenter", "-t", str(host.pid), "-a", "--", sys.executable, __file__]
            rank = subprocess.Popen(
                [*enter_namespace, "--as-rank", json.dumps({**settings, "rank": number})],
                env={**os.environ, **environment},
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.callback(rank.wait)
            stack.callback(rank.kill)
            ranks.append(rank)
        return [json.loads(rank.communicate()[0]) for rank in ranks]


@contextmanager
def background_traffic(bed: Any, options: argparse.Namespace) -> Iterator[None]:
    """Generate traffic with the requested tail ratio in this context, or none."""
    if options.tail is None and options.replay is None:
        yield
        return
    environment = {**os.environ, **bed.environment(PYTHONPATH=str(PROJECT))}
    command = [sys.executable, "-m", "flagscale.cli", "bench", "traffic"]
    with tempfile.TemporaryDirectory() as directory:
        environment_file = options.replay or options.keep or Path(directory) / "environment.json"
        if options.replay is None:
            arguments = [
                "--hosts",
                *bed.names,
                "--rate",
                options.rate,
                "--tail",
                f"{options.tail:g}",
            ]
            arguments += ["--seconds", "1", "--plain", "--environment", str(environment_file)]
            subprocess.run([*command, *arguments], env=environment, check=False, stdout=sys.stderr)
        process = subprocess.Popen(
            [
                *command,
                "--replay",
                str(environment_file),
                "--seconds",
                "3600",
                "--probe-every",
                "3600",
                "--plain",
            ],
            env=environment,
            stdout=subprocess.DEVNULL,
        )
        try:
            time.sleep(12)  # until all flows have begun
            yield
        finally:
            process.terminate()
            process.wait()


def summarize(results: list[dict[str, Any]], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each size and arm: percentiles, and ratios to the first arm."""
    from flagscale.bench.statistics import median_ratio, percentile

    rows = []
    for size in options.sizes:
        seconds_by_arm = {arm: _operation_seconds(results, size, arm) for arm in options.arms}
        first_arm_times = seconds_by_arm[options.arms[0]]
        for arm, times in seconds_by_arm.items():
            cpu_seconds = statistics.fmean(rank["cpu"][str(size)][arm] for rank in results) / len(
                times
            )
            row = {"bytes": size, "arm": arm, "operations": len(times)}
            row |= {f"p{n}_ms": round(1e3 * percentile(times, n), 3) for n in (50, 90, 99)}
            row["p50_ratio"] = vars(median_ratio(times, first_arm_times))
            row["p99_ratio"] = _p99_ratio(times, first_arm_times)
            row["cpu_ms_a_rank"] = round(1e3 * cpu_seconds, 3)
            row["megabytes_a_cpu_second"] = round(size / cpu_seconds / 1e6, 1)
            if arm == "bounded":
                row |= _summarize_counters(results[0]["counts"][str(size)])
            rows.append(row)
    return rows


def _operation_seconds(results: list[dict[str, Any]], size: int, arm: str) -> list[float]:
    rounds = zip(*(rank["times"][str(size)][arm] for rank in results), strict=True)
    return [
        max(end for _, end in rank_times) - max(begin for begin, _ in rank_times)
        for rank_times in rounds
    ]


def _p99_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> dict[str, float]:
    """Return the ratio of two 99th percentiles with a 95 % interval, by the bootstrap over blocks
    of ten rounds.
    """
    import random

    from flagscale.bench.statistics import percentile

    generator = random.Random(0)
    blocks = [range(i, min(i + 10, len(numerators))) for i in range(0, len(numerators), 10)]

    def ratio(rounds: Sequence[int]) -> float:
        return percentile([numerators[i] for i in rounds], 99) / percentile(
            [denominators[i] for i in rounds], 99
        )

    ratios = sorted(
        ratio([i for block in generator.choices(blocks, k=len(blocks)) for i in block])
        for _ in range(400)
    )
    return {"value": ratio(range(len(numerators))), "low": ratios[10], "high": ratios[-11]}


def _summarize_counters(counts: list[dict[str, float]]) -> dict[str, float]:
    """Summarize fsccl's counters after each operation of the arm ``bounded``: percentages of pieces
    and packets, and the 99th percentile of the excluded percentage of an operation.
    """
    from flagscale.bench.statistics import percentile

    last, first = counts[-1], counts[0]
    growth = {name: last[name] - first[name] for name in COUNTER_NAMES}
    excluded_fractions = [
        (b["excluded"] - a["excluded"]) / max(1.0, b["pieces"] - a["pieces"])
        for a, b in itertools.pairwise(counts)
    ]
    return {
        "excluded_percent": round(100 * growth["excluded"] / max(1.0, growth["pieces"]), 3),
        "excluded_p99_percent": round(100 * percentile(excluded_fractions, 99), 2),
        "scaled_percent": round(100 * growth["scaled"] / max(1.0, growth["pieces"]), 3),
        "lost_percent": round(100 * growth["lost"] / max(1.0, growth["packets"]), 3),
        "repeated": growth["repeated"],
        "exact": growth["exact"],
        "ready_ms": round(1e3 * growth["seconds_ready"] / max(1, len(counts) - 1), 2),
        "rate_mbit": round(last["rate_mbit"], 1),
        "kernel_drops": last["kernel_drops"] - first["kernel_drops"],
    }


def _parse_size(text: str) -> int:
    unit = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:].upper())
    return int(text[:-1]) * unit if unit else int(text)


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tools/comm/tail_bed.py", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parse_words = lambda text: text.split(",")  # noqa: E731
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument(
        "--rate", default="250mbit", help="rate of each link, in tc's notation; or none"
    )
    parser.add_argument(
        "--queue", default="128kb", help="size of the queue before each host, in tc's notation"
    )
    parser.add_argument("--tail", type=float, help="requested p99/p50 of the probe (no traffic)")
    parser.add_argument("--keep", type=Path, help="file for the calibrated traffic")
    parser.add_argument("--replay", type=Path, help="replay a file of --keep, without calibration")
    parser.add_argument("--arms", type=parse_words, default="ring,transpose,bounded")
    parse_sizes = lambda text: [_parse_size(word) for word in text.split(",")]  # noqa: E731
    parser.add_argument("--sizes", type=parse_sizes, default="1M")
    parser.add_argument("--rounds", type=int, default=600, help="operations of each arm")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--output", type=Path, help="a JSON file for the result")
    parser.add_argument("--as-rank", type=json.loads, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options(argv)
    if options.as_rank is not None:
        rank_main(options.as_rank)
    from bed.lab import Bed  # type: ignore[import-not-found]

    from flagscale.bench.machine import describe_machine

    machine = describe_machine("flagscale", "torch")
    with (
        tempfile.TemporaryDirectory() as directory,
        Bed.open(Path(directory) / "bed", options.hosts) as bed,
    ):
        for host in bed.hosts if options.rate != "none" else ():
            host.limit_switch_rate(options.rate, options.queue)
        with background_traffic(bed, options):
            rows = summarize(measure(bed, options), options)
    for row in rows:
        print(json.dumps(row))
    if options.output:
        result = {**machine, "rate": options.rate, "queue": options.queue, "tail": options.tail}
        options.output.write_text(json.dumps({**result, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
