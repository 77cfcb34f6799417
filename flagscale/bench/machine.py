"""Conditions of a measurement that are stored with its result."""

from __future__ import annotations

import os
import platform
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from flagscale.accelerators.cpu import processor_name
from flagscale.comm.base import distribution_version

DEFAULT_PACKAGES = ("flagscale", "torch", "megatron-core", "hydra-core", "paramiko")


def describe_machine(*packages: str) -> dict[str, Any]:
    """Return date, processor, memory, system, versions of ``packages``, and command line. Host
    names, the user's paths and the environment are left out, because results are published.
    """
    return {
        "date": time.strftime("%Y-%m-%d"),
        "command": shlex.join([*_program_words(), *sys.argv[1:]]),
        **describe_hardware(),
        "python": platform.python_version(),
        "versions": {name: distribution_version(name) for name in packages or DEFAULT_PACKAGES},
    }


def _program_words() -> list[str]:
    """Return the command line of this program without its arguments."""
    project, script = Path(__file__).resolve().parents[2], Path(sys.argv[0]).resolve()
    if script.name == "flagscale" or script == project / "flagscale" / "cli.py":
        return ["flagscale"]
    program = script.relative_to(project) if project in script.parents else script.name
    return ["python", str(program)]


def describe_hardware() -> dict[str, Any]:
    """Return processor, usable cores, memory, load by other programs, and system."""
    return {
        "processor": processor_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        # With a high load, measured times are not reliable.
        "load_before": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()}",
    }
