"""Conversion of JSON to dataclasses, driven by their annotations.

The input is not trusted: a record is converted completely, with every value of its annotated
type, or rejected. The inverse is :func:`flagscale.files.to_plain`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from flagscale.errors import ConfigError
from flagscale.files import record_keys, to_plain

_T = TypeVar("_T")
_Reader = Callable[[Any], Any]
WRITTEN_BY_RANK = {"written": True}
"""Metadata of a plan's field for files or directories that a rank writes, on the user's disk."""
# No count, code or pid is larger, and Python refuses to print much larger integers.
_MAX_INTEGER = 1 << 63


def from_record(record_type: type[_T], record: object) -> _T | None:
    """Convert a record (the value of a JSON text) to the dataclass ``record_type``; None if a field
    is missing or has another type.

    Nested dataclasses are converted too. Additional keys of the record are ignored.
    """
    try:
        return cast(_T, _build_reader(cast(Any, record_type))(record))
    except (ValueError, OverflowError):
        return None


def encode(value: Any) -> str:
    """Return a dataclass as JSON, for :func:`decode` in another process."""
    return json.dumps(to_plain(value))


def parse(record_type: type[_T], text: str | bytes) -> _T | None:
    """Convert JSON to a dataclass; None if it is no valid ``record_type``."""
    try:
        return from_record(record_type, json.loads(text))
    except (ValueError, RecursionError):
        return None


def decode(record_type: type[_T], text: str | bytes) -> _T:
    """Convert the result of :func:`encode` back.

    Raises:
        ConfigError: the text is no valid ``record_type``: it comes from another version or was
            truncated.
    """
    value = parse(record_type, text)
    if value is None:
        raise ConfigError(
            f"the data sent to this host is not a valid {record_type.__name__}",
            hint="flagscale must be of one version on every host",
        )
    return value


def printable(text: str) -> str:
    """Return the text in a form that can be encoded as UTF-8.

    Surrogates, such as bytes of a file name that are not UTF-8, are replaced by escapes.
    """
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


@cache
def _build_reader(hint: Any) -> _Reader:
    """Return the function that converts a JSON value to a type, or raises ValueError or
    OverflowError.
    """
    if (origin := get_origin(hint)) is not None:
        return _build_generic_reader(origin, get_args(hint))
    if is_dataclass(hint):
        hints = get_type_hints(hint)
        keys = record_keys(cast(Any, hint))
        readers = [(name, key, _build_reader(hints[name])) for name, key in keys.items()]
        return _build_object_reader(cast(_Reader, hint), readers)
    if hint in _SCALAR_READERS:
        return _SCALAR_READERS[hint]
    if not issubclass(hint, Enum):
        raise TypeError(f"no value of JSON is a {hint}")
    return cast(_Reader, hint)


def _build_generic_reader(origin: Any, arguments: Sequence[Any]) -> _Reader:
    """Return the reader of a generic type."""
    if origin is Literal:
        return lambda value: arguments[arguments.index(value)]
    is_variadic = origin is tuple and arguments[-1] is Ellipsis
    readers = [_build_reader(hint) for hint in (arguments[:1] if is_variadic else arguments)]
    if origin in (Union, UnionType):
        return _build_union_reader(readers)
    if is_variadic:
        return lambda value: tuple(readers[0](item) for item in _require_type(list, value))
    if origin is tuple:
        return _build_tuple_reader(readers)
    read_key, read_item = readers
    return lambda value: {
        read_key(key): read_item(item) for key, item in _require_type(dict, value).items()
    }


def _build_union_reader(readers: Sequence[_Reader]) -> _Reader:
    """Return the reader of a union: the first reader that accepts a value converts it. If none
    does, the error of the last one is raised.
    """

    def read(value: Any) -> Any:
        for reader in readers[:-1]:
            with suppress(ValueError):
                return reader(value)
        return readers[-1](value)

    return read


def _build_tuple_reader(readers: Sequence[_Reader]) -> _Reader:
    def read(value: Any) -> Any:
        pairs = zip(readers, _require_type(list, value), strict=True)
        return tuple(reader(item) for reader, item in pairs)

    return read


def _build_object_reader(
    record_type: Callable[..., Any], readers: list[tuple[str, str, _Reader]]
) -> _Reader:
    """Return the reader of a dataclass from the name, key and reader of each field."""

    def read(value: Any) -> Any:
        record = _require_type(dict, value)
        if any(key not in record for _, key, _ in readers):
            raise ValueError("not all of its fields")
        return record_type(**{name: reader(record[key]) for name, key, reader in readers})

    return read


def _require_type(expected_type: type, value: Any) -> Any:
    """Return the value if its type is exactly ``expected_type``, so that True is no integer.

    Raises:
        ValueError: the type differs.
    """
    if type(value) is not expected_type:
        raise ValueError(f"{value!r} is no {expected_type.__name__}")
    return value


def _read_integer(value: Any) -> Any:
    if abs(_require_type(int, value)) > _MAX_INTEGER:
        raise ValueError("a number without bounds")
    return value


def _read_float(value: Any) -> Any:
    number = float(value) if type(value) is int else _require_type(float, value)
    if not math.isfinite(number):
        raise ValueError("no number")
    return number


_SCALAR_READERS: dict[Any, _Reader] = {
    NoneType: lambda value: _require_type(NoneType, value),
    int: _read_integer,
    float: _read_float,
    bool: lambda value: _require_type(bool, value),
    str: lambda value: printable(_require_type(str, value)),
    Path: lambda value: Path(printable(_require_type(str, value))),
}


def relocate_outputs(value: _T, relocate: Callable[[Path], Path]) -> _T:
    """Return a copy of the dataclass ``value`` in which ``relocate`` has replaced every path that a
    rank writes (fields with :data:`WRITTEN_BY_RANK`).
    """

    def convert(part: Any, is_written: bool) -> Any:
        if isinstance(part, tuple):
            return tuple(convert(item, is_written) for item in part)
        if isinstance(part, Path):
            return relocate(part) if is_written else part
        if not is_dataclass(part) or isinstance(part, type):
            return part
        part_fields = fields(part)
        changed = {
            f.name: convert(getattr(part, f.name), "written" in f.metadata) for f in part_fields
        }
        return replace(part, **changed)

    result: _T = convert(value, is_written=False)
    return result
