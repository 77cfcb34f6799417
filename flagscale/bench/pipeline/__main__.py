"""``python -m flagscale.bench.pipeline``: what the ranks of a measurement run."""

from __future__ import annotations

import sys

from flagscale.bench.pipeline.launch import main

if __name__ == "__main__":
    sys.exit(main())
