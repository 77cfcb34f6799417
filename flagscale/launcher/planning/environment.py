"""Environment variables of a host's ranks, each with its value and its origin. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from flagscale.accelerators import probes
from flagscale.config.interpolation import (
    ENVS,
    host_references,
    remove_references,
    restore_references,
)
from flagscale.config.schema import SPECIFIC_SECTIONS, Environments
from flagscale.config.secrets import is_secret
from flagscale.errors import ConfigError, Problem
from flagscale.hosts.hostfile import Host
from flagscale.launcher.liveness import secret
from flagscale.launcher.liveness.options import NOTIFY_WEBHOOK_VARIABLE
from flagscale.status import ATTEMPT_VARIABLE, RUN_ID_VARIABLE, STATUS_DIR_VARIABLE

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SHELL_VARIABLE = re.compile(r"\$(?:([A-Za-z_][A-Za-z0-9_]*)|\{([A-Za-z_][A-Za-z0-9_]*)\})")
PYTHONPATH_VARIABLE = "PYTHONPATH"
_MAX_SHUTDOWN_SECONDS = 5.0
NODE_VARIABLE = "FLAGSCALE_NODE"
MASTER_ADDR_VARIABLE, MASTER_PORT_VARIABLE = "FLAGSCALE_MASTER_ADDR", "FLAGSCALE_MASTER_PORT"
RENDEZVOUS_VARIABLE = "FLAGSCALE_MEETING"
JOB_VARIABLES = (NODE_VARIABLE, MASTER_ADDR_VARIABLE, MASTER_PORT_VARIABLE, RENDEZVOUS_VARIABLE)
"""Variables that a scheduler's job passes to the script of a host.

They hold the host's name, the rendezvous address and port of the ranks, and, as JSON, the
options of the agent that only the job can determine.
"""
_LAUNCHER_VARIABLES = (
    RUN_ID_VARIABLE,
    STATUS_DIR_VARIABLE,
    ATTEMPT_VARIABLE,
    secret.SECRET_VARIABLE,
    *JOB_VARIABLES,
)
# Shell variables of a host's script: an exported variable of the same name would be overwritten.
SCRIPT_VARIABLES = re.compile(
    "after_stop|agent|agent_file|agent_pid|before_start|boot|code|earlier_pid|exit_file|interrupted"
    "|agent_pattern|other_boot|other_pid|other_ticks|phase|pid_file|program|record|run_dir|run_label"
    "|script_file|starter|ticks|torchrun"
)
# Variables that bash does not let a script assign, or that do not keep the assigned value.
_BASH_VARIABLES = re.compile(
    "BASHOPTS|BASHPID|BASH_(?:ALIASES|ARG[CV]|CMDS|LINENO|SOURCE|SUBSHELL|VERSINFO)|DIRSTACK|EUID"
    "|EPOCH(?:REALTIME|SECONDS)|FUNCNAME|GROUPS|LINENO|PIPESTATUS|PPID|S?RANDOM|SECONDS|SHELLOPTS"
    "|UID|_"
)
_RESERVED = (
    (
        re.compile("|".join(_LAUNCHER_VARIABLES)),
        "is set by the launcher to identify the processes of a run",
    ),
    (SCRIPT_VARIABLES, "is a variable of the script of each host: choose another name"),
    (_BASH_VARIABLES, "is reserved by bash: no script can set it"),
)
DEFAULT, INHERITED, DETECTED, COMMON = "default", "inherited", "detected", "envs"


@dataclass(frozen=True)
class EnvironmentVariable:
    """One environment variable of a host's ranks.

    Attributes:
        name: Name of the variable.
        value: May refer to the host's own variables (:mod:`flagscale.config.interpolation`).
        origin: ``run`` (identity of the run), ``default``, ``inherited`` (from the environment of
            the launch), ``detected`` (on the host), or the key of the YAML.
        secret: True if the value must not appear in files, output or ``repr``. It is passed in the
            environment of the started script only.
    """

    name: str
    value: str = field(repr=False)
    origin: str
    secret: bool = False

    @property
    def readable_value(self) -> str:
        """The value in YAML syntax: ``${host:PATH}``."""
        return str(restore_references(self.value))

    def to_json(self) -> dict[str, object]:
        record: dict[str, object] = {"name": self.name, "origin": self.origin}
        return (
            {**record, "secret": True} if self.secret else {**record, "value": self.readable_value}
        )


def build_environment(
    configured: Mapping[str, EnvironmentVariable],
    host: Host,
    inherited: Mapping[str, str],
    *,
    stop_grace: float,
    threads: int | None,
    devices: Mapping[str, int] | None,
    interface: str | None = None,
) -> tuple[EnvironmentVariable, ...]:
    """Return the variables that a host's script sets, without those that identify the run.

    Precedence: defaults < inherited < envs < device type < host. PYTHONPATH holds the user's own
    entries only.

    Args:
        configured: Variables of the YAML by name (:func:`configured_variables`).
        inherited: Variables that processes on the host inherit.
        stop_grace: Seconds between TERM and KILL when the run is stopped.
        threads: Threads per rank; None if the host was not probed.
        devices: Number of devices of each kind; None if the host was not probed.
        interface: Network interface that reaches the other hosts.
    """
    values = []
    grace = max(1, round(min(stop_grace, _MAX_SHUTDOWN_SECONDS)))
    for name, value in _default_variables(host, threads, devices, grace).items():
        if name in configured:
            continue
        # Inherited values are written down too, so that the script behaves the same in any shell.
        origin = INHERITED if name in inherited else DEFAULT
        values.append(EnvironmentVariable(name, inherited.get(name, value), origin))
    values.extend(
        EnvironmentVariable(name, value, DETECTED)
        for name, value in _interface_variables(interface).items()
        if name not in configured
    )
    return (*values, *configured.values())


def run_variables(run_id: str, status_dir: Path) -> tuple[EnvironmentVariable, ...]:
    """Return the variables that identify the processes of a run."""
    return (
        EnvironmentVariable(RUN_ID_VARIABLE, run_id, "run"),
        EnvironmentVariable(STATUS_DIR_VARIABLE, str(status_dir), "run"),
    )


def configured_variables(
    envs: Environments, host: Host, locations: Mapping[str, str]
) -> dict[str, EnvironmentVariable]:
    """Return the variables of the YAML for a host, by name.

    Args:
        envs: The section ``experiment.envs``.
        host: The host.
        locations: Source location (``file:line``) of each dotted key of the YAML, for messages.

    Raises:
        ConfigError: If a name or a value cannot be an environment variable.
    """
    layers: list[tuple[str, Mapping[str, str]]] = [(COMMON, envs.common)]
    if host.device_type is not None:
        by_type = envs.by_type.get(host.device_type, {})
        layers.append((f"{COMMON}.device_type_specific.{host.device_type}", by_type))
    layers.append((f"{COMMON}.node_specific.{host.name}", envs.by_host.get(host.name, {})))
    variables: dict[str, EnvironmentVariable] = {}
    problems: list[tuple[str, str, str]] = []
    for origin, layer in layers:
        for name, value in layer.items():
            problem = _find_problem(name, value)
            if problem:
                problems.append((origin, name, problem))
            variables[name] = EnvironmentVariable(
                name, value, origin, is_secret(name, remove_references(value))
            )
    problems += _find_replaced_references(variables)
    if problems:
        keys = [(f"experiment.{origin}.{name}", text) for origin, name, text in problems]
        raise ConfigError([Problem(k, text, locations.get(k)) for k, text in keys])
    return variables


def _find_problem(name: str, value: str) -> str | None:
    """Return why a variable cannot be set; None if it can."""
    if not _NAME.fullmatch(name):
        return "is no name of an environment variable: expected letters, digits and _"
    for names, reason in _RESERVED:
        if names.fullmatch(name):
            return reason
    text = remove_references(value)
    if "\0" in text:
        return "holds a NUL character, which no environment can carry"
    if name in _find_shell_variables(text):
        return f"${name} is not expanded; for the host's own variable write ${{host:{name}}}"
    if is_secret(name, text) and text != value:
        return (
            "looks like a secret, which no script may contain, so it cannot refer to variables of "
            "the host"
        )
    return None


def _find_replaced_references(
    variables: Mapping[str, EnvironmentVariable],
) -> Iterator[tuple[str, str, str]]:
    """Yield origin, name and message for references to variables that do not keep the host's value.

    The launcher puts its own variables and all secrets into the environment of the script, which
    replaces the host's own values before the script starts.
    """
    replaced_names = {*_LAUNCHER_VARIABLES, NOTIFY_WEBHOOK_VARIABLE}
    replaced_names |= {variable.name for variable in variables.values() if variable.secret}
    for variable in variables.values():
        for name in host_references(variable.value):
            if name in replaced_names:
                text = (
                    f"${{host:{name}}}: the host's own value is replaced before its script starts"
                )
                yield variable.origin, variable.name, text


def _find_shell_variables(text: str) -> list[str]:
    """Return the names of the variables that a shell would expand in a text."""
    return list(dict.fromkeys(first or second for first, second in _SHELL_VARIABLE.findall(text)))


def note_unexpanded_variables(envs: Environments) -> Iterator[str]:
    """Yield a note about values with ``$NAME``, which look as if a shell would expand them."""
    layers = [(ENVS, envs.common)]
    for section, overrides in zip(SPECIFIC_SECTIONS, (envs.by_type, envs.by_host), strict=True):
        layers += [(f"{ENVS}.{section}.{name}", layer) for name, layer in overrides.items()]
    keys = [
        f"{key}.{name}"
        for key, layer in layers
        for name, value in layer.items()
        if _find_shell_variables(remove_references(value))
        and not is_secret(name, remove_references(value))
    ]
    if keys:
        yield f"{', '.join(keys)}: $NAME is not expanded; ${{host:NAME}} is the host's own"


def _interface_variables(interface: str | None) -> dict[str, str]:
    """Return the variables that select the network interface of collectives.

    Otherwise each library chooses by rules of its own, and gloo hangs if a host name resolves to a
    loopback address.
    """
    if interface is None:
        return {}
    # NCCL treats a bare name as a prefix; `=` requests an exact match.
    return {
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": f"={interface}",
        "FSCCL_SOCKET_IFNAME": f"={interface}",
    }


def _default_variables(
    host: Host, threads: int | None, devices: Mapping[str, int] | None, grace: int
) -> dict[str, str]:
    """Return the values of variables that neither the user nor the inherited environment sets."""
    defaults = {
        # Output arrives in whole lines, in order with the launcher's own.
        "PYTHONUNBUFFERED": "1",
        # torchrun prefixes every line of a rank with this.
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": f"{host.name}:${{rank}}: ",
        # Seconds between TERM and KILL for torchrun's workers (torch 2.13 or later). After a
        # failure they cannot save anything; a stop is signalled to them by the agent.
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(grace),
    }
    if threads is not None:
        defaults["OMP_NUM_THREADS"] = str(threads)
    return defaults if devices is None else {**defaults, **probes.default_variables(devices)}
