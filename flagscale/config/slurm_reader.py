"""Reading ``experiment.runner.slurm``, and checking it against the rest of the runner's section.

Called by ``config.experiment_reader``; problems are collected by the ``SectionReader``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from flagscale.config.arguments.spec.values import did_you_mean, format_value, why_unfit
from flagscale.config.documented import documented_fields
from flagscale.config.reader import SectionReader
from flagscale.config.secrets import is_secret
from flagscale.config.slurm_schema import (
    EXTRA_SBATCH_OPTIONS,
    MAX_NODES,
    REFUSED_SBATCH_OPTIONS,
    Container,
    Slurm,
    SlurmType,
    parse_time_limit,
)

_PREFIX = "experiment.runner.slurm."
_TYPES = "device_type_specific"
_SECTIONS = ("extra", "container", _TYPES)
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_GPUS = re.compile(r"(?:[A-Za-z0-9_.\-]+:)?[1-9][0-9]*")
# Runtimes separate mounts by commas, and the parts of a mount by colons.
_MOUNT = re.compile(r"/[^:,]*(?::/[^:,]*(?::[A-Za-z0-9+]+)?)?")
_PID_NAMESPACES = frozenset({"--pid", "-p", "--containall", "-C"})
_MAX_SIGNAL_SECONDS = 65_535
"""Maximum number of seconds before a job's time limit at which Slurm can send a signal."""
STOP_MARGIN_SECONDS = 30
"""Seconds in addition to ``stop_grace`` between a job's signal and its time limit."""


def read_slurm(reader: SectionReader, data: Mapping[Any, Any]) -> Slurm:
    """Read the section ``slurm`` of ``experiment.runner``."""
    section = reader.read_section(data, "slurm", "experiment.runner.")
    settings = {name: value for name, value in section.items() if name not in _SECTIONS}
    documentation = documented_fields(Slurm)
    for name in [name for name in settings if name not in documentation]:
        _report_unknown_key(reader, f"{_PREFIX}{name}", str(name), [*documentation, *_SECTIONS])
        del settings[name]
    extra = _read_extra(reader, reader.read_section(section, "extra", _PREFIX))
    types = reader.read_section(section, _TYPES, _PREFIX)
    by_type = {}
    for name in types:
        prefix = f"{_PREFIX}{_TYPES}.{name}."
        type_settings = reader.read_section(types, name, f"{_PREFIX}{_TYPES}.")
        by_type[str(name)] = SlurmType(
            **_read_texts_checked(reader, SlurmType, type_settings, prefix)
        )
    fields = _read_texts_checked(reader, Slurm, settings, _PREFIX)
    if section.get("container") is not None:
        fields["container"] = _read_container(
            reader, reader.read_section(section, "container", _PREFIX)
        )
    return Slurm(**fields, extra=extra, by_type=by_type)


def _read_container(reader: SectionReader, section: Mapping[Any, Any]) -> Container:
    """Read ``container``. Values that its runtime would misread are reported."""
    prefix = f"{_PREFIX}container."
    fields = _read_texts_checked(reader, Container, section, prefix)
    container = Container(**fields)
    if not container.image and not section.get("image"):
        reader.add_problem(f"{prefix}image", "is required")
    for text in (*container.mounts, *container.options):
        name = "mounts" if text in container.mounts else "options"
        if reason := _explain_unfit_text(name, text):
            reader.add_problem(f"{prefix}{name}", reason)
    for mount in container.mounts:
        if not _MOUNT.fullmatch(mount):
            message = "expected absolute paths, /here, /here:/there or /here:/there:ro"
            reader.add_problem(f"{prefix}mounts", f"{message}, found {format_value(mount)}")
    if container.workdir is not None and not container.workdir.startswith("/"):
        message = (
            f"expected an absolute path in the container, found {format_value(container.workdir)}"
        )
        reader.add_problem(f"{prefix}workdir", message)
    for option in _PID_NAMESPACES.intersection(container.options):
        message = f"{option} hides the node's processes, which a stop must see to end them"
        reader.add_problem(f"{prefix}options", message)
    return container


def _read_texts_checked(
    reader: SectionReader, kind: type, settings: Mapping[Any, Any], prefix: str
) -> dict[str, Any]:
    """Read the fields of a section, and report texts that Slurm would misread."""
    fields = reader.read_fields(kind, settings, prefix)
    for name, value in fields.items():
        if isinstance(value, str) and (reason := _explain_unfit_text(name, value)):
            reader.add_problem(f"{prefix}{name}", reason)
    return fields


def _report_unknown_key(reader: SectionReader, key: str, name: str, names: list[str]) -> None:
    option = name.lstrip("-").replace("-", "_").lower()
    if option in REFUSED_SBATCH_OPTIONS:
        reader.add_problem(key, f"cannot be given: {REFUSED_SBATCH_OPTIONS[option]}")
    elif option in EXTRA_SBATCH_OPTIONS:
        reader.add_problem(
            key, f"unknown key; other options of sbatch go to `extra`: {{{option}: …}}"
        )
    else:
        reader.add_unknown_key(key, name, names)


def _explain_unfit_text(name: str, text: str) -> str | None:
    """Return the problem of a text for sbatch. No quoting is needed, because no shell reads it."""
    if bad := why_unfit(text):
        return bad
    if not text.strip():
        return "expected a text, found an empty one"
    if any(ord(character) < 32 or ord(character) == 127 for character in text):
        return f"cannot hold control characters, found {format_value(text)}"
    if is_secret(name, text):
        return "looks like a secret, which `scontrol show job` would show to everybody"
    return _explain_unfit_value(name, text)


def _name_with_prefix(option: str, names: Iterable[str]) -> str | None:
    """Return the first of the names that begins with this option, or None."""
    return next((name for name in names if name.startswith(option)), None)


def _explain_unfit_value(name: str, text: str) -> str | None:
    """Return the problem of a value that Slurm parses; None if there is none."""
    if name == "gpus_per_node" and not _GPUS.fullmatch(text):
        return (
            f"expected a number, or a type and a number such as h100:8, found {format_value(text)}"
        )
    if name == "dependency" and "singleton" in re.split("[,?]", text):
        return "singleton waits for jobs of the same name, and names are unique: give job ids"
    if name == "time":
        try:
            parse_time_limit(text)
        except ValueError:
            return f"expected minutes, h:mm:ss, d-hh or d-hh:mm:ss, found {format_value(text)}"
    return None


def _read_extra(reader: SectionReader, section: Mapping[Any, Any]) -> dict[str, str | None]:
    """Read ``extra``: options of sbatch that the launcher does not set itself."""
    extra: dict[str, str | None] = {}
    for name, value in section.items():
        key, option = f"{_PREFIX}extra.{name}", str(name).replace("-", "_")
        documentation = documented_fields(Slurm)
        if not _NAME.fullmatch(option) or len(option) == 1:
            message = "expected the long name of an option of sbatch, without the dashes"
            reader.add_problem(key, f"{message}, found {format_value(str(name))}")
        elif option in documentation:
            reader.add_problem(key, f"cannot be given here: write {_PREFIX}{option}")
        elif option in REFUSED_SBATCH_OPTIONS:
            reader.add_problem(key, f"cannot be given: {REFUSED_SBATCH_OPTIONS[option]}")
        elif option not in EXTRA_SBATCH_OPTIONS and (
            full_name := _name_with_prefix(option, [*REFUSED_SBATCH_OPTIONS, *documentation])
        ):
            message = f"sbatch would read it as an abbreviation of {full_name}"
            reader.add_problem(key, f"{message}; write the full name of another option")
        elif option not in EXTRA_SBATCH_OPTIONS and (
            suggestion := did_you_mean(option, [*EXTRA_SBATCH_OPTIONS, *documentation])
        ):
            reader.add_problem(key, f"no known option of sbatch{suggestion}")
        elif isinstance(value, (Mapping, list)):
            reader.add_problem(key, f"expected one value, found {format_value(value)}")
        elif value is True:
            extra[option] = None
        elif value is not None and value is not False:
            text = reader.scalar_text(key, value)
            if reason := _explain_unfit_text(option, text):
                reader.add_problem(key, reason)
            extra[option] = text
    return extra


def _check_heterogeneous_job(
    reader: SectionReader,
    slurm: Slurm,
    nnodes: int | None,
    on_bad_host: str,
    *,
    has_hostfile: bool,
) -> None:
    """Check a heterogeneous job: unsupported options, and the source of the number of nodes per
    type."""
    for name, settings in slurm.by_type.items():
        key = f"{_PREFIX}{_TYPES}.{name}.nodes"
        if has_hostfile and settings.nodes is not None:
            reader.add_problem(key, "the hostfile names the nodes of each type")
        elif not has_hostfile and settings.nodes is None:
            reader.add_problem(
                key, "is required: without a hostfile nothing else gives the number of nodes"
            )
    if slurm.by_type and slurm.requeue:
        message = "must be 0: Slurm requeues a heterogeneous job, but does not start it again"
        reader.add_problem(f"{_PREFIX}requeue", message)
    if slurm.by_type and on_bad_host != "stop":
        message = f"`{on_bad_host}` is not supported with {_PREFIX}{_TYPES}: nodes of different "
        message += "types cannot take each other's place"
        reader.add_problem("experiment.runner.on_bad_host", message)
    if slurm.by_type and not has_hostfile and (slurm.nodes or nnodes):
        key = f"{_PREFIX}nodes" if slurm.nodes else "experiment.runner.nnodes"
        reader.add_problem(key, f"is given by the `nodes` of {_PREFIX}{_TYPES}; remove this one")


def check_slurm(reader: SectionReader, fields: Mapping[str, Any]) -> None:
    """Check the section against the other keys of the runner."""
    slurm: Slurm = fields.get("slurm") or Slurm()
    nnodes, names_hosts = fields.get("nnodes"), bool(fields.get("hostfile") or fields.get("hosts"))
    on_bad_host, spares = fields.get("on_bad_host", "stop"), fields.get("spares", 0)
    _check_heterogeneous_job(reader, slurm, nnodes, on_bad_host, has_hostfile=names_hosts)
    if nnodes is not None and nnodes > MAX_NODES:
        reader.add_problem("experiment.runner.nnodes", f"Slurm has {MAX_NODES:,} nodes at most")
    elif (slurm.nodes or nnodes or 1) + spares > MAX_NODES:
        message = f"Slurm has {MAX_NODES:,} nodes at most, with those that train"
        reader.add_problem("experiment.runner.spares", message)
    if slurm.nodes is not None and nnodes not in (None, slurm.nodes):
        message = (
            f"is {slurm.nodes}, and experiment.runner.nnodes is {nnodes}; remove one, for example "
            "with the override ~experiment.runner.nnodes"
        )
        reader.add_problem(f"{_PREFIX}nodes", message)
    if "exclude" in slurm.extra and names_hosts:
        reader.add_problem(f"{_PREFIX}extra.exclude", "the hostfile names the nodes")
    if fields.get("no_shared_fs"):
        message = "must be false: a Slurm job writes to a file system that its nodes share"
        reader.add_problem("experiment.runner.no_shared_fs", message)
    stop_seconds = fields.get("stop_grace", 60.0) + STOP_MARGIN_SECONDS
    if stop_seconds > _MAX_SIGNAL_SECONDS:
        limit_text = f"with Slurm at most {_MAX_SIGNAL_SECONDS - STOP_MARGIN_SECONDS:,} s, found"
        reader.add_problem(
            "experiment.runner.stop_grace", f"{limit_text} {stop_seconds - STOP_MARGIN_SECONDS:g}"
        )
    try:
        time_limit = parse_time_limit(slurm.time) if slurm.time else None
    except ValueError:
        return
    if time_limit is not None and time_limit <= stop_seconds:
        message = (
            f"{slurm.time} is not longer than the {stop_seconds:g} s in which a job may save and "
            f"exit (experiment.runner.stop_grace plus {STOP_MARGIN_SECONDS} s)"
        )
        reader.add_problem(f"{_PREFIX}time", message)
