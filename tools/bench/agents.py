"""Benchmark one coordinator with the agents of many hosts; print the results as JSON."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import simulated_agents

from flagscale.bench import machine
from flagscale.errors import FlagscaleError


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog="The machine should be idle. Takes half a minute."
    )
    parser.add_argument(
        "--count", type=int, default=1000, help="number of simulated hosts (default: %(default)s)"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=20.0,
        help="duration of the idle measurement (default: %(default)s)",
    )
    options = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory() as scratch:
            measured = simulated_agents.measure_coordinator(
                Path(scratch), count=options.count, seconds=options.seconds
            )
    except FlagscaleError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(json.dumps({**machine.describe_machine(), "agents": options.count, **measured}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
