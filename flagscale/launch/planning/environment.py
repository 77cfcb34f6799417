"""The environment of a host's ranks: every variable with its value and where it came from. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from flagscale.config.schema import Experiment
from flagscale.config.secrets import is_secret
from flagscale.errors import ConfigError, Problem
from flagscale.hosts.hostfile import Host
from flagscale.launch.liveness import secret
from flagscale.status import ATTEMPT_VARIABLE, RUN_ID_VARIABLE, STATUS_DIR_VARIABLE

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
PYTHON_PATH = "PYTHONPATH"
_SHUTDOWN_SECONDS = 5.0
DEFAULT, INHERITED, DETECTED, COMMON = "default", "inherited", "detected", "envs"


@dataclass(frozen=True)
class EnvValue:
    """One environment variable of a host's ranks.

    ``origin`` is ``run`` (the run's own identity), ``default`` (the user gave none),
    ``inherited`` (from the environment of the launch), ``detected`` (found on the host) or the
    key of the YAML. A secret's value is
    kept from files, output and ``repr``: it travels in the started script's environment alone.
    """

    name: str
    value: str = field(repr=False)
    origin: str
    secret: bool = False

    def to_json(self) -> dict[str, object]:
        shown: dict[str, object] = {"name": self.name, "origin": self.origin}
        return {**shown, "secret": True} if self.secret else {**shown, "value": self.value}


def build_environment(
    experiment: Experiment,
    host: Host,
    inherited: Mapping[str, str],
    *,
    run_id: str,
    status_dir: Path,
    threads: int | None,
    gpus: int | None,
    interface: str | None = None,
) -> tuple[tuple[EnvValue, ...], tuple[str, ...]]:
    """The variables a host's script sets, by precedence defaults < inherited < envs < device
    type < host, and the user's own entries of PYTHONPATH, which come after the project's.

    ``threads`` and ``gpus`` are None where the host has not been asked. ``interface`` is the one
    that reaches the other hosts."""
    given = _given(experiment, host)
    values = [
        EnvValue(RUN_ID_VARIABLE, run_id, "run"),
        EnvValue(STATUS_DIR_VARIABLE, str(status_dir), "run"),
    ]
    grace = max(1, round(min(experiment.runner.stop_grace, _SHUTDOWN_SECONDS)))
    for name, value in _defaults(host, threads, gpus, grace).items():
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
    own_path = given.pop(PYTHON_PATH, None)
    values.extend(given.values())
    return tuple(values), (own_path.value,) if own_path and own_path.value else ()


def _given(experiment: Experiment, host: Host) -> dict[str, EnvValue]:
    """The user's variables. Raises :class:`ConfigError` for what cannot be a variable."""
    envs = experiment.envs
    layers: list[tuple[str, Mapping[str, str]]] = [(COMMON, envs.common)]
    if host.device_type is not None:
        by_type = envs.by_type.get(host.device_type, {})
        layers.append((f"{COMMON}.device_type_specific.{host.device_type}", by_type))
    layers.append((f"{COMMON}.node_specific.{host.name}", envs.by_host.get(host.name, {})))
    given: dict[str, EnvValue] = {}
    problems = []
    for origin, layer in layers:
        for name, value in layer.items():
            complaint = _complaint(name, value)
            if complaint:
                problems.append(Problem(f"experiment.{origin}.{name}", complaint))
            given[name] = EnvValue(name, value, origin, is_secret(name, value))
    if problems:
        raise ConfigError(problems)
    return given


def _complaint(name: str, value: str) -> str | None:
    if not _NAME.fullmatch(name):
        return "is no name of an environment variable: expected letters, digits and _"
    if name in (RUN_ID_VARIABLE, STATUS_DIR_VARIABLE, ATTEMPT_VARIABLE, secret.VARIABLE):
        return "is set by the launcher: it tells the processes of a run from all others"
    if "\0" in value:
        return "holds a NUL character, which no environment can carry"
    return None


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


def _defaults(host: Host, threads: int | None, gpus: int | None, grace: int) -> dict[str, str]:
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
    if gpus:
        # No NVLink multicast: it is not safe on hosts that are shared with others.
        defaults |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    elif gpus == 0:
        # Compiling costs a dozen seconds at the first step and gains nothing on a CPU.
        defaults["TORCHDYNAMO_DISABLE"] = "1"
    return defaults
