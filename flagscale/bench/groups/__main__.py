"""``python -m flagscale.bench.groups``: what the ranks of one measurement run."""

from __future__ import annotations

import sys

from flagscale.bench.groups.launch import main

if __name__ == "__main__":
    sys.exit(main())
