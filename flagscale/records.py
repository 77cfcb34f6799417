"""Dataclasses out of JSON, by their annotations: whole and of the right types, or not at all,
whoever has written it. The way there is :func:`flagscale.files.plain`."""

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
from flagscale.files import plain

_T = TypeVar("_T")
_Reader = Callable[[Any], Any]
WRITTEN = {"written": True}
"""Metadata of a plan's field: files or directories that a rank writes, and that go to the user's
disk."""
# No count, code or pid is larger, and longer ones cannot even be printed.
_LARGEST = 1 << 63


def from_record(kind: type[_T], record: object) -> _T | None:
    """An object of the dataclass ``kind``; None where the record holds anything else than its
    fields, nested ones included. What it holds beside them is passed over."""
    try:
        return cast(_T, _reader(cast(Any, kind))(record))
    except (ValueError, OverflowError):
        return None


def encode(value: Any) -> str:
    """The JSON of a dataclass, for :func:`decode` elsewhere."""
    return json.dumps(plain(value))


def decode(kind: type[_T], text: str | bytes) -> _T:
    """The reverse of :func:`encode`.

    Raises:
        ConfigError: it is the text of no ``kind``: another version's, or cut off.
    """
    try:
        found = from_record(kind, json.loads(text))
    except (ValueError, RecursionError):
        found = None
    if found is None:
        raise ConfigError(
            f"what this host was told to run is no {kind.__name__}",
            hint="flagscale must be of one version on every host",
        )
    return found


def printable(text: str) -> str:
    """The text as it can be written down: what is no character, such as a byte of a file's name
    that is no UTF-8, is spelled out."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


@cache
def _reader(hint: Any) -> _Reader:
    """What turns a value of JSON into one of this type, or raises ValueError or OverflowError."""
    if (origin := get_origin(hint)) is not None:
        return _composed(origin, get_args(hint))
    if is_dataclass(hint):
        hints = get_type_hints(hint)
        readers = [(field.name, _reader(hints[field.name])) for field in fields(hint)]
        return _object(cast(_Reader, hint), readers)
    if hint in _PLAIN:
        return _PLAIN[hint]
    if not issubclass(hint, Enum):
        raise TypeError(f"no value of JSON is a {hint}")
    return cast(_Reader, hint)


def _composed(origin: Any, arguments: Sequence[Any]) -> _Reader:
    """Of a type that is made of others."""
    if origin is Literal:
        return lambda value: arguments[arguments.index(value)]
    several = origin is tuple and arguments[-1] is Ellipsis
    readers = [_reader(one) for one in (arguments[:1] if several else arguments)]
    if origin in (Union, UnionType):
        return _either(readers)
    if several:
        return lambda value: tuple(readers[0](one) for one in _of(list, value))
    if origin is tuple:
        return _fixed(readers)
    key, item = readers
    return lambda value: {key(name): item(one) for name, one in _of(dict, value).items()}


def _either(readers: Sequence[_Reader]) -> _Reader:
    """The first that takes a value; what none takes, the last one refuses."""

    def read(value: Any) -> Any:
        for reader in readers[:-1]:
            with suppress(ValueError):
                return reader(value)
        return readers[-1](value)

    return read


def _fixed(readers: Sequence[_Reader]) -> _Reader:
    def read(value: Any) -> Any:
        pairs = zip(readers, _of(list, value), strict=True)
        return tuple(reader(one) for reader, one in pairs)

    return read


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
    NoneType: lambda value: _of(NoneType, value),
    int: _whole,
    float: _real,
    bool: lambda value: _of(bool, value),
    str: lambda value: printable(_of(str, value)),
    Path: lambda value: Path(printable(_of(str, value))),
}


def with_files(value: _T, place: Callable[[Path], Path]) -> _T:
    """``value`` with ``place`` of every path that a rank writes in place of the path."""

    def moved(own: Any, written: bool) -> Any:
        if isinstance(own, tuple):
            return tuple(moved(one, written) for one in own)
        if isinstance(own, Path):
            return place(own) if written else own
        if not is_dataclass(own) or isinstance(own, type):
            return own
        marked = fields(own)
        changed = {f.name: moved(getattr(own, f.name), "written" in f.metadata) for f in marked}
        return replace(own, **changed)

    result: _T = moved(value, written=False)
    return result
