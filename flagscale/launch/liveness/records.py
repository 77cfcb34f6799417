"""Dataclasses out of JSON that somebody else has written: whole and of the right types, or not at
all. The way there is :func:`flagscale.files.plain`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

_T = TypeVar("_T")
_Reader = Callable[[Any], Any]
# No count, code or pid is larger, and longer ones cannot even be printed.
_LARGEST = 1 << 63


def from_record(kind: type[_T], record: object) -> _T | None:
    """An object of the dataclass ``kind``; None where the record holds anything else than its
    fields, nested ones included. What it holds beside them is passed over."""
    try:
        return cast(_T, _reader(cast(Any, kind))(record))
    except (ValueError, OverflowError):
        return None


def printable(text: str) -> str:
    """The text as it can be written down: what is no character, such as a byte of a file's name
    that is no UTF-8, is spelled out."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


@cache
def _reader(hint: Any) -> _Reader:
    """What turns a value of JSON into one of this type, or raises ValueError or OverflowError."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        known = _reader(arguments[0])
        return lambda value: None if value is None else known(value)
    if origin is tuple:
        item = _reader(arguments[0])
        return lambda value: tuple(item(one) for one in _of(list, value))
    if is_dataclass(hint):
        hints = get_type_hints(hint)
        readers = [(field.name, _reader(hints[field.name])) for field in fields(hint)]
        return _object(cast(_Reader, hint), readers)
    if hint in _PLAIN:
        return _PLAIN[hint]
    if not issubclass(hint, Enum):
        raise TypeError(f"no value of JSON is a {hint}")
    return cast(_Reader, hint)


def _object(kind: Callable[..., Any], readers: list[tuple[str, _Reader]]) -> _Reader:
    def read(value: Any) -> Any:
        record = _of(dict, value)
        if any(name not in record for name, _ in readers):
            raise ValueError("not all of its fields")
        return kind(**{name: reader(record[name]) for name, reader in readers})

    return read


def _of(kind: type, value: Any) -> Any:
    """The value, which has to be of this very type: True is no number."""
    if type(value) is not kind:
        raise ValueError(f"{value!r} is no {kind.__name__}")
    return value


def _whole(value: Any) -> Any:
    if abs(_of(int, value)) > _LARGEST:
        raise ValueError("a number without bounds")
    return value


def _real(value: Any) -> Any:
    number = float(value) if type(value) is int else _of(float, value)
    if not math.isfinite(number):
        raise ValueError("no number")
    return number


_PLAIN: dict[Any, _Reader] = {
    int: _whole,
    float: _real,
    bool: lambda value: _of(bool, value),
    str: lambda value: printable(_of(str, value)),
    Path: lambda value: Path(printable(_of(str, value))),
}
