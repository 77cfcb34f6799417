"""See `python tools/patch/status.py --help`."""

from __future__ import annotations

import sys

from flagscale.patching.cli import main_status

if __name__ == "__main__":
    sys.exit(main_status())
