"""See `python tools/patch/unpatch.py --help`."""

from __future__ import annotations

import sys

from flagscale.patching.cli import main_unpatch

if __name__ == "__main__":
    sys.exit(main_unpatch())
