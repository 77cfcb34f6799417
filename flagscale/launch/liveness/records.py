"""Dataclasses out of JSON that somebody else has written: whole and of the right types, or not at
all. The way there is :func:`flagscale.files.plain`."""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

_T = TypeVar("_T")
# No count, code or pid is larger, and longer ones cannot even be printed.
_LARGEST = 1 << 63


def from_record(kind: type[_T], record: object) -> _T | None:
    """An object of the dataclass ``kind``; None where the record holds anything else than its
    fields, nested ones included. What it holds beside them is passed over."""
    try:
        return cast(_T, _read(kind, record))
    except (ValueError, OverflowError):
        return None


@cache
def _hints(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def _read(hint: Any, value: Any) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return None if value is None else _read(arguments[0], value)
    if origin is tuple:
        return tuple(_read(arguments[0], item) for item in _of(list, value))
    if is_dataclass(hint):
        record = _of(dict, value)
        names = _hints(cast(type, hint))
        if not names.keys() <= record.keys():
            raise ValueError(f"not all of {', '.join(names)}")
        return hint(**{name: _read(inner, record[name]) for name, inner in names.items()})  # type: ignore[operator]
    if issubclass(hint, Enum):
        return hint(value)
    return _plain(hint, value)


def _plain(hint: type, value: Any) -> Any:
    if hint is Path:
        return Path(_text(value))
    if hint is str:
        return _text(value)
    if hint is float and type(value) is int:
        value = float(value)
    if hint is float and not math.isfinite(_of(float, value)):
        raise ValueError("no number")
    if hint is int and abs(_of(int, value)) > _LARGEST:
        raise ValueError("a number without bounds")
    return _of(hint, value)


def _text(value: Any) -> str:
    return printable(_of(str, value))


def printable(text: str) -> str:
    """The text as it can be written down: what is no character, such as a byte of a file's name
    that is no UTF-8, is spelled out."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _of(kind: type, value: Any) -> Any:
    """The value, which has to be of this very type: True is no number."""
    if type(value) is not kind:
        raise ValueError(f"{value!r} is no {kind.__name__}")
    return value
