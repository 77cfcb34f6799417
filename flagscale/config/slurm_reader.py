"""Reading ``experiment.runner.slurm``, and what must hold between it and the rest of the runner."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from flagscale.config.arguments.spec.values import did_you_mean, format_value, why_unfit
from flagscale.config.documented import documented
from flagscale.config.reader import SectionReader
from flagscale.config.secrets import is_secret
from flagscale.config.slurm_schema import (
    MOST_NODES,
    OTHERS,
    TYPED,
    Container,
    Slurm,
    SlurmType,
    seconds,
)

_PREFIX = "experiment.runner.slurm."
_TYPES = "device_type_specific"
_SECTIONS = ("extra", "container", _TYPES)
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_GPUS = re.compile(r"(?:[A-Za-z0-9_.\-]+:)?[1-9][0-9]*")
# Runtimes take commas for the next mount, and colons for the next part of one.
_MOUNT = re.compile(r"/[^:,]*(?::/[^:,]*(?::[A-Za-z0-9+]+)?)?")
_PID_NAMESPACES = frozenset({"--pid", "-p", "--containall", "-C"})
_MOST_SIGNAL = 65_535
"""Seconds that Slurm can send a signal before a job's time limit."""
SAVING_SECONDS = 30
"""Beside ``stop_grace``: what a job has to end between its signal and its time limit."""


def read_slurm(reader: SectionReader, data: Mapping[Any, Any]) -> Slurm:
    """The section ``slurm`` of ``experiment.runner``."""
    section = reader.mapping(data, "slurm", "experiment.runner.")
    settings = {name: value for name, value in section.items() if name not in _SECTIONS}
    documentation = documented(Slurm)
    for name in [name for name in settings if name not in documentation]:
        _misplaced(reader, f"{_PREFIX}{name}", str(name), [*documentation, *_SECTIONS])
        del settings[name]
    extra = _read_extra(reader, reader.mapping(section, "extra", _PREFIX))
    types = reader.mapping(section, _TYPES, _PREFIX)
    by_type = {}
    for name in types:
        prefix = f"{_PREFIX}{_TYPES}.{name}."
        type_settings = reader.mapping(types, name, f"{_PREFIX}{_TYPES}.")
        by_type[str(name)] = SlurmType(**_fields(reader, SlurmType, type_settings, prefix))
    fields = _fields(reader, Slurm, settings, _PREFIX)
    if section.get("container") is not None:
        fields["container"] = _read_container(reader, reader.mapping(section, "container", _PREFIX))
    return Slurm(**fields, extra=extra, by_type=by_type)


def _read_container(reader: SectionReader, section: Mapping[Any, Any]) -> Container:
    """``container``: what its runtime would misread is refused."""
    prefix = f"{_PREFIX}container."
    fields = _fields(reader, Container, section, prefix)
    container = Container(**fields)
    if not container.image and not section.get("image"):
        reader.problem(f"{prefix}image", "is required")
    for text in (*container.mounts, *container.options):
        name = "mounts" if text in container.mounts else "options"
        if complaint := _complaint(name, text):
            reader.problem(f"{prefix}{name}", complaint)
    for mount in container.mounts:
        if not _MOUNT.fullmatch(mount):
            message = "expected absolute paths, /here, /here:/there or /here:/there:ro"
            reader.problem(f"{prefix}mounts", f"{message}, found {format_value(mount)}")
    if container.workdir is not None and not container.workdir.startswith("/"):
        message = (
            f"expected an absolute path in the container, found {format_value(container.workdir)}"
        )
        reader.problem(f"{prefix}workdir", message)
    for option in _PID_NAMESPACES.intersection(container.options):
        message = f"{option} hides the node's processes, by which the run is ended"
        reader.problem(f"{prefix}options", message)
    return container


def _fields(
    reader: SectionReader, kind: type, settings: Mapping[Any, Any], prefix: str
) -> dict[str, Any]:
    """The fields of a section, the texts among them fit for Slurm."""
    fields = reader.fields(kind, settings, prefix)
    for name, value in fields.items():
        if isinstance(value, str) and (complaint := _complaint(name, value)):
            reader.problem(f"{prefix}{name}", complaint)
    return fields


def _misplaced(reader: SectionReader, key: str, name: str, names: list[str]) -> None:
    option = name.lstrip("-").replace("-", "_").lower()
    if option in TYPED:
        reader.problem(key, f"cannot be given: {TYPED[option]}")
    elif option in OTHERS:
        reader.problem(key, f"unknown key; other options of sbatch go to `extra`: {{{option}: …}}")
    else:
        reader.unknown(key, name, names)


def _complaint(name: str, text: str) -> str | None:
    """Return the problem of a text for sbatch. No quoting is needed, because no shell reads it."""
    if bad := why_unfit(text):
        return bad
    if not text.strip():
        return "expected a text, found an empty one"
    if any(ord(character) < 32 or ord(character) == 127 for character in text):
        return f"cannot hold control characters, found {format_value(text)}"
    if is_secret(name, text):
        return "looks like a secret, which `scontrol show job` would show to everybody"
    return _no_form(name, text)


def _begun(option: str, names: Iterable[str]) -> str | None:
    """The first of the names that an option is the beginning of."""
    return next((name for name in names if name.startswith(option)), None)


def _no_form(name: str, text: str) -> str | None:
    """Return the problem of a value that Slurm parses."""
    if name == "gpus_per_node" and not _GPUS.fullmatch(text):
        return (
            f"expected a number, or a type and a number such as h100:8, found {format_value(text)}"
        )
    if name == "dependency" and "singleton" in re.split("[,?]", text):
        return "singleton waits for jobs of the same name, and no two have one: give their numbers"
    if name == "time":
        try:
            seconds(text)
        except ValueError:
            return f"expected minutes, h:mm:ss, d-hh or d-hh:mm:ss, found {format_value(text)}"
    return None


def _read_extra(reader: SectionReader, section: Mapping[Any, Any]) -> dict[str, str | None]:
    """Any option of sbatch, but for those that the launcher gives itself."""
    extra: dict[str, str | None] = {}
    for name, value in section.items():
        key, option = f"{_PREFIX}extra.{name}", str(name).replace("-", "_")
        documentation = documented(Slurm)
        if not _NAME.fullmatch(option) or len(option) == 1:
            message = "expected the long name of an option of sbatch, without the dashes"
            reader.problem(key, f"{message}, found {format_value(str(name))}")
        elif option in documentation:
            reader.problem(key, f"cannot be given here: write {_PREFIX}{option}")
        elif option in TYPED:
            reader.problem(key, f"cannot be given: {TYPED[option]}")
        elif option not in OTHERS and (whole := _begun(option, [*TYPED, *documentation])):
            message = f"sbatch would take it for {whole}, as it does with the beginning of a name"
            reader.problem(key, f"{message}; write the whole name of another option")
        elif option not in OTHERS and (near := did_you_mean(option, [*OTHERS, *documentation])):
            reader.problem(key, f"no option of sbatch that is known{near}")
        elif isinstance(value, (Mapping, list)):
            reader.problem(key, f"expected one value, found {format_value(value)}")
        elif value is True:
            extra[option] = None
        elif value is not None and value is not False:
            text = reader.text(key, value)
            if complaint := _complaint(option, text):
                reader.problem(key, complaint)
            extra[option] = text
    return extra


def _check_types(reader: SectionReader, slurm: Slurm, nnodes: int | None, *, named: bool) -> None:
    """Check a heterogeneous job: unsupported options, and the source of the number of nodes per
    type."""
    for name, settings in slurm.by_type.items():
        key = f"{_PREFIX}{_TYPES}.{name}.nodes"
        if named and settings.nodes is not None:
            reader.problem(key, "the hostfile names the nodes of each type")
        elif not named and settings.nodes is None:
            reader.problem(key, "is required: without a hostfile nothing else says how many")
    if slurm.by_type and slurm.requeue:
        message = "must be 0: Slurm requeues a heterogeneous job, but does not start it again"
        reader.problem(f"{_PREFIX}requeue", message)
    if slurm.by_type and not named and (slurm.nodes or nnodes):
        key = f"{_PREFIX}nodes" if slurm.nodes else "experiment.runner.nnodes"
        reader.problem(key, f"the `nodes` of {_PREFIX}{_TYPES} are as many; remove this one")


def check_slurm(reader: SectionReader, fields: Mapping[str, Any]) -> None:
    """Check the section against the other keys of the runner."""
    slurm: Slurm = fields.get("slurm") or Slurm()
    nnodes, hostfile = fields.get("nnodes"), fields.get("hostfile")
    _check_types(reader, slurm, nnodes, named=hostfile is not None)
    if nnodes is not None and nnodes > MOST_NODES:
        reader.problem("experiment.runner.nnodes", f"Slurm has {MOST_NODES:,} nodes at most")
    if slurm.nodes is not None and nnodes not in (None, slurm.nodes):
        message = f"is {slurm.nodes}, and experiment.runner.nnodes is {nnodes}; remove one"
        reader.problem(f"{_PREFIX}nodes", message)
    if "exclude" in slurm.extra and hostfile is not None:
        reader.problem(f"{_PREFIX}extra.exclude", "the hostfile names the nodes")
    if fields.get("no_shared_fs"):
        message = "must be false: a job of Slurm's writes to a file system that its nodes share"
        reader.problem("experiment.runner.no_shared_fs", message)
    saving = fields.get("stop_grace", 60.0) + SAVING_SECONDS
    if saving > _MOST_SIGNAL:
        most = f"with Slurm {_MOST_SIGNAL - SAVING_SECONDS:,} s at most, found"
        reader.problem("experiment.runner.stop_grace", f"{most} {saving - SAVING_SECONDS:g}")
    try:
        limit = seconds(slurm.time) if slurm.time else None
    except ValueError:
        return
    if limit is not None and limit <= saving:
        message = (
            f"{slurm.time} is no longer than the {saving:g} s in which a job may save and end "
            f"(experiment.runner.stop_grace and {SAVING_SECONDS} s)"
        )
        reader.problem(f"{_PREFIX}time", message)
