"""How a schema's dataclass field says what it means in a YAML, and of which kind it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, fields
from functools import cache
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints


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


class Kind(NamedTuple):
    """Type of a key: ``base`` (str, int, float, bool, Path), a list of them, or one of ``literals``
    instead, as in ``int | Literal["auto"]``."""

    base: type
    many: bool = False
    literals: tuple[str, ...] = ()


@cache
def kinds(schema: type) -> dict[str, Kind]:
    """The kinds of a schema class's documented fields, by key."""
    hints = get_type_hints(schema)
    return {key: _kind(hints[item.name]) for key, item in documented(schema).items()}


def _kind(hint: Any) -> Kind:
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    literals = [word for part in parts if get_origin(part) is Literal for word in get_args(part)]
    (base,) = (p for p in parts if p is not NoneType and get_origin(p) is not Literal)
    many = get_origin(base) is tuple
    return Kind(get_args(base)[0] if many else base, many, tuple(literals))
