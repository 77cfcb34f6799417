"""Measure the cost of a group up to its first operation as a function of the number of ranks.

Ranks are threads of one process, each a host of its own for its group. They meet in a store that
counts its operations, and run a barrier over sockets. The program is that of the tests
(tests/unit/fsccl/core/scale_test.cpp), optimised. A model is fitted to all numbers of ranks
except the largest, whose costs it predicts. Fitted to all, it predicts those of --beyond ranks,
for which a process may have too few descriptors: there the ranks only meet, which the store
counts.

    store operations, bytes   a N + b sockets                   a N log2 N + b seconds
    a N log2 N + b

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

from flagscale.bench import machine
from flagscale.cli_errors import run_command
from flagscale.errors import ConfigError, JobError

PROJECT = Path(__file__).resolve().parents[2]
TESTS = PROJECT / "tests" / "unit" / "fsccl" / "core"
CORE = PROJECT / "flagscale" / "comm" / "fsccl" / "csrc" / "core"
COUNTS = ("sets", "adds", "gets", "store_bytes", "sockets", "threads", "seconds")
"""Values that the program prints; threads do not include those of the ranks."""


def linear(ranks: float) -> float:
    """Return a growth proportional to the ranks."""
    return ranks


def log_linear(ranks: float) -> float:
    """Return a growth proportional to the edges of a tree or butterfly of the ranks."""
    return ranks * math.log2(ranks)


GROWTH: Mapping[str, Callable[[float], float]] = {
    "store_operations": linear,
    "store_bytes": linear,
    "sockets": log_linear,
    "seconds": log_linear,
}


def build_program() -> Path:
    """Compile the program, and return its path."""
    sys.path.insert(0, str(PROJECT / "tests"))
    compiled = importlib.import_module("support.compiled")
    reads = [*CORE.iterdir(), *CORE.with_name("datagram").iterdir(), *TESTS.glob("*.h")]
    sources = [TESTS / "scale_test.cpp", CORE / "core.cpp"]
    made: Path = compiled.program("fast", sources, include=CORE, reads=reads)
    return made


def measure(made: Path, ranks: int, rounds: int) -> dict[str, Any]:
    """Return medians over the rounds.

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


def fit_growth(
    rows: Sequence[Mapping[str, Any]], name: str, growth: Callable[[float], float]
) -> Callable[[float], float]:
    """Return the least-squares fit of ``name`` over ``growth`` of the ranks, relative to the
    measurements.
    """
    points = [(growth(row["ranks"]), row[name]) for row in rows]
    weights = [1 / value**2 for _, value in points]
    total = sum(weights)
    x = sum(w * p[0] for w, p in zip(weights, points, strict=True)) / total
    y = sum(w * p[1] for w, p in zip(weights, points, strict=True)) / total
    both = sum(w * (p[0] - x) * (p[1] - y) for w, p in zip(weights, points, strict=True))
    slope = both / sum(w * (p[0] - x) ** 2 for w, p in zip(weights, points, strict=True))
    return lambda ranks: y + slope * (growth(ranks) - x)


def predict_largest(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return, for each growing value, the largest deviation of the fitted points, the prediction
    for the largest number of ranks, and its deviation from the measurement.
    """
    *known, last = rows
    made = {}
    for name, growth in GROWTH.items():
        model = fit_growth(known, name, growth)
        errors = [float(model(row["ranks"]) / row[name] - 1) for row in known]
        said = model(last["ranks"])
        made[name] = {
            "largest_error": round(max(map(abs, errors)), 3),
            "expected": round(said, 3),
            "error": round(said / last[name] - 1, 3),
        }
    return made


def predict_beyond(rows: Sequence[Mapping[str, Any]], made: Path, ranks: int) -> dict[str, Any]:
    """Return the predictions of the model of all ``rows`` for more ranks, and the store's counts
    for them.
    """
    said = {
        name: round(fit_growth(rows, name, growth)(ranks), 3) for name, growth in GROWTH.items()
    }
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
    facts, made, rows = machine.describe_machine(), build_program(), []
    for ranks in counts:
        rows.append(measure(made, ranks, options.rounds))
        print(" ".join(f"{name} {value:,}" for name, value in rows[-1].items()), flush=True)
    more = predict_beyond(rows, made, options.beyond)
    record = {**facts, "rows": rows, "model": predict_largest(rows), "beyond": more}
    print(json.dumps(more))
    for name, told in record["model"].items():
        print(f"{name}: {json.dumps(told)}")
    if options.output:
        options.output.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
