"""See `python tools/patch/patch.py --help`."""

from __future__ import annotations

import sys

from flagscale.patching.cli import main_patch

if __name__ == "__main__":
    sys.exit(main_patch())
