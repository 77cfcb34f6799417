"""The file of an environment: JSON, whole or refused with the field that is wrong."""

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
    binary,
    bits,
)
from flagscale.errors import ConfigError
from flagscale.files import json_text, plain, write_atomic
from flagscale.records import from_record

VERSION = 1
_MODE = 0o644
_LEAST_PROBE, _LARGEST_PROBE = 64, 1 << 30


def write(environment: Environment, path: Path) -> None:
    """Keep an environment. It holds no secret."""
    record = {"flagscale_traffic": VERSION, **plain(environment)}
    write_atomic(path, json_text(record), _MODE, durable=False)


def read(path: Path) -> Environment:
    """The environment of a file.

    Raises:
        ConfigError: it cannot be read, or a field of it is missing or wrong.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is no JSON: {error}") from error
    if not isinstance(record, dict) or record.get("flagscale_traffic") != VERSION:
        told = (
            record.get("flagscale_traffic") if isinstance(record, dict) else type(record).__name__
        )
        raise ConfigError(
            f"{path}: flagscale_traffic: found {told!r}, expected {VERSION}",
            hint="flagscale bench traffic --environment FILE writes one",
        )
    record = _with_defaults(Environment, record)
    environment = from_record(Environment, record)
    if environment is None:
        raise ConfigError(f"{path}: {_astray(record)}")
    check(environment, str(path))
    return environment


def check(environment: Environment, name: str) -> None:
    """Refuse what cannot be played; ``name`` is what messages call it.

    Raises:
        ConfigError: with the field.
    """
    count, pattern = len(environment.hosts), environment.pattern
    if count < 2:
        raise ConfigError(f"{name}: hosts: {count} found, expected two or more")
    named = [site.name for site in environment.hosts]
    if twice := [one for one in named if named.count(one) > 1]:
        raise ConfigError(f"{name}: hosts: {twice[0]} is named twice")
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
    _check_sums(environment, name)
    size = environment.probe.size
    if not _LEAST_PROBE <= size <= _LARGEST_PROBE:
        raise ConfigError(f"{name}: probe.size: {size} bytes, expected 64 to 1 GiB")


def _check_sums(environment: Environment, name: str) -> None:
    """Refuse more for one host than its path takes."""
    pattern = environment.pattern
    most = pattern.rate / pattern.load if pattern.load > 0 else 0
    for verb, ends in (
        ("send", Counter(flow.source for flow in environment.flows)),
        ("get", Counter(flow.target for flow in environment.flows)),
    ):
        number, flows = max(ends.items(), key=lambda one: one[1], default=(0, 0))
        if flows > max(1.0, most):
            host, load = environment.hosts[number].name, bits(flows * pattern.load)
            raise ConfigError(
                f"{name}: {host} would {verb} {load} by {flows} flows on a path of "
                f"{bits(pattern.rate)}",
                hint="fewer flows, or a smaller load of each",
            )


def check_pattern(pattern: Pattern, name: str) -> None:
    """The same of a pattern alone."""
    if not 0 < pattern.load < pattern.rate:
        raise ConfigError(
            f"{name}: load: {bits(pattern.load)} a flow on a path of {bits(pattern.rate)}; "
            "expected more than nothing and less than the path's rate"
        )
    if not SMALLEST_BURST <= pattern.burst <= LARGEST_BURST:
        least, most = binary(SMALLEST_BURST), binary(LARGEST_BURST)
        raise ConfigError(f"{name}: burst: {binary(pattern.burst)}, expected {least} to {most}")
    if pattern.peak is not None and pattern.peak < pattern.load:
        raise ConfigError(f"{name}: peak: {bits(pattern.peak)} is below the load of a flow")


def _with_defaults(kind: type, record: dict[str, Any]) -> dict[str, Any]:
    """A record with the fields that it may leave out, in what is nested as well."""
    filled = dict(record)
    hints = get_type_hints(kind)
    for field in fields(kind):
        if field.name not in filled and field.default is not MISSING:
            filled[field.name] = plain(field.default)
        inner = [
            one for one in _parts(hints[field.name]) if isinstance(one, type) and is_dataclass(one)
        ]
        value = filled.get(field.name)
        if inner and isinstance(value, dict):
            filled[field.name] = _with_defaults(inner[0], value)
        elif inner and isinstance(value, list):
            filled[field.name] = [
                _with_defaults(inner[0], one) if isinstance(one, dict) else one for one in value
            ]
    return filled


def _parts(hint: Any) -> list[Any]:
    return [hint, *getattr(hint, "__args__", ())]


def _astray(record: dict[str, Any]) -> str:
    """Which field keeps a record from being an environment."""
    hints = get_type_hints(Environment)
    for field in fields(Environment):
        if field.name not in record:
            return f"{field.name} is missing"
        one = make_dataclass("One", [(field.name, hints[field.name])])
        # Annotations of a made class are objects already: nothing has to be looked up.
        if from_record(one, record) is None:
            text = json.dumps(record[field.name])
            return f"{field.name}: {text[:80]}{'…' if len(text) > 80 else ''} is not understood"
    return "it is not understood"
