"""``comm`` of a YAML: a map of the communication backend's options, one argument of the program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flagscale.config.arguments.values import word

NAME = "comm"


def as_words(section: Mapping[Any, Any]) -> dict[Any, Any]:
    """A section of arguments whose map ``comm`` is the list of ``name=value`` words that its
    argument takes; null takes an option away.

    A map that holds more than plain values stays, to be refused with the place of the value.
    """
    options = section.get(NAME)
    if not isinstance(options, Mapping):
        return dict(section)
    if any(isinstance(value, (Mapping, list, tuple)) for value in options.values()):
        return dict(section)
    words = [f"{key}={word(value)}" for key, value in options.items() if value is not None]
    return {**section, NAME: words or None}
