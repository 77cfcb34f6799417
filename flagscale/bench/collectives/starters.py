"""The command line that starts the benchmark's ranks on other hosts by mpirun."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence

from flagscale.bench.collectives.spec import Placement
from flagscale.bench.spawn import python_path
from flagscale.errors import UnreachableError

_PROGRAM = ("-m", "flagscale.bench.collectives")
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


def starter_argv(
    place: Placement, words: Sequence[str], environment: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """The command that starts the ranks on the hosts of ``place``, and what it adds to the
    environment.

    Raises:
        UnreachableError: mpirun is not installed.
    """
    program = [sys.executable, *_PROGRAM, *without_starting(words)]
    port = str(place.port or _PORT)
    meeting = {"MASTER_ADDR": place.address or place.hosts[0].name, "MASTER_PORT": port}
    meeting["PYTHONPATH"] = python_path()
    mpirun = shutil.which("mpirun", path=environment.get("PATH"))
    if mpirun is None:
        raise UnreachableError("--hosts: mpirun is not installed here", hint="OpenMPI or MPICH")
    return mpirun_argv(place, program, open_mpi=_is_open_mpi(mpirun), names=tuple(meeting)), meeting


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
        command += ["--output-filename", str(place.log_dir)] if place.log_dir else []
    else:
        command += ["-hosts", hosts, "-genvlist", ",".join(names)]
        if place.log_dir:
            command += ["-outfile-pattern", str(place.log_dir / "rank_%r.log")]
    return [*command, *program]


def _is_open_mpi(mpirun: str) -> bool:
    said = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False)
    return "Open MPI" in said.stdout + said.stderr
