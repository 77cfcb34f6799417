"""The environment of a host's ranks: every variable with its value and where it came from. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from flagscale.accelerators import probes
from flagscale.config.interpolation import ENVS, literal, readable, references
from flagscale.config.schema import SPECIFIC_SECTIONS, Experiment
from flagscale.config.secrets import is_secret
from flagscale.errors import ConfigError, Problem
from flagscale.hosts.hostfile import Host
from flagscale.launcher.liveness import secret
from flagscale.launcher.liveness.options import WEBHOOK
from flagscale.status import ATTEMPT_VARIABLE, RUN_ID_VARIABLE, STATUS_DIR_VARIABLE

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SHELL = re.compile(r"\$(?:([A-Za-z_][A-Za-z0-9_]*)|\{([A-Za-z_][A-Za-z0-9_]*)\})")
PYTHON_PATH = "PYTHONPATH"
_SHUTDOWN_SECONDS = 5.0
NODE = "FLAGSCALE_NODE"
MASTER_ADDR, MASTER_PORT = "FLAGSCALE_MASTER_ADDR", "FLAGSCALE_MASTER_PORT"
MEETING = "FLAGSCALE_MEETING"
JOBS = (NODE, MASTER_ADDR, MASTER_PORT, MEETING)
"""What a scheduler's job says to the script of a host: its name, where the ranks meet, and as JSON
the agent's options that it alone knows."""
_LAUNCHERS = (RUN_ID_VARIABLE, STATUS_DIR_VARIABLE, ATTEMPT_VARIABLE, secret.VARIABLE, *JOBS)
# What a host's script assigns for itself: an exported variable of that name would be overwritten.
SCRIPTS = re.compile(
    "after_stop|agent|agent_file|agent_pid|before_start|boot|code|exit_file|interrupted|known"
    "|other_boot|other_pid|other_ticks|phase|pid_file|program|record|run_dir|script_file|ticks"
    "|starter|torchrun|who"
)
# What bash refuses to assign, or gives another value than the one assigned.
_BASHS = re.compile(
    "BASHOPTS|BASHPID|BASH_(?:ALIASES|ARG[CV]|CMDS|LINENO|SOURCE|SUBSHELL|VERSINFO)|DIRSTACK|EUID"
    "|EPOCH(?:REALTIME|SECONDS)|FUNCNAME|GROUPS|LINENO|PIPESTATUS|PPID|S?RANDOM|SECONDS|SHELLOPTS"
    "|UID|_"
)
_TAKEN = (
    (
        re.compile("|".join(_LAUNCHERS)),
        "is set by the launcher: it tells the processes of a run from all others",
    ),
    (SCRIPTS, "is a name that the script of each host has for itself: choose another"),
    (_BASHS, "is bash's own: no script can give it a value"),
)
DEFAULT, INHERITED, DETECTED, COMMON = "default", "inherited", "detected", "envs"


@dataclass(frozen=True)
class EnvValue:
    """One environment variable of a host's ranks.

    ``origin`` is ``run`` (the run's own identity), ``default`` (the user gave none),
    ``inherited`` (from the environment of the launch), ``detected`` (found on the host) or the
    key of the YAML. ``value`` may refer to the host's own variables
    (:mod:`flagscale.config.interpolation`). A secret's value is kept from files, output and
    ``repr``: it travels in the started script's environment alone.
    """

    name: str
    value: str = field(repr=False)
    origin: str
    secret: bool = False

    @property
    def shown(self) -> str:
        """The value as a YAML writes it: ``${host:PATH}``."""
        return str(readable(self.value))

    def to_json(self) -> dict[str, object]:
        shown: dict[str, object] = {"name": self.name, "origin": self.origin}
        return {**shown, "secret": True} if self.secret else {**shown, "value": self.shown}


def build_environment(
    experiment: Experiment,
    host: Host,
    inherited: Mapping[str, str],
    *,
    run_id: str,
    status_dir: Path,
    threads: int | None,
    devices: Mapping[str, int] | None,
    interface: str | None = None,
) -> tuple[EnvValue, ...]:
    """The variables a host's script sets, by precedence defaults < inherited < envs < device
    type < host. PYTHONPATH among them holds the user's own entries.

    ``threads`` and ``devices``, how many of each kind, are None where the host has not been asked.
    ``interface`` is the one that reaches the other hosts."""
    given = _given(experiment, host)
    values = [
        EnvValue(RUN_ID_VARIABLE, run_id, "run"),
        EnvValue(STATUS_DIR_VARIABLE, str(status_dir), "run"),
    ]
    grace = max(1, round(min(experiment.runner.stop_grace, _SHUTDOWN_SECONDS)))
    for name, value in _defaults(host, threads, devices, grace).items():
        if name in given:
            continue
        # Written down too, so that the script does the same from another shell.
        origin = INHERITED if name in inherited else DEFAULT
        values.append(EnvValue(name, inherited.get(name, value), origin))
    values.extend(
        EnvValue(name, value, DETECTED)
        for name, value in _interfaces(interface).items()
        if name not in given
    )
    return (*values, *given.values())


def _given(experiment: Experiment, host: Host) -> dict[str, EnvValue]:
    """The user's variables. Raises :class:`ConfigError` for what cannot be a variable."""
    envs = experiment.envs
    layers: list[tuple[str, Mapping[str, str]]] = [(COMMON, envs.common)]
    if host.device_type is not None:
        by_type = envs.by_type.get(host.device_type, {})
        layers.append((f"{COMMON}.device_type_specific.{host.device_type}", by_type))
    layers.append((f"{COMMON}.node_specific.{host.name}", envs.by_host.get(host.name, {})))
    given: dict[str, EnvValue] = {}
    problems: list[tuple[str, str, str]] = []
    for origin, layer in layers:
        for name, value in layer.items():
            complaint = _complaint(name, value)
            if complaint:
                problems.append((origin, name, complaint))
            given[name] = EnvValue(name, value, origin, is_secret(name, literal(value)))
    problems += _lost_references(given)
    if problems:
        keys = [(f"experiment.{origin}.{name}", text) for origin, name, text in problems]
        raise ConfigError([Problem(k, text, experiment.sources.get(k)) for k, text in keys])
    return given


def _complaint(name: str, value: str) -> str | None:
    if not _NAME.fullmatch(name):
        return "is no name of an environment variable: expected letters, digits and _"
    taken = next((why for names, why in _TAKEN if names.fullmatch(name)), None)
    if taken is not None:
        return taken
    text = literal(value)
    if "\0" in text:
        return "holds a NUL character, which no environment can carry"
    if name in _shell_names(text):
        return f"${name} would stay as it is; for the host's own variable write ${{host:{name}}}"
    if is_secret(name, text) and text != value:
        return (
            "looks like a secret, which no script may hold; a host's variables can be no part of it"
        )
    return None


def _lost_references(given: Mapping[str, EnvValue]) -> Iterator[tuple[str, str, str]]:
    """References to variables that no longer have the host's own value where its script starts: the
    launcher puts its own and all secrets into the environment of the script."""
    taken = {*_LAUNCHERS, WEBHOOK} | {v.name for v in given.values() if v.secret}
    for value in given.values():
        for name in references(value.value):
            if name in taken:
                text = f"${{host:{name}}}: the host's own is replaced before its script starts"
                yield value.origin, value.name, text


def _shell_names(text: str) -> list[str]:
    """The variables that a shell would fill into a text."""
    return list(dict.fromkeys(first or second for first, second in _SHELL.findall(text)))


def shell_notes(experiment: Experiment) -> Iterator[str]:
    """A note of values that look as if a shell would fill in variables: none does."""
    envs = experiment.envs
    layers = [(ENVS, envs.common)]
    for section, own in zip(SPECIFIC_SECTIONS, (envs.by_type, envs.by_host), strict=True):
        layers += [(f"{ENVS}.{section}.{name}", layer) for name, layer in own.items()]
    found = [
        f"{key}.{name}"
        for key, layer in layers
        for name, value in layer.items()
        if _shell_names(literal(value)) and not is_secret(name, literal(value))
    ]
    if found:
        yield f"{', '.join(found)}: a $NAME stays as it is; ${{host:NAME}} is the host's own"


def _interfaces(interface: str | None) -> dict[str, str]:
    """Which interface collectives use. Left alone, each library guesses by rules of its own, and
    a host name that resolves to a loopback address makes gloo hang."""
    if interface is None:
        return {}
    # A bare name would be a prefix; `=` asks for this very interface.
    return {
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": f"={interface}",
        "FSCCL_SOCKET_IFNAME": f"={interface}",
    }


def _defaults(
    host: Host, threads: int | None, devices: Mapping[str, int] | None, grace: int
) -> dict[str, str]:
    """What is set where neither the user nor the inherited environment says otherwise."""
    defaults = {
        # Whole lines at once, in order with the launcher's own.
        "PYTHONUNBUFFERED": "1",
        # torchrun puts this in front of every line of a rank.
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": f"{host.name}:${{rank}}: ",
        # Seconds torchrun leaves its workers between TERM and KILL (from torch 2.13 on). After a
        # failure they cannot save anything, and a stop is brought to them by the agent.
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(grace),
    }
    if threads is not None:
        defaults["OMP_NUM_THREADS"] = str(threads)
    return defaults if devices is None else {**defaults, **probes.defaults(devices)}
