"""Reading, writing and validation of environments: traffic that can be replayed (:mod:`.spec`).

The file is JSON. It is written by ``flagscale bench traffic --environment`` and read by
``--replay``. An invalid file is refused with the name of the wrong field.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import MISSING, fields, is_dataclass, make_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from flagscale.bench.traffic.spec import (
    LARGEST_BURST,
    SMALLEST_BURST,
    Environment,
    Pattern,
    format_bytes,
    format_rate,
)
from flagscale.errors import ConfigError
from flagscale.files import format_json, to_plain, write_atomic
from flagscale.records import from_record

VERSION = 1
_FILE_MODE = 0o644
_MIN_PROBE_BYTES, _MAX_PROBE_BYTES = 64, 1 << 30


def write_environment(environment: Environment, path: Path) -> None:
    """Write an environment to a file, readable by all users: it contains no secret."""
    record = {"flagscale_traffic": VERSION, **to_plain(environment)}
    write_atomic(path, format_json(record), _FILE_MODE, durable=False)


def read_environment(path: Path) -> Environment:
    """Read an environment from a file.

    Raises:
        ConfigError: the file cannot be read, or a field is missing or wrong.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is no JSON: {error}") from error
    if not isinstance(record, dict) or record.get("flagscale_traffic") != VERSION:
        version = (
            record.get("flagscale_traffic") if isinstance(record, dict) else type(record).__name__
        )
        raise ConfigError(
            f"{path}: flagscale_traffic: found {version!r}, expected {VERSION}",
            hint="flagscale bench traffic --environment FILE writes one",
        )
    record = _with_defaults(Environment, record)
    environment = from_record(Environment, record)
    if environment is None:
        raise ConfigError(f"{path}: {_describe_error(record)}")
    check_environment(environment, str(path))
    return environment


def check_environment(environment: Environment, name: str) -> None:
    """Refuse an environment that cannot be played, that is, whose traffic cannot be sent.

    Args:
        environment: environment to check.
        name: file or command that error messages begin with.

    Raises:
        ConfigError: a field is invalid; the message names it.
    """
    count, pattern = len(environment.hosts), environment.pattern
    if count < 2:
        raise ConfigError(f"{name}: hosts: {count} found, expected two or more")
    host_names = [host.name for host in environment.hosts]
    if duplicates := [duplicate for duplicate in host_names if host_names.count(duplicate) > 1]:
        raise ConfigError(f"{name}: hosts: {duplicates[0]} is named twice")
    for number, flow in enumerate(environment.flows):
        if not (0 <= flow.source < count and 0 <= flow.target < count):
            raise ConfigError(f"{name}: flows: number {number} has a host beyond the {count}")
        if flow.source == flow.target:
            raise ConfigError(f"{name}: flows: number {number} goes from a host to itself")
    if len(environment.flows) > 1 << 15:
        raise ConfigError(
            f"{name}: flows: {len(environment.flows)} found, at most 32768 are played"
        )
    check_pattern(pattern, name)
    _check_host_load(environment, name)
    size = environment.probe.size
    if not _MIN_PROBE_BYTES <= size <= _MAX_PROBE_BYTES:
        raise ConfigError(f"{name}: probe.size: {size} bytes, expected 64 to 1 GiB")


def _check_host_load(environment: Environment, name: str) -> None:
    """Refuse a host whose flows in one direction have more load together than the path's rate."""
    pattern = environment.pattern
    max_flows = pattern.rate / pattern.load if pattern.load > 0 else 0
    for verb, flow_counts in (
        ("send", Counter(flow.source for flow in environment.flows)),
        ("get", Counter(flow.target for flow in environment.flows)),
    ):
        number, flows = max(flow_counts.items(), key=lambda item: item[1], default=(0, 0))
        if flows > max(1.0, max_flows):
            host, load = environment.hosts[number].name, format_rate(flows * pattern.load)
            raise ConfigError(
                f"{name}: {host} would {verb} {load} by {flows} flows on a path of "
                f"{format_rate(pattern.rate)}",
                hint="fewer flows, or a smaller load of each",
            )


def check_pattern(pattern: Pattern, name: str) -> None:
    """Refuse a pattern that cannot be played; see :func:`check_environment`."""
    if not 0 < pattern.load < pattern.rate:
        raise ConfigError(
            f"{name}: load: {format_rate(pattern.load)} a flow on a path of "
            f"{format_rate(pattern.rate)}; expected more than nothing and less than the path's rate"
        )
    if not SMALLEST_BURST <= pattern.burst <= LARGEST_BURST:
        limits = f"{format_bytes(SMALLEST_BURST)} to {format_bytes(LARGEST_BURST)}"
        raise ConfigError(f"{name}: burst: {format_bytes(pattern.burst)}, expected {limits}")
    if pattern.peak is not None and pattern.peak < pattern.load:
        raise ConfigError(f"{name}: peak: {format_rate(pattern.peak)} is below the load of a flow")


def _with_defaults(record_type: type, record: dict[str, Any]) -> dict[str, Any]:
    """Return a record of a dataclass with default values for absent fields, also in nested
    records.
    """
    filled = dict(record)
    hints = get_type_hints(record_type)
    for field in fields(record_type):
        if field.name not in filled and field.default is not MISSING:
            filled[field.name] = to_plain(field.default)
        nested_types = [
            argument
            for argument in _type_arguments(hints[field.name])
            if isinstance(argument, type) and is_dataclass(argument)
        ]
        value = filled.get(field.name)
        if nested_types and isinstance(value, dict):
            filled[field.name] = _with_defaults(nested_types[0], value)
        elif nested_types and isinstance(value, list):
            filled[field.name] = [
                _with_defaults(nested_types[0], item) if isinstance(item, dict) else item
                for item in value
            ]
    return filled


def _type_arguments(hint: Any) -> list[Any]:
    return [hint, *getattr(hint, "__args__", ())]


def _describe_error(record: dict[str, Any]) -> str:
    """Return the name of the first missing or invalid field, with its value."""
    hints = get_type_hints(Environment)
    for field in fields(Environment):
        if field.name not in record:
            return f"{field.name} is missing"
        # A dataclass with this field alone. Its annotation is a type already, not a string that
        # from_record would have to resolve.
        single_field_class = make_dataclass("SingleField", [(field.name, hints[field.name])])
        if from_record(single_field_class, record) is None:
            text = json.dumps(record[field.name])
            return f"{field.name}: {text[:80]}{'…' if len(text) > 80 else ''} is not understood"
    return "it is not understood"
