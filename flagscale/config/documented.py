"""How a schema's dataclass field says what it means in a YAML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, fields
from types import MappingProxyType
from typing import Any


def doc(
    text: str,
    *,
    key: str | None = None,
    choices: tuple[str, ...] | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
) -> Mapping[str, Any]:
    """A schema field's metadata. ``key`` is its name in the YAML when it differs from the
    field's; ``minimum`` and ``maximum`` are inclusive."""
    return MappingProxyType(
        {"doc": text, "key": key, "choices": choices, "minimum": minimum, "maximum": maximum}
    )


def documented(schema: type) -> dict[str, Field[Any]]:
    """The fields of a schema class that are keys of the YAML, by key."""
    return {f.metadata["key"] or f.name: f for f in fields(schema) if "doc" in f.metadata}
