"""Write docs/configuration.md from the schema.

python tools/config/reference.py [--output FILE] [--check]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from flagscale.config.reference import render  # noqa: E402 - found beside this file


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the configuration reference.")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "docs" / "configuration.md")
    parser.add_argument("--check", action="store_true", help="only say whether it is up to date")
    options = parser.parse_args()
    text = render()
    if options.check:
        current = options.output.read_text(encoding="utf-8") if options.output.exists() else ""
        if current != text:
            print(f"{options.output} is out of date: run {Path(__file__).name}", file=sys.stderr)
        return int(current != text)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
