#!/usr/bin/env python3
"""Calibrate background traffic on hosts with slow links, hold it, and check its tail ratio.

    tools/comm/traffic_bed.py --rate 250mbit --queue 1mb --tails 1.5,3 --hold 600 --output FILE

The hosts are network namespaces of this machine (tests/bed: needs root). A token bucket with a
queue of --queue bytes before each host simulates a switch's port. `flagscale bench traffic` is run
on them over SSH, as by a user. For each tail (the requested p99/p50 of its probe) it calibrates its
bursts, and then holds them for --hold seconds with measurements.

Exits with 4 if a tail was not reached in time, or if the ratio of all measurements together differs
from it by more than a 15th.
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
TOLERANCE = 1 / 15
"""Accepted relative deviation, as by `flagscale bench traffic`: 0.1 at 1.5, 0.2 at 3."""
sys.path.insert(0, str(PROJECT / "tests"))


def run_on_bed(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the command for each tail, and return its JSON results."""
    from bed.lab import Bed  # type: ignore[import-not-found]

    with (
        tempfile.TemporaryDirectory() as directory,
        Bed.open(Path(directory) / "bed", options.hosts) as bed,
    ):
        for host in bed.hosts:
            host.limit_switch_rate(options.rate, options.queue)
        results = []
        for tail in options.tails:
            result = Path(directory) / f"{tail:g}.json"
            arguments = ["--hosts", *bed.names, "--rate", options.rate]
            arguments += ["--load", options.load] if options.load else []
            arguments += ["--tail", f"{tail:g}", "--within", f"{options.within:g}"]
            arguments += ["--seconds", f"{options.hold:g}", "--probe", options.probe]
            arguments += ["--probe-every", f"{options.every:g}", "--json", str(result)]
            arguments += ["--probe-samples", f"{options.samples}"]
            subprocess.run(
                [sys.executable, "-m", "flagscale.cli", "bench", "traffic", *arguments],
                env={**os.environ, **bed.environment(PYTHONPATH=str(PROJECT))},
                check=False,
            )
            results.append(json.loads(result.read_text(encoding="utf-8")))
        return results


def make_record(results: Sequence[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """Return the record for the JSON file: machine, method, and the results of each tail."""
    from flagscale.bench.machine import describe_machine

    tails = []
    for result in results:
        calibration, pattern = result["calibration"], result["environment"]["pattern"]
        ratios = [round(check["ratio"], 3) for check in result["checks"]]
        late_seconds = result["late_seconds"]
        tails.append(
            {
                **calibration,
                "idle": result["environment"]["idle"],
                "held_seconds": options.hold,
                "held_ratios": ratios,
                "held": result["held"],
                "late_seconds": late_seconds,
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


def is_missed(tail: dict[str, Any]) -> bool:
    """Return whether a tail was not reached, or not held."""
    held = tail["held"]
    return not tail["reached"] or abs(held["ratio"] / tail["target"] - 1) > TOLERANCE


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tools/comm/traffic_bed.py")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate", default="250mbit", help="rate of each link, in tc's notation")
    parser.add_argument(
        "--queue", default="1mb", help="size of the queue before each host, in tc's notation"
    )
    parser.add_argument("--load", help="load of each flow (the command's default)")
    parser.add_argument("--probe", default="ring:256K")
    parser.add_argument("--samples", type=int, default=600, help="samples of a measurement")
    parser.add_argument(
        "--every", type=float, default=30.0, help="seconds between two measurements"
    )
    parser.add_argument("--within", type=float, default=300.0, help="seconds to calibrate")
    parser.add_argument("--hold", type=float, default=600.0, help="seconds to hold a tail")
    parse_tails = lambda text: [float(word) for word in text.split(",")]  # noqa: E731
    parser.add_argument("--tails", type=parse_tails, default="1.5,3")
    parser.add_argument("--output", type=Path, help="a JSON file for the result")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options(argv)
    results = make_record(run_on_bed(options), options)
    if options.output:
        options.output.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return 4 if any(is_missed(tail) for tail in results["tails"]) else 0


if __name__ == "__main__":
    sys.exit(main())
