"""Plans as JSON: trees of frozen dataclasses, which their own annotations tell how to read.

What a command line says is parsed once, where it is typed; the ranks get the plan made of it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from itertools import repeat
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from flagscale.errors import ConfigError

T = TypeVar("T")

WRITTEN = {"written": True}
"""Metadata of a field: files or directories that a rank writes, and that go to the user's disk."""


def encode(value: Any) -> str:
    """The JSON of a dataclass, whose fields hold plain values, paths, dataclasses and tuples."""
    return json.dumps(dataclasses.asdict(value), default=str)


def decode(kind: type[T], text: str | bytes) -> T:
    """The reverse of :func:`encode`.

    Raises:
        ConfigError: it is the text of no ``kind``: another version's, or cut off.
    """
    try:
        found: T = _read(kind, json.loads(text))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"what this host was told to run is no {kind.__name__} ({error})",
            hint="flagscale must be of one version on every host",
        ) from error
    return found


def _read(kind: Any, data: Any) -> Any:
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        return kind(**{name: _read(hints[name], value) for name, value in data.items()})  # type: ignore[operator]
    origin, of = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType) and data is not None:
        some = [one for one in of if one is not NoneType]
        # Of several kinds all are plain values.
        return _read(some[0], data) if len(some) == 1 else data
    if origin is tuple:
        kinds = repeat(of[0]) if of[-1] is Ellipsis else of
        return tuple(_read(one, value) for one, value in zip(kinds, data, strict=False))
    return kind(data) if kind is Path else data


def with_files(value: T, place: Callable[[Path], Path]) -> T:
    """``value`` with ``place`` of every path that a rank writes in place of the path."""

    def moved(own: Any, written: bool) -> Any:
        if isinstance(own, tuple):
            return tuple(moved(one, written) for one in own)
        if isinstance(own, Path):
            return place(own) if written else own
        if not dataclasses.is_dataclass(own) or isinstance(own, type):
            return own
        fields = dataclasses.fields(own)
        changed = {f.name: moved(getattr(own, f.name), "written" in f.metadata) for f in fields}
        return dataclasses.replace(own, **changed)

    result: T = moved(value, written=False)
    return result
