"""The runners that ``experiment.runner.type`` can name, installed ones among them."""

from __future__ import annotations

from flagscale.registry import Registry

# By name alone: nothing of what they are is imported here.
RUNNERS = Registry(
    "flagscale.runners",
    "runner",
    {
        "local": "flagscale.launcher.runners.hosts:HostRunner",
        "ssh": "flagscale.launcher.runners.hosts:HostRunner",
        "slurm": "flagscale.launcher.runners.slurm.runner:SlurmRunner",
    },
)
DEFAULT = "ssh"
"""The runner of an experiment that names none: it finds out whether SSH is needed."""
