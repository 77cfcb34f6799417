#!/usr/bin/env python3
"""Calibrate traffic on hosts with slow cables, hold it, and check the tail.

    tools/comm/traffic_bed.py --rate 250mbit --queue 1mb --tails 1.5,3 --hold 600 --output FILE

The hosts are namespaces of this machine (tests/bed: needs root). A token bucket with a queue of
--queue bytes stands before each, in place of a switch's port. `flagscale bench traffic` is run
on them over SSH, as a user would run it: once per tail to calibrate, then for --hold seconds
with measurements.

Exits with 4 if a tail was not reached in time, or if all measurements while it was held deviate
by more than a 15th.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[2]
SHARE = 1 / 15
"""Tolerance of `flagscale bench traffic`: 0.1 at 1.5, 0.2 at 3."""
sys.path.insert(0, str(PROJECT / "tests"))


def on_bed(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the command's results for each tail."""
    from bed.lab import Bed  # type: ignore[import-not-found]

    with (
        tempfile.TemporaryDirectory() as directory,
        Bed.open(Path(directory) / "bed", options.hosts) as bed,
    ):
        for host in bed.hosts:
            host.bottleneck(options.rate, options.queue)
        results = []
        for tail in options.tails:
            result = Path(directory) / f"{tail:g}.json"
            line = ["--hosts", *bed.names, "--rate", options.rate]
            line += ["--load", options.load] if options.load else []
            line += ["--tail", f"{tail:g}", "--within", f"{options.within:g}"]
            line += ["--seconds", f"{options.hold:g}", "--probe", options.probe]
            line += ["--probe-every", f"{options.every:g}", "--json", str(result)]
            line += ["--probe-samples", f"{options.samples}"]
            subprocess.run(
                [sys.executable, "-m", "flagscale.cli", "bench", "traffic", *line],
                env={**os.environ, **bed.environment(PYTHONPATH=str(PROJECT))},
                check=False,
            )
            results.append(json.loads(result.read_text(encoding="utf-8")))
        return results


def report(results: Sequence[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """Return machine and method, and the calibration and hold of each tail."""
    from flagscale.bench.machine import describe_machine

    tails = []
    for result in results:
        calibration, pattern = result["calibration"], result["environment"]["pattern"]
        checks = [round(one["ratio"], 3) for one in result["checks"]]
        late = result["late_seconds"]
        tails.append(
            {
                **calibration,
                "idle": result["environment"]["idle"],
                "held_seconds": options.hold,
                "held_ratios": checks,
                "held": result["held"],
                "late_seconds": late,
                "corrections": result["corrections"],
                "load": pattern["load"],
                "congestion": result["environment"]["congestion"],
                "load_of_the_machine": result["load_before"],
            }
        )
    return {
        **describe_machine("flagscale", "numpy"),
        "method": f"{options.hosts} hosts as namespaces, a token bucket of {options.rate} with a "
        f"queue of {options.queue} before each; flows two by two; probe: "
        f"{options.probe}, {options.samples} samples a look",
        "tails": tails,
    }


def misses(tail: dict[str, Any]) -> bool:
    """Return whether a tail was not reached, or not held."""
    held = tail["held"]
    return not tail["reached"] or abs(held["ratio"] / tail["target"] - 1) > SHARE


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tools/comm/traffic_bed.py")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate", default="250mbit", help="of each cable, as tc spells it")
    parser.add_argument("--queue", default="1mb", help="before each host, as tc spells it")
    parser.add_argument("--load", help="of each flow (what the command takes by itself)")
    parser.add_argument("--probe", default="ring:256K")
    parser.add_argument("--samples", type=int, default=600, help="of a look")
    parser.add_argument("--every", type=float, default=30.0, help="seconds between two looks")
    parser.add_argument("--within", type=float, default=300.0, help="seconds to calibrate")
    parser.add_argument("--hold", type=float, default=600.0, help="seconds to hold a tail")
    tails = lambda text: [float(word) for word in text.split(",")]  # noqa: E731
    parser.add_argument("--tails", type=tails, default="1.5,3")
    parser.add_argument("--output", type=Path, help="a JSON file for the result")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    results = report(on_bed(options), options)
    if options.output:
        options.output.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return 4 if any(misses(tail) for tail in results["tails"]) else 0


if __name__ == "__main__":
    sys.exit(main())
