"""A device type from outside (tests/outside/chip.py), whose rates and faults a test decides."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support.launch_lab import PROJECT

CHIP = PROJECT / "tests" / "outside" / "chip.py"


def install_chip(site: Path, chips: Mapping[str, Mapping[str, Any]]) -> None:
    """Install the package, with one device per host."""
    about = site / "chip-1.0.dist-info"
    about.mkdir(parents=True, exist_ok=True)
    shutil.copy(CHIP, site)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: chip\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[flagscale.accelerators]\ndemo = chip:Demo\n")
    for host, content in chips.items():
        file = site / "chips" / host / "0"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(content))
