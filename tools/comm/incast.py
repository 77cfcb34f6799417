"""Simulate packet loss of many senders in the queue of a receiver's port.

Ranks reduce buckets by datagrams over the simulated network of the tests
(tests/unit/fsccl/datagram), behind cables of one rate and queues that drop packets when full.
They start up to 5 ms apart. Bursts are whole, an eighth of that, or of a learned length. The
first operations, in which the length is learned, are not counted. All cases use the same seeds.

    python tools/comm/incast.py python tools/comm/incast.py --networks 10000:256 --ranks 64

The ideal is the pure transfer time of the bytes. Lost packets are those that were requested
again, relative to all.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from flagscale.cli_errors import run_command
from flagscale.errors import JobError

PROJECT = Path(__file__).resolve().parents[2]
TESTS = PROJECT / "tests" / "unit" / "fsccl" / "datagram"
CSRC = PROJECT / "flagscale" / "comm" / "fsccl" / "csrc"
PARTS = ("datagram/session.cpp", "datagram/transfer.cpp", "core/types.cpp", "core/reduce.cpp")
RUNS = {"whole": "0", "an eighth": "3", "learned": "learned"}
"""Names of what is compared, and what the program calls it: how often runs are halved."""


def build_program() -> Path:
    """Compile the program, and return its path."""
    sys.path.insert(0, str(PROJECT / "tests"))
    compiled = importlib.import_module("support.compiled")
    reads = [path for path in CSRC.glob("*/*") if path.parent.name in ("core", "datagram")]
    sources = [TESTS / "incast_test.cpp", *(CSRC / name for name in PARTS)]
    made: Path = compiled.program("fast", sources, include=CSRC, reads=[*reads, *TESTS.glob("*.h")])
    return made


def run_simulation(
    made: Path, seed: int, words: Sequence[object]
) -> list[tuple[float, float, float]]:
    """Return the shares lost and excluded, and the milliseconds, of each operation.

    Raises:
        JobError: the program fails.
    """
    command = [str(made), "play", str(seed), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise JobError(f"{' '.join(command)}: {done.stderr}")
    rows = [line.split() for line in done.stdout.splitlines()]
    return [(float(lost), float(excluded), float(took)) for lost, excluded, took, _ in rows]


def format_result(rows: Sequence[tuple[float, float, float]]) -> str:
    """Format lost, excluded, median and 99th percentile."""
    lost, excluded, took = (list(column) for column in zip(*rows, strict=True))
    last = sorted(took)[min(len(took) - 1, int(0.99 * len(took)))]
    shares = " % ".join(f"{100 * statistics.mean(of):.2f}" for of in (lost, excluded))
    return f"{shares} % {statistics.median(took):.1f} {last:.1f} ms"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", default="4,8,16,32,64", help="%(default)s")
    parser.add_argument(
        "--networks", default="1000:128", help="Mbit/s:KB of a queue, ..., %(default)s"
    )
    parser.add_argument("--kib", type=int, default=2048, help="a bucket, %(default)s")
    parser.add_argument("--operations", type=int, default=40, help="a seed, %(default)s")
    parser.add_argument("--skip", type=int, default=10, help="the first, %(default)s")
    parser.add_argument("--seeds", type=int, default=2, help="%(default)s")
    options = parser.parse_args(argv)
    made = build_program()
    print("| network | ranks | ideal | runs | lost, excluded, median and 99 % |\n|" + "---|" * 5)
    for network in options.networks.split(","):
        rate, queue = map(float, network.split(":"))
        for ranks in map(int, options.ranks.split(",")):
            ideal = 2 * (ranks - 1) / ranks * options.kib * 1024 * 8e-3 / rate
            for name, halvings in RUNS.items():
                words = (ranks, rate, queue, options.kib, options.operations, halvings)
                rows = [
                    row
                    for seed in range(options.seeds)
                    for row in run_simulation(made, seed, words)[options.skip :]
                ]
                where = f"{rate:g} Mbit/s, {queue:g} KB | {ranks} | {ideal:.1f} ms"
                print(f"| {where} | {name} | {format_result(rows)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
