"""The command line that starts the benchmark's ranks on other hosts by mpirun."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence

from flagscale.bench.placement import Placement
from flagscale.bench.rank import Job
from flagscale.bench.spawn import call_starter, handed_on, interruptible, log_path, own_code
from flagscale.bench.starters.ssh import candidates, known_here
from flagscale.errors import ConfigError, UnreachableError

_PORT = 29_511
_NOT_STARTED = 255
"""What mpirun and ssh return when a host cannot be reached."""
_SSH_ARGUMENTS = ("OMPI_MCA_plm_rsh_args", "PRTE_MCA_plm_ssh_args", "HYDRA_LAUNCHER_EXTRA_ARGS")
"""Where OpenMPI 4, OpenMPI 5 and MPICH read what they shall give ssh."""


def run_by_mpirun(place: Placement, job: Job, environment: Mapping[str, str]) -> int:
    """Carry out ``job`` as the ranks of ``place``; the exit code.

    Raises:
        UnreachableError: mpirun is not installed, or could not start the ranks.
        ConfigError: a hostfile says more of a host than mpirun can be told.
    """
    command, added = starter_argv(place, job, environment)
    with interruptible():
        code = call_starter(command, {**environment, **added}, place.log_dir)
    if code == _NOT_STARTED:
        raise UnreachableError("--starter mpirun: it could not start the ranks; see above")
    return own_code(code)


def starter_argv(
    place: Placement, job: Job, environment: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """The command that starts ``job`` as the ranks on the hosts of ``place``, and what it adds to
    the environment.

    Raises:
        UnreachableError: mpirun is not installed.
        ConfigError: a hostfile says more of a host than mpirun can be told.
    """
    mpirun = shutil.which("mpirun", path=environment.get("PATH"))
    if mpirun is None:
        raise UnreachableError(
            "--starter mpirun: mpirun is not installed here", hint="OpenMPI or MPICH"
        )
    for host in place.hosts:
        given = [name for name in ("user", "port", "proxy") if getattr(host, name) is not None]
        if given:
            raise ConfigError(
                f"--starter mpirun: it cannot be told the {' and '.join(given)} of {host.name}",
                hint="say so in an SSH configuration (--ssh-config), or leave the start to ssh",
            )
    if any(host for host, _, _ in place.environment):
        raise ConfigError("--starter mpirun: it gives all hosts one environment, --env HOST: none")
    common = {name: value for _, name, value in place.environment}
    added = {**handed_on(environment), **common, **job.variable()}
    added["MASTER_ADDR"] = known_here(candidates(place))
    added["MASTER_PORT"] = str(place.port or _PORT)
    names = tuple(added)
    if place.ssh_config is not None:
        for variable in _SSH_ARGUMENTS:
            added.setdefault(variable, f"-F {place.ssh_config.absolute()}")
    return mpirun_argv(place, job.command, open_mpi=_is_open_mpi(mpirun), names=names), added


def mpirun_argv(
    place: Placement, program: Sequence[str], *, open_mpi: bool, names: Sequence[str]
) -> list[str]:
    """mpirun's line for the ranks of each host; ``names`` are variables to hand on."""
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
    """Else it is MPICH's or one made of that, whose flags are others."""
    done = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False)
    said = (done.stdout + done.stderr).lower()
    return any(name in said for name in ("open mpi", "openrte", "prte"))
