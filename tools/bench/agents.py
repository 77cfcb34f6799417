"""Measure what it costs one coordinator to keep the agents of many hosts together; print JSON."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import crowd

from flagscale.bench import machine
from flagscale.errors import FlagscaleError


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog="The machine should be idle. Takes half a minute."
    )
    parser.add_argument("--count", type=int, default=1000, help="hosts beside the first")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of the rest")
    options = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory() as scratch:
            measured = crowd.measure(Path(scratch), count=options.count, seconds=options.seconds)
    except FlagscaleError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(json.dumps({**machine.facts(), "agents": options.count, **measured}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
