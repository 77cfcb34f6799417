"""``python -m flagscale.bench.agreement``: what the ranks of the comparison run."""

from __future__ import annotations

import sys

from flagscale.bench.agreement.launch import main

if __name__ == "__main__":
    sys.exit(main())
