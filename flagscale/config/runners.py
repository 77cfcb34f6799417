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
        "cloud": "flagscale.launcher.runners.cloud.runner:CloudRunner",
        "env": "flagscale.launcher.runners.cloud.runner:CloudRunner",
        "slurm": "flagscale.launcher.runners.slurm.runner:SlurmRunner",
    },
)
CLOUD_RUNNERS = ("cloud", "env")
"""Names of the runner of hosts that something else has started."""
UNSTATED_HOSTS = ("slurm", *CLOUD_RUNNERS)
"""Runners whose number of hosts the YAML alone does not state."""
DEFAULT_RUNNER = "ssh"
"""Runner of an experiment that names none. It uses SSH only if other machines take part."""
