#!/usr/bin/env python3
"""Compare the tail latency of all_reduce algorithms under traffic, by turns.

    tools/comm/tail_bed.py --queue 128kb --tail 3 --arms ring,transpose,bounded --rounds 600
    tools/comm/tail_bed.py --rate none --sizes 16M --rounds 50      # load of one core

The hosts are namespaces of this machine (tests/bed: needs root) with one rank each, and a token
bucket with a queue of --queue bytes before every one. `flagscale bench traffic` calibrates the
tail there, or plays a stored environment, and all algorithms run by turns meanwhile. An
operation lasts from the moment when the last rank starts it until the last one has finished it;
all ranks share one clock.

Arms are the names of FSCCL_ALGO, `bounded` (FSCCL_TAIL) and `gloo`.
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

COUNTS = ("pieces", "excluded", "packets", "lost", "scaled", "repeated", "exact", "seconds_ready")
WARM_UP = 12
"""Operations of each arm that do not count; the first of them learn the network's capacity."""


# -- a rank ----------------------------------------------------------------------------------------


def rank_main(order: dict[str, Any]) -> None:
    """Run all rounds, and print their times as a line of JSON."""
    import torch
    import torch.distributed as dist

    import flagscale.comm.fsccl  # noqa: F401 - registers itself
    from flagscale.comm.fsccl.build import load_extension

    dist.init_process_group("fsccl", rank=order["rank"], world_size=order["ranks"])
    groups: dict[str, Any] = {}
    for arm in order["arms"]:
        if arm == "gloo":
            groups[arm] = dist.new_group(backend="gloo")
        else:
            options = {"tail": "bounded"} if arm == "bounded" else {"algorithm": arm}
            made = load_extension().Options(**options)
            groups[arm] = dist.new_group(backend="fsccl", pg_options=made)
    out: dict[str, Any] = {"times": {}, "cpu": {}, "counts": {}}
    for size in order["sizes"]:
        tensor = torch.ones(size // 4)
        times: dict[str, list[tuple[float, float]]] = {arm: [] for arm in groups}
        cpu = dict.fromkeys(times, 0.0)
        counts: list[dict[str, float]] = []
        for turn in range(-WARM_UP, order["rounds"]):
            for arm, group in groups.items():
                dist.barrier()
                tensor.fill_(1.0)
                spent, begun = _cpu(), time.monotonic()
                dist.all_reduce(tensor, group=group)
                ended = time.monotonic()
                if turn >= 0:
                    times[arm].append((begun, ended))
                    cpu[arm] += _cpu() - spent
                    if arm == "bounded":
                        backend = group._get_backend(torch.device("cpu"))
                        counts.append(_chosen(backend.tail_statistics()))
        out["times"][size], out["cpu"][size], out["counts"][size] = times, cpu, counts
    dist.barrier()
    print(json.dumps(out), flush=True)
    os._exit(0)


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _chosen(counts: dict[str, float]) -> dict[str, float]:
    return {name: counts.get(name, 0.0) for name in (*COUNTS, "rate_mbit", "kernel_drops")}


# -- all of them -----------------------------------------------------------------------------------


def measure(bed: Any, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the output of each rank."""
    order = {"ranks": options.hosts, "arms": options.arms, "sizes": options.sizes}
    order["rounds"] = options.rounds
    environment = {"MASTER_ADDR": bed[0].address, "MASTER_PORT": "29500", "OMP_NUM_THREADS": "1"}
    environment |= {"GLOO_SOCKET_IFNAME": "eth0", "FSCCL_SOCKET_IFNAME": "eth0"}
    environment |= {"FSCCL_TAIL_LIMIT": "100", "PYTHONPATH": str(PROJECT)}
    environment |= dict(word.split("=", 1) for word in options.env)
    ranks = []
    with ExitStack() as stack:
        for number, host in enumerate(bed.hosts):
            enter = ["nsenter", "-t", str(host.pid), "-a", "--", sys.executable, __file__]
            rank = subprocess.Popen(
                [*enter, "--as-rank", json.dumps({**order, "rank": number})],
                env={**os.environ, **environment},
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.callback(rank.wait)
            stack.callback(rank.kill)
            ranks.append(rank)
        return [json.loads(rank.communicate()[0]) for rank in ranks]


@contextmanager
def traffic(bed: Any, options: argparse.Namespace) -> Iterator[None]:
    """Play traffic with the requested tail, or none."""
    if options.tail is None and options.replay is None:
        yield
        return
    environment = {**os.environ, **bed.environment(PYTHONPATH=str(PROJECT))}
    line = [sys.executable, "-m", "flagscale.cli", "bench", "traffic"]
    with tempfile.TemporaryDirectory() as directory:
        kept = options.replay or options.keep or Path(directory) / "environment.json"
        if options.replay is None:
            words = ["--hosts", *bed.names, "--rate", options.rate, "--tail", f"{options.tail:g}"]
            words += ["--seconds", "1", "--plain", "--environment", str(kept)]
            subprocess.run([*line, *words], env=environment, check=False, stdout=sys.stderr)
        playing = subprocess.Popen(
            [*line, "--replay", str(kept), "--seconds", "3600", "--probe-every", "3600", "--plain"],
            env=environment,
            stdout=subprocess.DEVNULL,
        )
        try:
            time.sleep(12)  # hosts are reached, flows begin
            yield
        finally:
            playing.terminate()
            playing.wait()


def summary(found: list[dict[str, Any]], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return percentiles of each size and arm, with ratios to the first arm."""
    from flagscale.bench.statistics import median_ratio, percentile

    rows = []
    for size in options.sizes:
        took = {arm: _durations(found, size, arm) for arm in options.arms}
        first = took[options.arms[0]]
        for arm, times in took.items():
            cpu = statistics.fmean(rank["cpu"][str(size)][arm] for rank in found) / len(times)
            row = {"bytes": size, "arm": arm, "operations": len(times)}
            row |= {f"p{n}_ms": round(1e3 * percentile(times, n), 3) for n in (50, 90, 99)}
            row["p50_ratio"] = vars(median_ratio(times, first))
            row["p99_ratio"] = _tail_ratio(times, first)
            row["cpu_ms_a_rank"] = round(1e3 * cpu, 3)
            row["megabytes_a_cpu_second"] = round(size / cpu / 1e6, 1)
            if arm == "bounded":
                row |= _shares(found[0]["counts"][str(size)])
            rows.append(row)
    return rows


def _durations(found: list[dict[str, Any]], size: int, arm: str) -> list[float]:
    turns = zip(*(rank["times"][str(size)][arm] for rank in found), strict=True)
    return [max(end for _, end in turn) - max(begun for begun, _ in turn) for turn in turns]


def _tail_ratio(above: Sequence[float], below: Sequence[float]) -> dict[str, float]:
    """Return the ratio of two p99 with a 95 % interval by the bootstrap over blocks of ten
    turns.
    """
    import random

    from flagscale.bench.statistics import percentile

    draw = random.Random(0)
    blocks = [range(i, min(i + 10, len(above))) for i in range(0, len(above), 10)]

    def ratio(turns: Sequence[int]) -> float:
        return percentile([above[i] for i in turns], 99) / percentile([below[i] for i in turns], 99)

    found = sorted(
        ratio([i for block in draw.choices(blocks, k=len(blocks)) for i in block])
        for _ in range(400)
    )
    return {"value": ratio(range(len(above))), "low": found[10], "high": found[-11]}


def _shares(counts: list[dict[str, float]]) -> dict[str, float]:
    """Return the mean and the 99th percentile of the excluded share of the measured operations."""
    from flagscale.bench.statistics import percentile

    last, first = counts[-1], counts[0]
    grown = {name: last[name] - first[name] for name in COUNTS}
    each = [
        (b["excluded"] - a["excluded"]) / max(1.0, b["pieces"] - a["pieces"])
        for a, b in itertools.pairwise(counts)
    ]
    return {
        "excluded_percent": round(100 * grown["excluded"] / max(1.0, grown["pieces"]), 3),
        "excluded_p99_percent": round(100 * percentile(each, 99), 2),
        "scaled_percent": round(100 * grown["scaled"] / max(1.0, grown["pieces"]), 3),
        "lost_percent": round(100 * grown["lost"] / max(1.0, grown["packets"]), 3),
        "repeated": grown["repeated"],
        "exact": grown["exact"],
        "ready_ms": round(1e3 * grown["seconds_ready"] / max(1, len(counts) - 1), 2),
        "rate_mbit": round(last["rate_mbit"], 1),
        "kernel_drops": last["kernel_drops"] - first["kernel_drops"],
    }


def _bytes(text: str) -> int:
    unit = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:].upper())
    return int(text[:-1]) * unit if unit else int(text)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tools/comm/tail_bed.py", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    words = lambda text: text.split(",")  # noqa: E731
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate", default="250mbit", help="of each cable, as tc spells it; none")
    parser.add_argument("--queue", default="128kb", help="before each host, as tc spells it")
    parser.add_argument("--tail", type=float, help="of the probe beside it (no traffic)")
    parser.add_argument("--keep", type=Path, help="a file for the traffic that was found")
    parser.add_argument("--replay", type=Path, help="such a file: this traffic, not calibrated")
    parser.add_argument("--arms", type=words, default="ring,transpose,bounded")
    sizes = lambda text: [_bytes(word) for word in text.split(",")]  # noqa: E731
    parser.add_argument("--sizes", type=sizes, default="1M")
    parser.add_argument("--rounds", type=int, default=600, help="operations of each arm")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--output", type=Path, help="a JSON file for the result")
    parser.add_argument("--as-rank", type=json.loads, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    if options.as_rank is not None:
        rank_main(options.as_rank)
    from bed.lab import Bed  # type: ignore[import-not-found]

    from flagscale.bench.machine import describe_machine

    about = describe_machine("flagscale", "torch")
    with (
        tempfile.TemporaryDirectory() as directory,
        Bed.open(Path(directory) / "bed", options.hosts) as bed,
    ):
        for host in bed.hosts if options.rate != "none" else ():
            host.bottleneck(options.rate, options.queue)
        with traffic(bed, options):
            rows = summary(measure(bed, options), options)
    for row in rows:
        print(json.dumps(row))
    if options.output:
        result = {**about, "rate": options.rate, "queue": options.queue, "tail": options.tail}
        options.output.write_text(json.dumps({**result, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
