"""What a figure was measured on and with: the facts that a committed result carries."""

from __future__ import annotations

import os
import platform
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from flagscale.accelerators.cpu import processor
from flagscale.comm.base import distribution_version

PACKAGES = ("flagscale", "torch", "megatron-core", "hydra-core", "paramiko")


def facts(*packages: str) -> dict[str, Any]:
    """Date, processor, memory, system, versions and the command line. Host names, paths of the
    user and the environment stay out: results are published."""
    project, script = Path(__file__).resolve().parents[2], Path(sys.argv[0]).resolve()
    shown = script.relative_to(project) if project in script.parents else script.name
    return {
        "date": time.strftime("%Y-%m-%d"),
        "command": shlex.join(["python", str(shown), *sys.argv[1:]]),
        **hardware(),
        "python": platform.python_version(),
        "versions": {name: distribution_version(name) for name in packages or PACKAGES},
    }


def hardware() -> dict[str, Any]:
    """Processor, cores that this process may use, memory, what else the machine does, system."""
    return {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        # On a busy machine a time says little.
        "load_before": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()}",
    }
