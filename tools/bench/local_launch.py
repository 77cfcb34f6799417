"""Measure launching and the quickstart's training on this machine; write the figures to a file."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from flagscale.bench import launching, machine
from flagscale.errors import FlagscaleError


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="The machine should be idle. Takes about three minutes on two cores.",
    )
    parser.add_argument("--repeats", type=int, default=5, help="launches of each kind")
    parser.add_argument("--steps", type=int, default=120, help="training steps of each run")
    parser.add_argument("--output", type=Path, default=Path("docs/results/local-launch-cpu.json"))
    options = parser.parse_args()
    record = machine.facts()
    figures = []
    try:
        with tempfile.TemporaryDirectory() as scratch:
            settings = {"repeats": options.repeats, "steps": options.steps}
            for figure in launching.measure(Path(scratch), **settings):
                print(f"{figure.name:42} {figure.median:9.3f} {figure.unit}", flush=True)
                figures.append(figure.to_json())
    except FlagscaleError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps({**record, "figures": figures}, indent=2) + "\n")
    print(f"written to {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
