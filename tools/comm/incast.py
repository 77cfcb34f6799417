"""Simulate incast: packet loss in a switch port's queue when many ranks send to one.

Ranks reduce gradient buckets by fsccl's bounded all_reduce over the simulated network of the tests
(tests/unit/fsccl/datagram). All links have the same rate, and queues that drop packets when full.
Ranks start up to 5 ms apart. A run is a sequence of packets that is sent without a pause. Its
length is the whole block for a receiver, an eighth of it, or adapted by fsccl to the losses. The
first operations, in which the length is adapted, are not counted. All cases use the same seeds.

    python tools/comm/incast.py
    python tools/comm/incast.py --networks 10000:256 --ranks 64

The ideal is the transfer time of the bytes at the rate of a link. Lost packets are those that were
requested again, as a percentage of all.
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
LIBRARY_SOURCES = (
    "datagram/session.cpp",
    "datagram/transfer.cpp",
    "core/types.cpp",
    "core/reduce.cpp",
)
RUN_LENGTHS = {"whole": "0", "an eighth": "3", "learned": "learned"}
"""Compared lengths of runs, with the program's argument: how often the whole block is halved."""


def build_program() -> Path:
    """Compile the simulation, and return the path of the program."""
    sys.path.insert(0, str(PROJECT / "tests"))
    compiled = importlib.import_module("support.compiled")
    dependencies = [path for path in CSRC.glob("*/*") if path.parent.name in ("core", "datagram")]
    sources = [TESTS / "incast_test.cpp", *(CSRC / name for name in LIBRARY_SOURCES)]
    program: Path = compiled.compile_program(
        "fast", sources, include=CSRC, dependencies=[*dependencies, *TESTS.glob("*.h")]
    )
    return program


def run_simulation(
    program: Path, seed: int, words: Sequence[object]
) -> list[tuple[float, float, float]]:
    """Simulate operations with the program's arguments ``words``.

    Returns:
        For each operation, the fractions of packets lost and of data excluded, and its time in
        milliseconds.

    Raises:
        JobError: the program failed.
    """
    command = [str(program), "play", str(seed), *map(str, words)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        raise JobError(f"{' '.join(command)}: {process.stderr}")
    rows = [line.split() for line in process.stdout.splitlines()]
    return [
        (float(lost), float(excluded), float(milliseconds))
        for lost, excluded, milliseconds, _ in rows
    ]


def format_result(rows: Sequence[tuple[float, float, float]]) -> str:
    """Format the mean percentages lost and excluded, and the median and p99 of the time."""
    lost, excluded, milliseconds = (list(column) for column in zip(*rows, strict=True))
    p99_milliseconds = sorted(milliseconds)[
        min(len(milliseconds) - 1, int(0.99 * len(milliseconds)))
    ]
    percentages = " % ".join(
        f"{100 * statistics.mean(fractions):.2f}" for fractions in (lost, excluded)
    )
    return f"{percentages} % {statistics.median(milliseconds):.1f} {p99_milliseconds:.1f} ms"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", default="4,8,16,32,64", help="%(default)s")
    parser.add_argument(
        "--networks", default="1000:128", help="Mbit/s of a link:KB of its queue, ... (%(default)s)"
    )
    parser.add_argument(
        "--kib", type=int, default=2048, help="size of a bucket in KiB (%(default)s)"
    )
    parser.add_argument(
        "--operations", type=int, default=40, help="operations per seed (%(default)s)"
    )
    parser.add_argument(
        "--skip", type=int, default=10, help="first operations that are not counted (%(default)s)"
    )
    parser.add_argument("--seeds", type=int, default=2, help="%(default)s")
    options = parser.parse_args(argv)
    program = build_program()
    print("| network | ranks | ideal | runs | lost, excluded, median and 99 % |\n|" + "---|" * 5)
    for network in options.networks.split(","):
        rate, queue = map(float, network.split(":"))
        for ranks in map(int, options.ranks.split(",")):
            ideal_milliseconds = 2 * (ranks - 1) / ranks * options.kib * 1024 * 8e-3 / rate
            for length_name, halvings in RUN_LENGTHS.items():
                arguments = (ranks, rate, queue, options.kib, options.operations, halvings)
                rows = [
                    row
                    for seed in range(options.seeds)
                    for row in run_simulation(program, seed, arguments)[options.skip :]
                ]
                case_text = f"{rate:g} Mbit/s, {queue:g} KB | {ranks} | {ideal_milliseconds:.1f} ms"
                print(f"| {case_text} | {length_name} | {format_result(rows)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
