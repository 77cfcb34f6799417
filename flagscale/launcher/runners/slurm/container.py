"""Container of each node's script: options of srun, or a command in front of the script.

Pyxis takes options of srun; Apptainer and Singularity are commands that exec the script. None of
them creates a PID namespace by default, so the batch script, which is outside, can end the run by
the pid of the script inside. Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from flagscale.config.schema import PROJECT, Container, Experiment, Runner
from flagscale.errors import ConfigError, Problem
from flagscale.launcher.planning.model import LaunchPlan

CONTAINER_KEY = "experiment.runner.slurm.container"
IMAGE_PYTHON = "python3"


def use_image_python(experiment: Experiment) -> Experiment:
    """Return the experiment with the image's Python instead of the launcher's."""
    runner = experiment.runner
    if runner.slurm.container is None or runner.python or runner.conda:
        return experiment
    return replace(experiment, runner=replace(runner, python=IMAGE_PYTHON))


def use_container_workdir(plan: LaunchPlan, container: Container | None) -> LaunchPlan:
    """Return the plan with the container's working directory for the ranks."""
    if container is None or container.workdir is None:
        return plan
    workdir = Path(container.workdir)
    return replace(plan, hosts=tuple(replace(host, workdir=workdir) for host in plan.hosts))


def srun_options(plan: LaunchPlan, runner: Runner) -> Iterator[str]:
    """Yield the container options of srun."""
    container = runner.slurm.container
    if container is None or container.runtime != "pyxis":
        return
    yield f"--container-image={container.image}"
    yield f"--container-mounts={','.join(_mounts(plan, runner, container))}"
    yield f"--container-workdir={plan.hosts[0].workdir}"
    yield from container.options


def exec_command(plan: LaunchPlan, runner: Runner) -> Iterator[str]:
    """Yield the command that runs the program of each node in its container."""
    container = runner.slurm.container
    if container is None or container.runtime == "pyxis":
        return
    yield from (container.runtime, "exec")
    yield from (f"--bind={mount}" for mount in _mounts(plan, runner, container))
    yield f"--pwd={plan.hosts[0].workdir}"
    yield from (*container.options, container.image)


def _mounts(plan: LaunchPlan, runner: Runner, container: Container) -> Iterator[str]:
    """Yield the mounts of the container: the run's own directories, then the user's.

    Raises:
        ConfigError: If a path contains a character that no runtime accepts.
    """
    run_paths = [
        plan.exp_dir,
        plan.log_dir,
        None if runner.build_dir else PROJECT,
        None if container.workdir else plan.hosts[0].workdir,
    ]
    for path in dict.fromkeys(str(path) for path in run_paths if path is not None):
        if ":" in path or "," in path:
            text = f"{path} cannot be mounted in a container: its path contains a colon or a comma"
            raise ConfigError(Problem(CONTAINER_KEY, text))
        yield f"{path}:{path}"
    for mount in container.mounts:
        yield mount if ":" in mount else f"{mount}:{mount}"
