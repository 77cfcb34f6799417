#!/usr/bin/env python3
"""Draw what fsccl's nvlink_check has measured; see `tools/comm/nvlink_plot.py --help`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from flagscale.bench.nvlink_plot import main

if __name__ == "__main__":
    sys.exit(main())
