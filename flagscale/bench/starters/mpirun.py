"""Starter of ranks on other hosts by OpenMPI's or MPICH's mpirun (``--starter mpirun``)."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence

from flagscale.bench.placement import Placement
from flagscale.bench.starters.launcher_command import run_rank_launcher
from flagscale.bench.starters.local import log_path, overall_exit_code
from flagscale.bench.starters.ssh import first_resolvable, rendezvous_candidates
from flagscale.bench.world import forwarded_variables
from flagscale.errors import ConfigError, UnreachableError
from flagscale.hosts.workers.children import unwind_on_signal
from flagscale.hosts.workers.task import WorkerTask

_DEFAULT_PORT = 29_511
_EXIT_NOT_STARTED = 255
"""Exit code of mpirun and ssh when a host cannot be reached."""
_SSH_ARGUMENTS = ("OMPI_MCA_plm_rsh_args", "PRTE_MCA_plm_ssh_args", "HYDRA_LAUNCHER_EXTRA_ARGS")
"""Variables with ssh arguments for OpenMPI 4, OpenMPI 5 and MPICH."""


def run_by_mpirun(placement: Placement, task: WorkerTask, environment: Mapping[str, str]) -> int:
    """Run a task as the ranks of ``placement``, and return the exit code.

    Raises:
        UnreachableError: mpirun is not installed, or could not start the ranks.
        ConfigError: a hostfile has settings that mpirun does not support.
    """
    command, variables = build_starter(placement, task, environment)
    with unwind_on_signal():
        code = run_rank_launcher(command, {**environment, **variables}, placement.log_dir)
    if code == _EXIT_NOT_STARTED:
        raise UnreachableError("--starter mpirun: it could not start the ranks; see above")
    return overall_exit_code(code)


def build_starter(
    placement: Placement, task: WorkerTask, environment: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """Return the command line that starts the ranks of ``placement``, and its additional variables.

    Raises:
        UnreachableError: mpirun is not installed.
        ConfigError: a hostfile has settings that mpirun does not support.
    """
    mpirun = shutil.which("mpirun", path=environment.get("PATH"))
    if mpirun is None:
        raise UnreachableError(
            "--starter mpirun: mpirun is not installed here", hint="OpenMPI or MPICH"
        )
    for host in placement.hosts:
        unsupported = [
            name for name in ("user", "port", "proxy") if getattr(host, name) is not None
        ]
        if unsupported:
            raise ConfigError(
                f"--starter mpirun: the {' and '.join(unsupported)} of {host.name} cannot be "
                "passed to mpirun",
                hint="set it in an SSH configuration (--ssh-config), or use --starter ssh",
            )
    if any(host for host, _, _ in placement.environment):
        raise ConfigError(
            "--starter mpirun: --env HOST:NAME=VALUE is not supported: all hosts get the same "
            "variables"
        )
    user_variables = {name: value for _, name, value in placement.environment}
    variables = {**forwarded_variables(environment), **user_variables, **task.to_environment()}
    variables["MASTER_ADDR"] = first_resolvable(rendezvous_candidates(placement))
    variables["MASTER_PORT"] = str(placement.port or _DEFAULT_PORT)
    names = tuple(variables)
    if placement.ssh_config is not None:
        for variable in _SSH_ARGUMENTS:
            variables.setdefault(variable, f"-F {placement.ssh_config.absolute()}")
    return mpirun_argv(
        placement, task.command, open_mpi=_is_open_mpi(mpirun), names=names
    ), variables


def mpirun_argv(
    placement: Placement, program: Sequence[str], *, open_mpi: bool, names: Sequence[str]
) -> list[str]:
    """Return mpirun's command line for the ranks of each host. ``names`` are variables to
    forward.
    """
    per_host = zip(placement.hosts, placement.per_host, strict=True)
    hosts = ",".join(f"{host.name}:{ranks}" for host, ranks in per_host)
    log_dir = placement.log_dir and placement.log_dir.absolute()
    command = ["mpirun", "-np", str(placement.ranks or 1)]
    if open_mpi:
        command += ["--host", hosts, *(word for name in names for word in ("-x", name))]
        command += ["--output-filename", str(log_dir)] if log_dir else []
    else:
        command += ["-hosts", hosts, "-genvlist", ",".join(names)]
        command += ["-outfile-pattern", str(log_path(log_dir, "%r"))] if log_dir else []
    return [*command, *program]


def _is_open_mpi(mpirun: str) -> bool:
    """Return whether mpirun is OpenMPI's. Otherwise it is MPICH's, or derived from it, with
    other flags.
    """
    result = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False)
    version = (result.stdout + result.stderr).lower()
    return any(name in version for name in ("open mpi", "openrte", "prte"))
