#!/usr/bin/env python3
"""Measure fsccl's pipelined schedules; see `tools/comm/pipeline.py --help`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from flagscale.bench.pipeline.cli import main

if __name__ == "__main__":
    sys.exit(main())
