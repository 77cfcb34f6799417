"""What an experiment gives for hosts and device types by name, against what there is. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from flagscale.config.arguments.values import did_you_mean
from flagscale.config.schema import SPECIFIC_SECTIONS, Experiment
from flagscale.config.sources import place_of
from flagscale.config.yaml_file import short
from flagscale.errors import Problem
from flagscale.hosts.hostfile import Host
from flagscale.hosts.names import compress


def unknown_names(experiment: Experiment, listed: Sequence[Host]) -> list[Problem]:
    """Names that are no host's and no type's of the whole hostfile, ``listed``: a run of some of
    its hosts still may say what is different on the others."""
    hostfile = experiment.runner.hostfile
    where = short(hostfile) if hostfile else "the hostfile"
    types = list(dict.fromkeys(host.device_type for host in listed if host.device_type))
    names = [host.name for host in listed]
    problems = []
    for key, name, by_type in _unmatched(experiment, types, set(names)):
        known, what = (types, "type") if by_type else (names, "name")
        there = f"it has {compress(known)}" if known else "its lines have no type="
        near = did_you_mean(name, known) or f"; {there}"
        message = f"no host in {where} has this {what}{near}"
        problems.append(Problem(key, message, place_of(experiment.sources, key)))
    return problems


def idle_names(experiment: Experiment, names: Sequence[str]) -> str:
    """A note of the names that matter to nobody where there is no hostfile that could have them;
    empty where all do."""
    keys = [key for key, _, _ in _unmatched(experiment, (), names)]
    if not keys:
        return ""
    return (
        f"{', '.join(keys)}: not used, since without experiment.runner.hostfile the only host is "
        f"{compress(names)}, of no type"
    )


def _unmatched(
    experiment: Experiment, types: Collection[str], names: Collection[str]
) -> Iterator[tuple[str, str, bool]]:
    """Dotted key and name of every part for a type or a host that is none of these, and whether
    it is for a type."""
    envs = experiment.envs
    for prefix, parts in (
        ("", (experiment.by_type, experiment.by_host)),
        ("experiment.envs.", (envs.by_type, envs.by_host)),
    ):
        for section, given in zip(SPECIFIC_SECTIONS, parts, strict=True):
            by_type = section == SPECIFIC_SECTIONS[0]
            for name in given:
                if name not in (types if by_type else names):
                    yield f"{prefix}{section}.{name}", name, by_type
