#!/usr/bin/env python3
"""Hold the benchmark's figures against nccl-tests' definitions; see `agreement.py --help`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from flagscale.bench.agreement.cli import main

if __name__ == "__main__":
    sys.exit(main())
