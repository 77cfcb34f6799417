"""What an experiment says of one host: its Python, its directory, its commands, its arguments.
Pure.

``device_type_specific`` and ``node_specific`` lie over the values that all hosts share, in this
order. Each host is worked out from the experiment itself, so that nothing of one host leaks into
the next.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from flagscale.config.arguments.flatten import leaves
from flagscale.config.arguments.parser import canonicalise
from flagscale.config.schema import PROJECT, Experiment, Specific
from flagscale.hosts.hostfile import Host
from flagscale.hosts.program import source

# The sections of `train` that hold what a layer adds, and that no YAML can name.
_ADDED = "specific"


@cache
def bash(name: str) -> str:
    """A part of a host's script, from its file beside this one, without the words that open it."""
    return source(Path(__file__).with_name(name)).partition("\n\n")[2].rstrip("\n")


@dataclass(frozen=True)
class Settings:
    """What holds on one host. ``origins`` has, for each value that is this host's or its type's
    alone, where it comes from: pairs of key and what was given there."""

    python: str | None
    conda: str | None
    build_dir: Path | None
    before_start: str
    after_stop: str
    sections: Mapping[str, Any]
    origins: tuple[tuple[str, str], ...] = ()

    @property
    def setup(self) -> str:
        """Shell commands that make the host's Python the one that is found first."""
        text = ""
        if self.conda:
            text += f"{bash('conda.sh')}\nconda activate {shlex.quote(self.conda)}\n"
        if self.python and "/" in self.python:
            directory = shlex.quote(str(PurePosixPath(self.python).parent))
            text += f'export PATH={directory}"${{PATH:+:$PATH}}"\n'
        return text


def settings(experiment: Experiment, host: Host) -> Settings:
    """What an experiment says of this host."""
    layers = list(_layers(experiment, host))
    origins: list[tuple[str, str]] = []
    runner, cmds = experiment.runner, experiment.cmds
    values: dict[str, Any] = {
        "build_dir": runner.build_dir,
        "python": runner.python,
        "conda": runner.conda,
        "before_start": cmds.before_start,
        "after_stop": cmds.after_stop,
    }
    for origin, layer in layers:
        for name in values:
            given = getattr(layer, name)
            if given is not None:
                values[name] = given
                where = f"{origin}.cmds.{name}" if name in _COMMANDS else f"{origin}.{name}"
                origins.append((where, str(given)))
    arguments = [(origin, layer.arguments) for origin, layer in layers]
    sections, found = merge(experiment.train.sections(), arguments)
    return Settings(**values, sections=sections, origins=(*origins, *found))


def all_settings(experiment: Experiment, hosts: Iterable[Host]) -> tuple[Settings, ...]:
    """What it says of each host. Hosts of one type that have nothing of their own share theirs:
    of thousands, few are worked out."""
    made: dict[tuple[str | None, str | None], Settings] = {}
    every = []
    for host in hosts:
        key = (host.device_type, host.name if host.name in experiment.by_host else None)
        if key not in made:
            made[key] = settings(experiment, host)
        every.append(made[key])
    return tuple(every)


_COMMANDS = ("before_start", "after_stop")


def _layers(experiment: Experiment, host: Host) -> Iterator[tuple[str, Specific]]:
    if host.device_type is not None and host.device_type in experiment.by_type:
        yield f"device_type_specific.{host.device_type}", experiment.by_type[host.device_type]
    if host.name in experiment.by_host:
        yield f"node_specific.{host.name}", experiment.by_host[host.name]


def merge(
    sections: Mapping[str, Any], layers: list[tuple[str, Mapping[str, Any]]]
) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Sections of arguments with layers over them, and where each value of a layer came from.

    A layer's argument takes the place of the one that means the same, whatever section either
    stands in and however it is spelled. Null takes an argument away.
    """
    made = _copy(sections)
    origins: list[tuple[str, str]] = []
    for origin, layer in layers:
        for path, name, value in leaves(layer, f"{origin}.", nulls=True):
            _put(made, name, value)
            origins.append((path, "" if value is None else f"{value}"))
    return made, origins


def _copy(sections: Mapping[Any, Any]) -> dict[Any, Any]:
    return {k: _copy(v) if isinstance(v, Mapping) else v for k, v in sections.items()}


def _put(made: dict[str, Any], name: str, value: Any) -> None:
    meaning = _meaning(name, value)
    for section in _sections(made):
        for key in list(section):
            if isinstance(section[key], Mapping):
                continue
            other = str(key).replace("-", "_")
            if other == name:
                section[key] = value
                return
            if _meaning(other, section[key]) == meaning:
                del section[key]
    made.setdefault(_ADDED, {})[name] = value


def _sections(section: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield section
    for inner in section.values():
        if isinstance(inner, dict):
            yield from _sections(inner)


def _meaning(name: str, value: Any) -> str:
    """The argument that a name stands for: its own, or an alias's target."""
    try:
        canonical = canonicalise(name, value) if value is not None else None
    except ValueError:
        canonical = None
    return canonical[0] if canonical is not None else name


def rebased(path: Path, project: Path) -> Path:
    """A path inside this project, as it is called on a host where the project lies elsewhere."""
    if project == PROJECT or not path.is_relative_to(PROJECT):
        return path
    return project / path.relative_to(PROJECT)
