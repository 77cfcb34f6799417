#!/usr/bin/env python3
"""Measure the creation of process groups; see `tools/comm/groups.py --help`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from flagscale.bench.groups.cli import main

if __name__ == "__main__":
    sys.exit(main())
