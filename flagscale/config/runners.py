"""Runners that ``experiment.runner.type`` can name: built-in and from installed packages."""

from __future__ import annotations

from flagscale.registry import Registry

# Entry points as text, so that reading a configuration imports no runner.
RUNNERS = Registry(
    "flagscale.runners",
    "runner",
    {
        "local": "flagscale.launcher.runners.hosts:HostRunner",
        "ssh": "flagscale.launcher.runners.hosts:HostRunner",
        "slurm": "flagscale.launcher.runners.slurm.runner:SlurmRunner",
    },
)
DEFAULT_RUNNER = "ssh"
"""Runner of an experiment that names none. It uses SSH only if other machines take part."""
