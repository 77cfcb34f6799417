"""Command lines that start the benchmark's ranks on other hosts: mpirun's and srun's."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from flagscale.bench.collectives.spec import Placement
from flagscale.errors import UnreachableError

_PROGRAM = ("-m", "flagscale.bench.collectives")
# With a value, or none: what says where to start must not start again over there.
_STARTING = {
    "-s": "many",
    "--hosts": "many",
    "--hosts-file": "one",
    "--mpi-log-dir": "one",
    "-S": "none",
    "--slurm-mode": "none",
    "--slurm-job-id": "one",
    "--slurm-setup-script": "one",
    "-u": "one",
    "--slurm-vcpus-per-node": "one",
}
_PORT = 29_511


def starter_argv(
    place: Placement, words: Sequence[str], environment: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """The command that starts the ranks on the hosts or in the allocation of ``place``, and what
    it adds to the environment.

    Raises:
        UnreachableError: mpirun or srun is not installed.
    """
    program = [sys.executable, *_PROGRAM, *without_starting(words)]
    if place.slurm:
        if shutil.which("srun", path=environment.get("PATH")) is None:
            raise UnreachableError("--slurm-mode: srun is not installed here")
        return srun_argv(place, program), {}
    port = str(place.port or _PORT)
    meeting = {"MASTER_ADDR": place.address or place.hosts[0], "MASTER_PORT": port}
    mpirun = shutil.which("mpirun", path=environment.get("PATH"))
    if mpirun is None:
        raise UnreachableError("--hosts: mpirun is not installed here", hint="OpenMPI or MPICH")
    return mpirun_argv(place, program, open_mpi=_is_open_mpi(mpirun), names=tuple(meeting)), meeting


def without_starting(words: Sequence[str]) -> list[str]:
    """``words`` without the flags that say how to start, and their values."""
    result: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        takes = _STARTING.get(word.partition("=")[0])
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
    each = max(1, ranks // place.nodes)
    hosts = ",".join(f"{host}:{each}" for host in place.hosts)
    command = ["mpirun", "-np", str(ranks)]
    if open_mpi:
        command += ["--host", hosts, *(word for name in names for word in ("-x", name))]
        command += ["--output-filename", str(place.log_dir)] if place.log_dir else []
    else:
        command += ["-hosts", hosts, "-genvlist", ",".join(names)]
        if place.log_dir:
            command += ["-outfile-pattern", str(place.log_dir / "rank_%r.log")]
    return [*command, *program]


def srun_argv(place: Placement, program: Sequence[str]) -> list[str]:
    """srun's line: in an allocation that exists, or in one of its own."""
    ranks = place.workers or 1
    each = ranks // place.nodes
    command = ["srun", f"--nodes={place.nodes}", f"--ntasks={ranks}", f"--ntasks-per-node={each}"]
    if place.slurm_job is not None:
        command += [f"--jobid={place.slurm_job}", "--overlap"]
    if place.slurm_cpus is not None:
        command.append(f"--cpus-per-task={max(1, place.slurm_cpus // each)}")
    if place.log_dir is not None:
        command.append(f"--output={place.log_dir / 'rank_%t.log'}")
    command.append("--kill-on-bad-exit=1")
    if place.slurm_setup is None:
        return [*command, *program]
    return [*command, *_after_setup(place.slurm_setup, program)]


def _after_setup(script: Path, program: Sequence[str]) -> list[str]:
    """The first rank of each host runs the script; the others wait for it."""
    done = '"${TMPDIR:-/tmp}/flagscale-setup-$SLURM_JOB_ID-$SLURM_STEP_ID"'
    text = (
        f'set -eu; if [ "$SLURM_LOCALID" = 0 ]; then bash {shlex.quote(str(script.absolute()))} '
        f'&& touch {done}; else while [ ! -e {done} ]; do sleep 0.2; done; fi; exec "$@"'
    )
    return ["bash", "-c", text, "bash", *program]


def _is_open_mpi(mpirun: str) -> bool:
    said = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False)
    return "Open MPI" in said.stdout + said.stderr
