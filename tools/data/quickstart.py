#!/usr/bin/env python3
"""Make the quickstart's data: the Python standard library's sources as a Megatron data set, and
an 8k BPE tokenizer trained on them. Does nothing when they are there."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from flagscale.errors import FlagscaleError
from flagscale.train.data.quickstart import make


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("data/quickstart"), help="directory")
    parser.add_argument("--workers", type=int, help="processes (one a core)")
    args = parser.parse_args(argv)
    if args.workers is not None and args.workers < 1:
        parser.error(f"--workers must be at least 1, got {args.workers}")
    begun = time.monotonic()
    try:
        result = make(args.output, workers=args.workers)
    except FlagscaleError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    what = f"{result.documents} documents, {result.tokens} tokens"
    if not result.fresh:
        print(f"{args.output}: already there ({what})")
        return 0
    print(f"{args.output}: {what}, made in {time.monotonic() - begun:.0f} s")
    print(f"  data_path: {result.data_path}\n  tokenizer_path: {result.tokenizer}")
    print("next: python run.py --config-path ./examples/llama3/conf --config-name train action=run")
    return 0


if __name__ == "__main__":
    sys.exit(main())
