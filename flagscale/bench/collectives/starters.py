"""The command line that starts the benchmark's ranks on other hosts by mpirun."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence

from flagscale.bench.collectives.spec import Placement
from flagscale.bench.spawn import call, handed_on, interruptible, show_log
from flagscale.errors import ConfigError, UnreachableError
from flagscale.hosts.hostfile import Host

# With a value, or none: what says where to start must not start again over there.
_STARTING = {
    "-s": "many",
    "--hosts": "many",
    "--hosts-file": "one",
    "--starter": "one",
    "--ssh-config": "one",
    "--mpi-log-dir": "one",
    "-S": "none",
    "--slurm-mode": "none",
    "--slurm-job-id": "one",
    "--slurm-setup-script": "one",
    "--slurm-wait": "one",
    "-u": "one",
    "--slurm-vcpus-per-node": "one",
}
_PORT = 29_511
_LARGEST_CODE = 4
_NOT_STARTED = 255
"""What mpirun and ssh return when a host cannot be reached."""
_SSH_ARGUMENTS = ("OMPI_MCA_plm_rsh_args", "PRTE_MCA_plm_ssh_args", "HYDRA_LAUNCHER_EXTRA_ARGS")
"""Where OpenMPI 4, OpenMPI 5 and MPICH read what they shall give ssh."""


def run_by_mpirun(place: Placement, program: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run ``program``, what follows the interpreter, as the ranks of ``place``; the exit code.

    Raises:
        UnreachableError: mpirun is not installed, or could not start the ranks.
        ConfigError: a hostfile says more of a host than mpirun can be told.
    """
    command, added = starter_argv(place, program, environment)
    if place.log_dir is not None:
        place.log_dir.mkdir(parents=True, exist_ok=True)
    with interruptible():
        code = call(command, {**environment, **added})
    if "-outfile-pattern" in command:
        show_log(place.log_dir)
    if code == _NOT_STARTED:
        raise UnreachableError("--starter mpirun: it could not start the ranks; see above")
    return code if 0 <= code <= _LARGEST_CODE else 1


def starter_argv(
    place: Placement, program: Sequence[str], environment: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """The command that starts ``program``, what follows the interpreter, as the ranks on the hosts
    of ``place``, and what it adds to the environment.

    Raises:
        UnreachableError: mpirun is not installed.
        ConfigError: a hostfile says more of a host than mpirun can be told.
    """
    mpirun = shutil.which("mpirun", path=environment.get("PATH"))
    if mpirun is None:
        raise UnreachableError(
            "--starter mpirun: mpirun is not installed here", hint="OpenMPI or MPICH"
        )
    _require_plain(place.hosts)
    # What reads an SSH configuration is no business of the ranks, which load this module too.
    from flagscale.bench.collectives.addresses import candidates, known_here

    added = handed_on(environment)
    added["MASTER_ADDR"] = known_here(candidates(place))
    added["MASTER_PORT"] = str(place.port or _PORT)
    names = tuple(added)
    if place.ssh_config is not None:
        for variable in _SSH_ARGUMENTS:
            added.setdefault(variable, f"-F {place.ssh_config.absolute()}")
    line = [sys.executable, *program]
    return mpirun_argv(place, line, open_mpi=_is_open_mpi(mpirun), names=names), added


def _require_plain(hosts: Sequence[Host]) -> None:
    for host in hosts:
        given = [name for name in ("user", "port", "proxy") if getattr(host, name) is not None]
        if given:
            raise ConfigError(
                f"--starter mpirun: it cannot be told the {' and '.join(given)} of {host.name}",
                hint="say so in an SSH configuration (--ssh-config), or leave the start to ssh",
            )


def without_starting(words: Sequence[str]) -> list[str]:
    """``words`` without the flags that say how to start, and their values."""
    return without(words, _STARTING)


def without(words: Sequence[str], flags: Mapping[str, str]) -> list[str]:
    """``words`` without ``flags``, each of which takes ``one`` value, ``many`` or ``none``."""
    result: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        takes = flags.get(word.partition("=")[0])
        if takes is None:
            result.append(word)
        elif "=" not in word and takes == "one":
            rest = rest[1:]
        elif "=" not in word and takes == "many":
            while rest and not rest[0].startswith("-"):
                rest.pop(0)
    return result


def mpirun_argv(
    place: Placement, program: Sequence[str], *, open_mpi: bool, names: Sequence[str]
) -> list[str]:
    """mpirun's line for equally many ranks a host; ``names`` are variables to hand on."""
    ranks = place.workers or 1
    shares = zip(place.hosts, place.shares, strict=True)
    hosts = ",".join(f"{host.name}:{share}" for host, share in shares)
    command = ["mpirun", "-np", str(ranks)]
    if open_mpi:
        command += ["--host", hosts, *(word for name in names for word in ("-x", name))]
        command += ["--output-filename", str(place.log_dir.absolute())] if place.log_dir else []
    else:
        command += ["-hosts", hosts, "-genvlist", ",".join(names)]
        if place.log_dir:
            command += ["-outfile-pattern", str(place.log_dir.absolute() / "rank_%r.log")]
    return [*command, *program]


def _is_open_mpi(mpirun: str) -> bool:
    """Else it is MPICH's or one made of that, whose flags are others."""
    done = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False)
    said = (done.stdout + done.stderr).lower()
    return any(name in said for name in ("open mpi", "openrte", "prte"))
