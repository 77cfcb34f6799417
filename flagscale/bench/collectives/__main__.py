"""``python -m flagscale.bench.collectives``: what the ranks started by the benchmark run."""

from __future__ import annotations

import sys

from flagscale.bench.collectives.launch import main

if __name__ == "__main__":
    sys.exit(main())
