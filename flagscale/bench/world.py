"""Rank, world size and rendezvous of this process, from its launcher's environment variables."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from flagscale.errors import ConfigError
from flagscale.hosts.names import expand_list
from flagscale.hosts.workers.task import python_path

Launcher = Literal["local", "SSH", "torchrun", "OpenMPI", "MPICH", "Slurm"]

RENDEZVOUS_VARIABLE = "FLAGSCALE_BENCH_MEETING"
"""Set for ranks that this host's starter runs: the file to which rank 0 writes its port."""

STARTER_VARIABLE = "FLAGSCALE_BENCH_STARTER"
"""``SSH`` for ranks that the SSH starter runs."""


@dataclass(frozen=True)
class BenchWorld:
    """This process among all ranks of a measurement."""

    launcher: Launcher
    rank: int
    size: int
    local_rank: int
    local_size: int
    rendezvous: str | None = None
    """Name that only the ranks of this job share, if all of them are on one host."""
    address: str | None = None
    port: int | None = None

    @property
    def one_host(self) -> bool:
        return self.local_size == self.size


# Each launcher's variables: rank, number of ranks, local rank, local number of ranks.
RANK_VARIABLES: dict[Launcher, tuple[str, str, str, str]] = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "OpenMPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "Slurm": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""),
}
# Settings of communication libraries are forwarded to ranks on other hosts. Others are not.
_FORWARDED_PREFIXES = (
    "NCCL_",
    "GLOO_",
    "FSCCL_",
    "FLAGCX_",
    "UCC_",
    "UCX_",
    "TORCH_",
    "OMP_",
    "MKL_",
)


def detect_world(environment: Mapping[str, str]) -> BenchWorld | None:
    """Return the rank that the environment describes; None outside of any launcher.

    An inner launcher (mpirun within a Slurm job) takes precedence over an outer one. A Slurm
    allocation alone is no launcher: only a step of ``srun`` has ranks.

    Raises:
        ConfigError: a launcher's variables are incomplete or inconsistent.
    """
    launcher = _detect_launcher(environment)
    if launcher is None:
        return None
    names = RANK_VARIABLES.get(launcher, RANK_VARIABLES["torchrun"])
    rank, size = (_read_number(environment, name) for name in names[:2])
    local_rank = _read_number(environment, names[2], rank)
    if launcher == "Slurm":
        local_size = size if environment.get("SLURM_STEP_NUM_NODES", "1") == "1" else 0
    else:
        local_size = _read_number(environment, names[3], size)
    if not 0 <= rank < size:
        raise ConfigError(f"{launcher}: {names[0]}={rank} is not a rank of {names[1]}={size}")
    address, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    if launcher == "Slurm" and address is None and local_size != size:
        address, port = _slurm_endpoint(environment)
    return BenchWorld(
        launcher,
        rank,
        size,
        local_rank,
        local_size,
        rendezvous=_rendezvous_name(launcher, environment) if local_size == size else None,
        address=address,
        port=_read_port(port) if address else None,
    )


def _detect_launcher(environment: Mapping[str, str]) -> Launcher | None:
    if RENDEZVOUS_VARIABLE in environment or environment.get(STARTER_VARIABLE) == "SSH":
        return "local" if RENDEZVOUS_VARIABLE in environment else "SSH"
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return "torchrun"
    if "OMPI_COMM_WORLD_RANK" in environment:
        return "OpenMPI"
    if "PMI_RANK" in environment and "PMI_FD" in environment:
        return "MPICH"
    # In a batch script or an interactive shell of an allocation SLURM_PROCID is 0, too.
    step = environment.get("SLURM_STEP_ID", "")
    if "SLURM_PROCID" in environment and step.isdigit() and "SLURM_PTY_PORT" not in environment:
        return "Slurm"
    return None


def _read_number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError as error:
        raise ConfigError(f"{name}={text!r} in the environment is not a whole number") from error


def _read_port(text: str | None) -> int:
    if text is None or not text.isdigit() or not 0 < int(text) < 2**16:
        raise ConfigError(f"MASTER_ADDR is set, but MASTER_PORT={text!r} is not a port")
    return int(text)


def _rendezvous_name(launcher: Launcher, environment: Mapping[str, str]) -> str | None:
    get = environment.get
    if launcher == "local":
        return environment[RENDEZVOUS_VARIABLE]
    if launcher == "OpenMPI":
        # The daemon's port distinguishes two runs with the same process id.
        daemon = get("PMIX_SERVER_URI2", "") or get("OMPI_MCA_orte_hnp_uri", "")
        return _to_file_name("openmpi", get("PMIX_NAMESPACE", ""), daemon)
    if launcher == "Slurm":
        return _to_file_name("slurm", get("SLURM_JOB_ID", ""), get("SLURM_STEP_ID", ""))
    return None


def _to_file_name(*words: str) -> str:
    return "-".join(re.sub(r"[^0-9A-Za-z]+", "_", word) for word in words)


def _slurm_endpoint(environment: Mapping[str, str]) -> tuple[str | None, str]:
    """Return the step's first host, which runs task 0, and a port derived from the step's
    number.
    """
    nodes = environment.get("SLURM_STEP_NODELIST", "")
    first_host = expand_list(nodes)[0] if nodes else None
    job = environment.get("SLURM_JOB_ID", "0")
    step_number = int(job) * 31 + int(environment.get("SLURM_STEP_ID", "0")) if job.isdigit() else 0
    return first_host, str(20_000 + step_number % 10_000)


def rank_environment(rank: int, size: int, local_rank: int, local_size: int) -> dict[str, str]:
    """Return this process's environment with a rank's variables, by torchrun's names."""
    values = (rank, size, local_rank, local_size)
    names = RANK_VARIABLES["torchrun"]
    variables = {name: str(value) for name, value in zip(names, values, strict=True)}
    return {**os.environ, **variables, "PYTHONPATH": python_path()}


def forwarded_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of this process that ranks on other hosts receive."""
    variables = {k: v for k, v in environment.items() if k.startswith(_FORWARDED_PREFIXES)}
    return {**variables, "PYTHONPATH": python_path()}


def usable_cores() -> int:
    """Return the number of cores that processes of this host may use."""
    return len(os.sched_getaffinity(0))
