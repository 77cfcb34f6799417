"""Facts about a host: cores, devices, interface to the master, clock, and runs that are alive.

They are read from every host before a run is planned, so the program is bash that starts as few
processes as possible. For a preflight the same program also checks output paths and required
paths, and reports the host's Python environment, see :mod:`.python_environment`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flagscale import checkpoints
from flagscale.accelerators import probes
from flagscale.hosts import probe, python_environment
from flagscale.hosts.connection import HostConnection
from flagscale.hosts.program import (
    PROGRAMS,
    ProgramOutput,
    ShellValue,
    build_program,
    read_source,
    run_program,
)
from flagscale.hosts.python_environment import PythonEnvironment
from flagscale.status import RUN_ID_VARIABLE, STATUS_DIR_VARIABLE

NOT_WRITABLE = "not writable"
NOT_A_DIRECTORY = "not a directory"
_TIMEOUT_SECONDS = 60.0


@dataclass(frozen=True)
class PathState:
    """State of a path that a run will write on a host.

    ``existing`` is its nearest directory that exists. ``problem`` is the reason why ``user`` cannot
    write there, or empty. ``free_bytes`` is the free space in bytes, None where the host cannot
    report it.
    """

    existing: str
    problem: str = ""
    user: str = ""
    free_bytes: int | None = None


@dataclass(frozen=True)
class ModuleQuery:
    """Request to run a module of this project on a host, with the host's own Python.

    The module gets the arguments ``words`` and prints one line of JSON, which is returned under
    ``name``. ``environment`` holds the variables of the ranks in the form of
    :func:`flagscale.config.interpolation.split_references`, because references to the host's own
    variables are resolved there.
    """

    name: str
    module: str
    words: Sequence[str]
    project: str
    environment: Mapping[str, Sequence[Any]]


@dataclass(frozen=True)
class PreflightQuery:
    """Additional checks of a preflight on one host.

    ``project`` and ``exp_dir`` are the directories of this project and of the experiment there.
    ``required_paths`` must exist; ``output_paths`` are further paths that the run writes;
    ``load_dir`` is the directory to load a checkpoint from. ``compare_code`` requests a digest of
    the code. ``module_queries`` run there in any case, ``checkpoint_queries`` only if ``load_dir``
    contains a checkpoint. ``ignore_cache`` ignores the cached Python environment.
    """

    project: str
    exp_dir: str
    required_paths: Sequence[str] = ()
    output_paths: Sequence[str] = ()
    load_dir: str = ""
    compare_code: bool = False
    module_queries: Sequence[ModuleQuery] = ()
    checkpoint_queries: Sequence[ModuleQuery] = ()
    ignore_cache: bool = False


@dataclass(frozen=True)
class HostQuery:
    """Parameters of the program that reads one host's facts.

    ``port`` is the master port: None for no port, 0 for any free one. ``agents_port`` is the
    rendezvous port of the agents, if it must be free as well. If it is None and ``port`` is 0,
    the port after the chosen one must be free.
    """

    master: str
    log_root: str
    python: str
    setup: str = ""
    port: int | None = None
    agents_port: int | None = None
    preflight: PreflightQuery | None = None


@dataclass(frozen=True)
class HostFacts:
    """Facts that one host reported."""

    cpus: int | None
    devices: Mapping[str, int]
    """Number of chips by kind, without kinds that the host lacks."""
    interface: str | None
    boot_id: str
    clock_offset: float
    """Clock offset relative to this machine in seconds (positive: the host is ahead). It is the
    smallest offset that is consistent with the times of request and response.
    """
    products: Mapping[str, str] = field(default_factory=dict)
    """Vendor's product name by kind of chip, where the host can report it."""
    port: int | None = None
    """The chosen or requested master port, if it is free there; None if no port was requested."""
    busy_port: int | None = None
    """Requested port that another process uses."""
    port_holder: str = ""
    """Process that uses ``busy_port``, as far as this user may see it."""
    live_run_id: str = ""
    """Run id of a run in this log directory that is alive there."""
    python: PythonEnvironment | None = None
    python_error: str = ""
    address: str = ""
    is_master_loopback: bool = False
    """True if the master's address is a loopback address there, so that it refers to this very
    host.
    """
    has_project: bool = False
    """True if this project exists at its expected path."""
    missing_paths: tuple[str, ...] = ()
    """Required paths that do not exist."""
    exp_dir: PathState | None = None
    """State of the experiment's directory."""
    output_paths: Mapping[str, PathState] = field(default_factory=dict)
    """State of the further output paths, by path."""
    memory_bytes: int | None = None
    """Memory of the host."""
    checkpoints: tuple[str, ...] = ()
    """Names of the checkpoints in the load directory, complete or not."""

    def module_reply(self, name: str) -> Mapping[str, Any] | None:
        """Return the reply of a module, by the query's name; None if it was not run."""
        return self.python.module_replies.get(name) if self.python else None


def read_host_facts(connection: HostConnection, query: HostQuery) -> HostFacts:
    """Read the facts of one host. Raises :class:`~.errors.HostError`."""
    start_time = time.time()
    output = run_program(connection, build_facts_program(query), _TIMEOUT_SECONDS)
    facts = parse_facts(output, query, start_time, time.time())
    if query.preflight is not None and output.get("cached") and facts.python is None:
        # The cached environment is corrupt in a way that only shows after parsing.
        preflight = replace(query.preflight, ignore_cache=True)
        return read_host_facts(connection, replace(query, preflight=preflight))
    return facts


def build_facts_program(query: HostQuery) -> str:
    """Return the bash program that reads the facts of one host (:file:`programs/facts.sh` with its
    variables).
    """
    variables: dict[str, ShellValue] = {
        "master": query.master,
        "port": {None: "", 0: "any"}.get(query.port, str(query.port)),
        "agents_port": str(query.agents_port or ""),
        "log_root": query.log_root,
        "status_dir_prefix": f"{STATUS_DIR_VARIABLE}={query.log_root}/",
        "run_id_variable": RUN_ID_VARIABLE,
        "setup": query.setup,
        "python": query.python,
        "not_writable": NOT_WRITABLE,
        "not_a_directory": NOT_A_DIRECTORY,
        "checkpoint_name": checkpoints.DIRECTORY_PATTERN,
        "tracker": checkpoints.TRACKER_FILE,
        "device_probes": probes.count_scripts(),
    }
    preflight, fragments = query.preflight, list[str]()
    if preflight is not None:
        variables |= {
            "preflight": "yes",
            "project": preflight.project,
            "exp_dir": preflight.exp_dir,
            "load_dir": preflight.load_dir,
            "required_paths": preflight.required_paths,
            "output_paths": preflight.output_paths,
            "module_queries": _as_json(preflight.module_queries),
            "checkpoint_queries": _as_json(preflight.checkpoint_queries),
        }
        variables |= python_environment.shell_variables(
            preflight.project,
            query.python,
            query.setup,
            compare_code=preflight.compare_code,
            ignore_cache=preflight.ignore_cache,
        )
        fragments.append(read_source(PROGRAMS / "python_environment.sh"))
    fragments.append(read_source(PROGRAMS / "ports.sh"))
    return build_program(
        PROGRAMS / "facts.sh", variables, *fragments, python_environment.python_function()
    )


def _as_json(queries: Sequence[ModuleQuery]) -> list[str]:
    return [json.dumps(vars(query)) for query in queries]


def parse_facts(
    output: ProgramOutput, query: HostQuery, start_time: float, end_time: float
) -> HostFacts:
    """Parse the output of the program.

    ``start_time`` and ``end_time`` are this machine's clock before and after the program ran, in
    seconds since the epoch.
    """
    clock = output.get("clock").replace(",", ".")
    host_time = float(clock) if clock else start_time
    offset = host_time - start_time if host_time < start_time else max(0.0, host_time - end_time)
    required_paths = query.preflight.required_paths if query.preflight else ()
    output_paths = query.preflight.output_paths if query.preflight else ()
    path_states = {
        path: _parse_path_state(output, f"_{number}") for number, path in enumerate(output_paths)
    }
    return HostFacts(
        cpus=output.get_int("cpus") or None,
        memory_bytes=(output.get_int("memory_kib") or 0) * 1024 or None,
        devices={
            kind: n for kind in probes.count_scripts() if (n := output.get_int(f"count_{kind}"))
        },
        interface=output.get("interface") or None,
        boot_id=output.get("boot_id"),
        clock_offset=offset,
        products={k: name for k in probes.count_scripts() if (name := output.get(f"product_{k}"))},
        port=output.get_int("port"),
        busy_port=output.get_int("busy_port"),
        port_holder=output.get("port_holder"),
        live_run_id=output.get("alive"),
        python=python_environment.parse_environment(output.get("python")),
        python_error=output.get("python_error"),
        address=output.get("address"),
        is_master_loopback=output.get("loopback") == "yes",
        has_project=output.get("project") == "yes",
        missing_paths=tuple(
            required_paths[int(number)] for number in output.get("missing").split()
        ),
        exp_dir=_parse_path_state(output),
        output_paths={path: state for path, state in path_states.items() if state is not None},
        checkpoints=tuple(output.get("checkpoints").split()),
    )


def _parse_path_state(output: ProgramOutput, suffix: str = "") -> PathState | None:
    existing = output.get(f"existing{suffix}")
    if not existing:
        return None
    problem, user = output.get(f"problem{suffix}"), output.get("user")
    return PathState(existing, problem, user, output.get_int(f"free{suffix}"))


def list_installed_packages(facts: Sequence[HostFacts]) -> list[str]:
    """Return the packages that any of the hosts has installed, in the order of
    :data:`.probe.PACKAGES`.
    """
    installed = {name for host in facts if host.python for name in host.python.packages}
    return [name for name in probe.PACKAGES if name in installed]
