"""The container that the script of each node runs in: words for srun, or before the script. Pure.

Pyxis is told by options of srun's; Apptainer and Singularity are commands that become the script.
None of them makes a PID namespace by itself: the batch script, which is outside, ends the run by
the pid of the script inside.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from flagscale.config.schema import PROJECT, Container, Experiment, Runner
from flagscale.errors import ConfigError, Problem
from flagscale.launcher.planning.model import LaunchPlan

KEY = "experiment.runner.slurm.container"
PYTHON = "python3"


def with_its_python(experiment: Experiment) -> Experiment:
    """The experiment with the image's Python in the place of the launcher's."""
    runner = experiment.runner
    if runner.slurm.container is None or runner.python or runner.conda:
        return experiment
    return replace(experiment, runner=replace(runner, python=PYTHON))


def with_its_directory(plan: LaunchPlan, container: Container | None) -> LaunchPlan:
    """The plan of ranks that work in the container's directory."""
    if container is None or container.workdir is None:
        return plan
    workdir = Path(container.workdir)
    return replace(plan, hosts=tuple(replace(host, workdir=workdir) for host in plan.hosts))


def srun_words(plan: LaunchPlan, runner: Runner) -> Iterator[str]:
    """Options of srun's."""
    container = runner.slurm.container
    if container is None or container.runtime != "pyxis":
        return
    yield f"--container-image={container.image}"
    yield f"--container-mounts={','.join(_mounts(plan, runner, container))}"
    yield f"--container-workdir={plan.hosts[0].workdir}"
    yield from container.options


def inside_words(plan: LaunchPlan, runner: Runner) -> Iterator[str]:
    """What stands before the program that srun starts on each node."""
    container = runner.slurm.container
    if container is None or container.runtime == "pyxis":
        return
    yield from (container.runtime, "exec")
    yield from (f"--bind={mount}" for mount in _mounts(plan, runner, container))
    yield f"--pwd={plan.hosts[0].workdir}"
    yield from (*container.options, container.image)


def _mounts(plan: LaunchPlan, runner: Runner, container: Container) -> Iterator[str]:
    """What of a node is in the container: the run's own, and what the user says. Raises
    :class:`ConfigError` for a path that no runtime could be told."""
    own = [plan.exp_dir, plan.log_dir, None if runner.build_dir else PROJECT]
    own += [None if container.workdir else plan.hosts[0].workdir]
    for path in dict.fromkeys(str(path) for path in own if path is not None):
        if ":" in path or "," in path:
            text = f"{path} cannot be in a container: its path holds a colon or a comma"
            raise ConfigError(Problem(KEY, text))
        yield f"{path}:{path}"
    for mount in container.mounts:
        yield mount if ":" in mount else f"{mount}:{mount}"
