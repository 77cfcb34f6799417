"""Documentation of dataclass fields that are keys of the YAML, and the types of those keys.

The schema modules attach documentation with :func:`doc`; the reader of sections and the
configuration reference look it up here.
"""

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
    """Return the metadata of a schema field that is a key of the YAML.

    Args:
        text: Documentation of the key, for the reference and ``flagscale explain``.
        key: Name of the key in the YAML, if it differs from the field's.
        choices: Accepted values; None for any of the type.
        minimum: Smallest accepted number, inclusive.
        maximum: Largest accepted number, inclusive.
    """
    return MappingProxyType(
        {"doc": text, "key": key, "choices": choices, "minimum": minimum, "maximum": maximum}
    )


def documented_fields(schema: type) -> dict[str, Field[Any]]:
    """Return the fields of a schema class that are keys of the YAML, by key."""
    return {f.metadata["key"] or f.name: f for f in fields(schema) if "doc" in f.metadata}


class KeyType(NamedTuple):
    """Type of a key: ``base`` (str, int, float, bool, Path) or a list of them, or one of
    ``literals`` instead, as in ``int | Literal["auto"]``.
    """

    base: type
    is_list: bool = False
    literals: tuple[str, ...] = ()


@cache
def key_types(schema: type) -> dict[str, KeyType]:
    """Return the types of a schema class's documented fields, by key."""
    hints = get_type_hints(schema)
    return {key: _key_type(hints[item.name]) for key, item in documented_fields(schema).items()}


def _key_type(hint: Any) -> KeyType:
    union_members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    literals = [
        word for part in union_members if get_origin(part) is Literal for word in get_args(part)
    ]
    (base,) = (p for p in union_members if p is not NoneType and get_origin(p) is not Literal)
    is_list = get_origin(base) is tuple
    return KeyType(get_args(base)[0] if is_list else base, is_list, tuple(literals))
