"""Position of this host among the hosts of a run: its rank, their number, the master's address.

Keys of ``experiment.runner`` take precedence. Otherwise the values come from the variables that
Kubernetes' indexed jobs, JobSet, Kubeflow's PyTorchJob and TrainJob, and torchrun use. Pure
functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flagscale.config.schema import Runner
from flagscale.errors import ConfigError, Problem

_PREFIX = "experiment.runner."
RANK_VARIABLES = ("NODE_RANK", "PET_NODE_RANK", "GROUP_RANK", "JOB_COMPLETION_INDEX", "RANK")
COUNT_VARIABLES = ("NNODES", "PET_NNODES", "WORLD_SIZE")
ADDRESS_VARIABLES = ("MASTER_ADDR", "PET_MASTER_ADDR")
PORT_VARIABLES = ("MASTER_PORT", "PET_MASTER_PORT")
_PROCESS_COUNT_VARIABLE = "PET_NPROC_PER_NODE"
DEFAULT_PORT = 29500
_LARGEST_PORT = 65535


@dataclass(frozen=True)
class Position:
    """Rank of this host, number of hosts, and address of the host with rank 0."""

    node_rank: int
    nnodes: int
    master_addr: str
    master_port: int


def find_position(runner: Runner, environment: Mapping[str, str]) -> Position:
    """Return the position of this host.

    Raises:
        ConfigError: If a value is missing or no number, or if variables contradict each other.
    """
    problems: list[Problem] = []
    nnodes = _find_count(runner, environment, problems)
    is_alone = nnodes == 1
    node_rank = _find_number(
        "node_rank",
        runner.node_rank,
        RANK_VARIABLES,
        environment,
        problems,
        0 if is_alone else None,
    )
    port = _find_number(
        "master_port", runner.master_port, PORT_VARIABLES, environment, problems, DEFAULT_PORT
    )
    address = _find_address(runner, environment, problems, "localhost" if is_alone else None)
    if node_rank is not None and nnodes is not None and node_rank >= nnodes:
        message = f"{node_rank} of {nnodes} host(s): ranks count from 0; "
        message += f"{_sources('nnodes', COUNT_VARIABLES)} is the number of hosts"
        problems.append(Problem(f"{_PREFIX}node_rank", message))
    if port is not None and not 0 < port < _LARGEST_PORT:
        message = f"expected a port from 1 to {_LARGEST_PORT - 1}, found {port}"
        problems.append(Problem(f"{_PREFIX}master_port", message))
    if problems or node_rank is None or nnodes is None or address is None or port is None:
        raise ConfigError(problems)
    return Position(node_rank, nnodes, address, port)


def _find_count(
    runner: Runner, environment: Mapping[str, str], problems: list[Problem]
) -> int | None:
    """Return the number of hosts. ``WORLD_SIZE`` may also be the number of ranks, as PyTorchJob
    sets it for several processes per host.
    """
    names = [name for name in COUNT_VARIABLES if environment.get(name)]
    if len(names) > 1 and names[-1] == COUNT_VARIABLES[-1]:
        hosts, ranks = environment[names[0]], environment[names[-1]]
        for processes in (environment.get(_PROCESS_COUNT_VARIABLE), str(runner.nproc_per_node)):
            is_known = hosts.isdigit() and processes is not None and processes.isdigit()
            if is_known and ranks == str(int(hosts) * int(processes or 0)):
                names = names[:-1]
                break
    selected = {name: environment[name] for name in names}
    return _find_number(
        "nnodes", runner.nnodes, COUNT_VARIABLES, selected, problems, None, minimum=1
    )


def _find_address(
    runner: Runner, environment: Mapping[str, str], problems: list[Problem], default: str | None
) -> str | None:
    if runner.master_addr:
        return runner.master_addr
    found = _variables(ADDRESS_VARIABLES, environment)
    if _report_contradiction("master_addr", found, problems):
        return None
    address = next(iter(found.values()), default)
    if address is None:
        problems.append(
            _missing("master_addr", "the address of the host with rank 0", ADDRESS_VARIABLES)
        )
    return address


def _find_number(
    key: str,
    configured: int | None,
    names: Sequence[str],
    environment: Mapping[str, str],
    problems: list[Problem],
    default: int | None,
    *,
    minimum: int = 0,
) -> int | None:
    """Return the value of a key, or of the variables that stand for it. Without any, return the
    default; if there is none, the missing value is a problem.
    """
    if configured is not None:
        return configured
    found = _variables(names, environment)
    if _report_contradiction(key, found, problems):
        return None
    if not found:
        if default is None:
            meaning = {"node_rank": "the rank of this host", "nnodes": "the number of hosts"}[key]
            problems.append(_missing(key, meaning, names))
        return default
    name, text = next(iter(found.items()))
    if not text.isdigit() or int(text) < minimum:
        message = f"expected a whole number not less than {minimum} in {name}, found {text!r}"
        problems.append(Problem(f"{_PREFIX}{key}", message))
        return None
    return int(text)


def _variables(names: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of these names that are set, in order."""
    return {name: environment[name].strip() for name in names if environment.get(name, "").strip()}


def _report_contradiction(key: str, found: Mapping[str, str], problems: list[Problem]) -> bool:
    """Report variables with different values, and return whether there are any."""
    if len(set(found.values())) < 2:
        return False
    settings = " and ".join(f"{name}={value}" for name, value in found.items())
    first = next(iter(found))
    message = f"{settings} contradict each other; write the one that counts, as `{key}: "
    problems.append(Problem(f"{_PREFIX}{key}", f"{message}${{env:{first}}}`"))
    return True


def _missing(key: str, meaning: str, names: Sequence[str]) -> Problem:
    return Problem(
        f"{_PREFIX}{key}",
        f"`type: cloud` needs {meaning}: set this key, or one of the variables {', '.join(names)}",
    )


def _sources(key: str, names: Sequence[str]) -> str:
    return f"`{key}` ({', '.join(names)})"
