"""Write docs/configuration.md, docs/reference/configuration/ and the JSON schemas for editors from
the schema.

python tools/config/reference.py [--output DIRECTORY] [--check]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from flagscale.config import json_schema, schemas  # noqa: E402 - found next to this file
from flagscale.config.reference import DIRECTORY, render  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the configuration reference.")
    parser.add_argument(
        "--output", type=Path, default=REPOSITORY, help="root of the written pages' paths"
    )
    parser.add_argument("--check", action="store_true", help="only report pages that are outdated")
    options = parser.parse_args()
    pages = {options.output / path: text for path, text in render().items()}
    folder = options.output / schemas.DIRECTORY.relative_to(REPOSITORY)
    pages |= {folder / name: text for name, text in json_schema.render().items()}
    outdated = [
        path
        for path, text in pages.items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]
    outdated += [path for path in (options.output / DIRECTORY).glob("*.md") if path not in pages]
    if options.check:
        for path in outdated:
            print(f"{path} is out of date: run {Path(__file__).name}", file=sys.stderr)
        return int(bool(outdated))
    for path in outdated:
        if path not in pages:
            path.unlink()
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(pages[path], encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
