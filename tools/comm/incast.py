"""What runs of many senders lose in the queue of a receiver's port, in a simulation.

Ranks reduce buckets by datagrams over the played network of the tests (tests/unit/fsccl/datagram),
behind cables of one rate and queues that drop what does not fit; they begin up to 5 ms apart. Runs
are whole, or an eighth of that, or as long as is learned. The first operations, in which that is
learned, are not counted; the seeds are the same for all.

    python tools/comm/incast.py
    python tools/comm/incast.py --networks 10000:256 --ranks 64

Ideal is what the bytes take. Lost are packets that were asked for again, of all.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from flagscale.cli_errors import guard
from flagscale.errors import JobError

PROJECT = Path(__file__).resolve().parents[2]
TESTS = PROJECT / "tests" / "unit" / "fsccl" / "datagram"
CSRC = PROJECT / "flagscale" / "comm" / "fsccl" / "csrc"
PARTS = ("datagram/session.cpp", "datagram/transfer.cpp", "core/types.cpp", "core/reduce.cpp")
RUNS = {"whole": "0", "an eighth": "3", "learned": "learned"}
"""Names of what is compared, and what the program calls it: how often runs are halved."""


def build() -> Path:
    """The program."""
    sys.path.insert(0, str(PROJECT / "tests"))
    compiled = importlib.import_module("compiled")
    reads = [path for path in CSRC.glob("*/*") if path.parent.name in ("core", "datagram")]
    sources = [TESTS / "incast_test.cpp", *(CSRC / name for name in PARTS)]
    made: Path = compiled.program("fast", sources, include=CSRC, reads=[*reads, *TESTS.glob("*.h")])
    return made


def play(made: Path, seed: int, words: Sequence[object]) -> list[tuple[float, float, float]]:
    """Of each operation the shares lost and excluded, and milliseconds.

    Raises:
        JobError: the program fails.
    """
    command = [str(made), "play", str(seed), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise JobError(f"{' '.join(command)}: {done.stderr}")
    rows = [line.split() for line in done.stdout.splitlines()]
    return [(float(lost), float(excluded), float(took)) for lost, excluded, took, _ in rows]


def told(rows: Sequence[tuple[float, float, float]]) -> str:
    """Lost, excluded, median and 99th percentile."""
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
    made = build()
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
                    for row in play(made, seed, words)[options.skip :]
                ]
                where = f"{rate:g} Mbit/s, {queue:g} KB | {ranks} | {ideal:.1f} ms"
                print(f"| {where} | {name} | {told(rows)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(guard(main))
