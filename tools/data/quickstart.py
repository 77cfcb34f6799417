#!/usr/bin/env python3
"""Create the data of the quickstart, unless it exists.

This writes the Python standard library's sources as a Megatron data set, and an 8k BPE tokenizer
trained on them.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from flagscale.errors import FlagscaleError
from flagscale.train.data.quickstart import create_quickstart


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("data/quickstart"),
        help="output directory (default: %(default)s)",
    )
    parser.add_argument("--workers", type=int, help="number of processes (default: one per core)")
    args = parser.parse_args(argv)
    if args.workers is not None and args.workers < 1:
        parser.error(f"--workers must be at least 1, got {args.workers}")
    start = time.monotonic()
    try:
        result = create_quickstart(args.output, workers=args.workers)
    except FlagscaleError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    size = f"{result.document_count} documents, {result.token_count} tokens"
    if not result.is_new:
        print(f"{args.output}: already exists ({size})")
        return 0
    print(f"{args.output}: {size}, created in {time.monotonic() - start:.0f} s")
    print(f"  data_path: {result.data_path}\n  tokenizer_path: {result.tokenizer}")
    print("next: python run.py --config-path ./examples/llama3/conf --config-name train action=run")
    return 0


if __name__ == "__main__":
    sys.exit(main())
