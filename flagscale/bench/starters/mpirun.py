"""Starter of ranks on other hosts by mpirun."""

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

_PORT = 29_511
_NOT_STARTED = 255
"""Exit code of mpirun and ssh when a host cannot be reached."""
_SSH_ARGUMENTS = ("OMPI_MCA_plm_rsh_args", "PRTE_MCA_plm_ssh_args", "HYDRA_LAUNCHER_EXTRA_ARGS")
"""Variables with ssh arguments for OpenMPI 4, OpenMPI 5 and MPICH."""


def run_by_mpirun(place: Placement, task: WorkerTask, environment: Mapping[str, str]) -> int:
    """Run a task as the ranks of ``place``, and return the exit code.

    Raises:
        UnreachableError: mpirun is not installed, or could not start the ranks.
        ConfigError: a hostfile has settings that mpirun does not support.
    """
    command, added = build_starter(place, task, environment)
    with unwind_on_signal():
        code = run_rank_launcher(command, {**environment, **added}, place.log_dir)
    if code == _NOT_STARTED:
        raise UnreachableError("--starter mpirun: it could not start the ranks; see above")
    return overall_exit_code(code)


def build_starter(
    place: Placement, task: WorkerTask, environment: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """Return the command line that starts the ranks of ``place``, and its additional variables.

    Raises:
        UnreachableError: mpirun is not installed.
        ConfigError: a hostfile has settings that mpirun does not support.
    """
    mpirun = shutil.which("mpirun", path=environment.get("PATH"))
    if mpirun is None:
        raise UnreachableError(
            "--starter mpirun: mpirun is not installed here", hint="OpenMPI or MPICH"
        )
    for host in place.hosts:
        unsupported = [
            name for name in ("user", "port", "proxy") if getattr(host, name) is not None
        ]
        if unsupported:
            raise ConfigError(
                f"--starter mpirun: it cannot be told the {' and '.join(unsupported)} of "
                f"{host.name}",
                hint="say so in an SSH configuration (--ssh-config), or leave the start to ssh",
            )
    if any(host for host, _, _ in place.environment):
        raise ConfigError("--starter mpirun: it gives all hosts one environment, --env HOST: none")
    common = {name: value for _, name, value in place.environment}
    added = {**forwarded_variables(environment), **common, **task.to_environment()}
    added["MASTER_ADDR"] = first_resolvable(rendezvous_candidates(place))
    added["MASTER_PORT"] = str(place.port or _PORT)
    names = tuple(added)
    if place.ssh_config is not None:
        for variable in _SSH_ARGUMENTS:
            added.setdefault(variable, f"-F {place.ssh_config.absolute()}")
    return mpirun_argv(place, task.command, open_mpi=_is_open_mpi(mpirun), names=names), added


def mpirun_argv(
    place: Placement, program: Sequence[str], *, open_mpi: bool, names: Sequence[str]
) -> list[str]:
    """Return mpirun's command line for the ranks of each host. ``names`` are variables to
    forward.
    """
    per_host = zip(place.hosts, place.per_host, strict=True)
    hosts = ",".join(f"{host.name}:{ranks}" for host, ranks in per_host)
    log_dir = place.log_dir and place.log_dir.absolute()
    command = ["mpirun", "-np", str(place.workers or 1)]
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
