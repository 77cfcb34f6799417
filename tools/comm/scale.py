"""Measure the cost of creating an fsccl group as a function of the number of ranks.

Ranks are threads of one process, and each is a host of its own for its group. They exchange
addresses through a store that counts its operations, and run a barrier over sockets. The program is
that of the tests (tests/unit/fsccl/core/scale_test.cpp), compiled with optimization.

A model of the costs is fitted to all numbers of ranks N except the largest, whose costs it
predicts:

    store operations, bytes   a N + b
    sockets                   a N log2 N + b
    seconds                   a N log2 N + b

Fitted to all numbers of ranks, the model predicts the costs for --beyond ranks. A process may have
too few descriptors for so many; there only the exchange through the store is run and counted.

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
OUTPUT_NAMES = ("sets", "adds", "gets", "store_bytes", "sockets", "threads", "seconds")
"""Values that the program prints, in this order; threads do not include those of the ranks."""


def linear(ranks: float) -> float:
    """Return N."""
    return ranks


def log_linear(ranks: float) -> float:
    """Return N log2 N, proportional to the edges of a butterfly network."""
    return ranks * math.log2(ranks)


GROWTH_FUNCTIONS: Mapping[str, Callable[[float], float]] = {
    "store_operations": linear,
    "store_bytes": linear,
    "sockets": log_linear,
    "seconds": log_linear,
}


def build_program() -> Path:
    """Compile the program, and return its path."""
    sys.path.insert(0, str(PROJECT / "tests"))
    compiled = importlib.import_module("support.compiled")
    dependencies = [*CORE.iterdir(), *CORE.with_name("datagram").iterdir(), *TESTS.glob("*.h")]
    sources = [TESTS / "scale_test.cpp", CORE / "core.cpp"]
    program: Path = compiled.compile_program(
        "fast", sources, include=CORE, dependencies=dependencies
    )
    return program


def measure(program: Path, ranks: int, rounds: int) -> dict[str, Any]:
    """Return the median costs over the rounds for a number of ranks.

    Raises:
        JobError: the program failed.
    """
    rows = []
    for _ in range(rounds):
        command = [str(program), "first", str(ranks)]
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        if process.returncode or len(process.stdout.split()) != len(OUTPUT_NAMES):
            raise JobError(f"{ranks} ranks: {process.stderr or process.stdout}")
        rows.append([float(word) for word in process.stdout.split()])
    medians = dict(zip(OUTPUT_NAMES, map(statistics.median, zip(*rows, strict=True)), strict=True))
    medians["store_operations"] = medians["sets"] + medians["adds"] + medians["gets"]
    record = {name: value if name == "seconds" else int(value) for name, value in medians.items()}
    return {"ranks": ranks, **record}


def fit_growth(
    rows: Sequence[Mapping[str, Any]], name: str, growth: Callable[[float], float]
) -> Callable[[float], float]:
    """Fit ``name`` as a linear function of ``growth(ranks)`` by least squares of relative errors.

    Returns:
        A function of the number of ranks that predicts the value.
    """
    points = [(growth(row["ranks"]), row[name]) for row in rows]
    weights = [1 / value**2 for _, value in points]
    total = sum(weights)
    mean_x = sum(w * p[0] for w, p in zip(weights, points, strict=True)) / total
    mean_y = sum(w * p[1] for w, p in zip(weights, points, strict=True)) / total
    covariance = sum(
        w * (p[0] - mean_x) * (p[1] - mean_y) for w, p in zip(weights, points, strict=True)
    )
    slope = covariance / sum(w * (p[0] - mean_x) ** 2 for w, p in zip(weights, points, strict=True))
    return lambda ranks: mean_y + slope * (growth(ranks) - mean_x)


def predict_largest(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Fit the model to all rows but the last, and compare its prediction with the last one.

    Returns:
        By the name of a value: the largest relative error of the fitted rows, the prediction for
        the last row, and its relative error.
    """
    *fitted_rows, largest_row = rows
    predictions = {}
    for name, growth in GROWTH_FUNCTIONS.items():
        model = fit_growth(fitted_rows, name, growth)
        errors = [float(model(row["ranks"]) / row[name] - 1) for row in fitted_rows]
        prediction = model(largest_row["ranks"])
        predictions[name] = {
            "largest_error": round(max(map(abs, errors)), 3),
            "expected": round(prediction, 3),
            "error": round(prediction / largest_row[name] - 1, 3),
        }
    return predictions


def predict_beyond(rows: Sequence[Mapping[str, Any]], program: Path, ranks: int) -> dict[str, Any]:
    """Return the predictions of the model, fitted to all ``rows``, for more ranks, and the measured
    counts of the store.
    """
    predictions = {
        name: round(fit_growth(rows, name, growth)(ranks), 3)
        for name, growth in GROWTH_FUNCTIONS.items()
    }
    command = [str(program), "meet", str(ranks)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        raise JobError(f"{ranks} ranks: {process.stderr}")
    *operations, store_bytes = map(int, process.stdout.split())
    return {
        "ranks": ranks,
        "expected": predictions,
        "store_operations": sum(operations),
        "store_bytes": store_bytes,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--ranks",
        default="32,64,128,256,512",
        help="numbers of ranks in ascending order (%(default)s)",
    )
    parser.add_argument(
        "--beyond", type=int, default=1024, help="larger number to predict (%(default)s)"
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="measurements of each number (%(default)s)"
    )
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args(argv)
    counts = [int(word) for word in options.ranks.split(",")]
    if len(counts) < 4 or counts != sorted({*counts}) or counts[0] < 2:
        raise ConfigError("--ranks: four numbers or more, growing, from 2 on")
    machine_facts, program, rows = machine.describe_machine(), build_program(), []
    for ranks in counts:
        rows.append(measure(program, ranks, options.rounds))
        print(" ".join(f"{name} {value:,}" for name, value in rows[-1].items()), flush=True)
    beyond = predict_beyond(rows, program, options.beyond)
    record = {**machine_facts, "rows": rows, "model": predict_largest(rows), "beyond": beyond}
    print(json.dumps(beyond))
    for name, errors in record["model"].items():
        print(f"{name}: {json.dumps(errors)}")
    if options.output:
        options.output.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
