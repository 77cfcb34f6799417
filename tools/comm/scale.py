"""What a group of many ranks costs until the end of its first operation, as ranks are more.

Ranks are threads of one process, each of which its group takes for a host of its own: they meet in
a store that counts, and go through a barrier over sockets. The program is the one of the tests
(tests/unit/fsccl/core/scale_test.cpp), optimised. A model is fitted to all counts but those of the
most ranks, for which it says what they should be; fitted to all, it tells of --beyond, for which a
process may have too few descriptors. There the ranks meet and do no more, which the store counts.

    store operations, bytes   a N + b
    sockets                   a N log2 N + b
    seconds                   a N log2 N + b

    python tools/comm/scale.py --output docs/results/fsccl-scale-cpu.json
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from flagscale.bench import machine
from flagscale.cli_errors import guard
from flagscale.errors import ConfigError, JobError

PROJECT = Path(__file__).resolve().parents[2]
TESTS = PROJECT / "tests" / "unit" / "fsccl" / "core"
CORE = PROJECT / "flagscale" / "comm" / "fsccl" / "csrc" / "core"
COUNTS = ("sets", "adds", "gets", "store_bytes", "sockets", "threads", "seconds")
"""What the program prints; threads are those beside the ranks'."""


def linear(ranks: float) -> float:
    """Grows as the ranks do."""
    return ranks


def log_linear(ranks: float) -> float:
    """Grows as a tree or a butterfly of the ranks has edges."""
    return ranks * math.log2(ranks)


GROWTH: Mapping[str, Callable[[float], float]] = {
    "store_operations": linear,
    "store_bytes": linear,
    "sockets": log_linear,
    "seconds": log_linear,
}


def build() -> Path:
    """The program."""
    sys.path.insert(0, str(PROJECT / "tests"))
    compiled = importlib.import_module("compiled")
    reads = [*CORE.iterdir(), *CORE.with_name("datagram").iterdir(), *TESTS.glob("*.h")]
    sources = [TESTS / "scale_test.cpp", CORE / "core.cpp"]
    made: Path = compiled.program("fast", sources, include=CORE, reads=reads)
    return made


def measure(made: Path, ranks: int, rounds: int) -> dict[str, Any]:
    """Medians of so many rounds.

    Raises:
        JobError: the program fails.
    """
    rows = []
    for _ in range(rounds):
        command = [str(made), "first", str(ranks)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode or len(done.stdout.split()) != len(COUNTS):
            raise JobError(f"{ranks} ranks: {done.stderr or done.stdout}")
        rows.append([float(word) for word in done.stdout.split()])
    found = dict(zip(COUNTS, map(statistics.median, zip(*rows, strict=True)), strict=True))
    found["store_operations"] = found["sets"] + found["adds"] + found["gets"]
    whole = {name: value if name == "seconds" else int(value) for name, value in found.items()}
    return {"ranks": ranks, **whole}


def fit(
    rows: Sequence[Mapping[str, Any]], name: str, growth: Callable[[float], float]
) -> Callable[[float], float]:
    """Least squares of ``name`` over ``growth`` of the ranks, relative to what was measured."""
    points = [(growth(row["ranks"]), row[name]) for row in rows]
    weights = [1 / value**2 for _, value in points]
    total = sum(weights)
    x = sum(w * p[0] for w, p in zip(weights, points, strict=True)) / total
    y = sum(w * p[1] for w, p in zip(weights, points, strict=True)) / total
    both = sum(w * (p[0] - x) * (p[1] - y) for w, p in zip(weights, points, strict=True))
    slope = both / sum(w * (p[0] - x) ** 2 for w, p in zip(weights, points, strict=True))
    return lambda ranks: y + slope * (growth(ranks) - x)


def expected(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """For each that grows: how far measured points are from the model at most, what it says of the
    most ranks, of which it does not know, and how far that is from what was measured."""
    *known, last = rows
    made = {}
    for name, growth in GROWTH.items():
        model = fit(known, name, growth)
        errors = [float(model(row["ranks"]) / row[name] - 1) for row in known]
        said = model(last["ranks"])
        made[name] = {
            "largest_error": round(max(map(abs, errors)), 3),
            "expected": round(said, 3),
            "error": round(said / last[name] - 1, 3),
        }
    return made


def beyond(rows: Sequence[Mapping[str, Any]], made: Path, ranks: int) -> dict[str, Any]:
    """What the model of all ``rows`` says of more ranks, and what the store counts of them."""
    said = {name: round(fit(rows, name, growth)(ranks), 3) for name, growth in GROWTH.items()}
    command = [str(made), "meet", str(ranks)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise JobError(f"{ranks} ranks: {done.stderr}")
    *operations, size = map(int, done.stdout.split())
    return {
        "ranks": ranks,
        "expected": said,
        "store_operations": sum(operations),
        "store_bytes": size,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", default="32,64,128,256,512", help="growing, %(default)s")
    parser.add_argument("--beyond", type=int, default=1024, help="%(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="of each, %(default)s")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args(argv)
    counts = [int(word) for word in options.ranks.split(",")]
    if len(counts) < 4 or counts != sorted({*counts}) or counts[0] < 2:
        raise ConfigError("--ranks: four numbers or more, growing, from 2 on")
    facts, made, rows = machine.facts(), build(), []
    for ranks in counts:
        rows.append(measure(made, ranks, options.rounds))
        print(" ".join(f"{name} {value:,}" for name, value in rows[-1].items()), flush=True)
    more = beyond(rows, made, options.beyond)
    record = {**facts, "rows": rows, "model": expected(rows), "beyond": more}
    print(json.dumps(more))
    for name, told in record["model"].items():
        print(f"{name}: {json.dumps(told)}")
    if options.output:
        options.output.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(guard(main))
