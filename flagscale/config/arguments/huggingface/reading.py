"""Values out of a config.json: nothing of it is trusted, and everything wrong is told at once."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flagscale.config.arguments.values import shown
from flagscale.errors import CheckpointError

CONFIG = "config.json"
_MOST_BYTES = 1 << 20
_LARGEST = 1 << 40
MOST_PARTS = 1 << 16
"""Layers of a model, or experts of a layer: what is gone through one by one."""


def read_config(directory: Path) -> dict[str, Any]:
    """The config.json of a model's directory.

    Raises:
        CheckpointError: it is missing, cannot be read, or holds no JSON object.
    """
    return read_json(directory / CONFIG, _MOST_BYTES)


def read_json(path: Path, most: int) -> dict[str, Any]:
    """The JSON object in a file of at most ``most`` bytes.

    Raises:
        CheckpointError: there is none.
    """
    try:
        with path.open("rb") as file:
            text = file.read(most + 1)
        if len(text) > most:
            raise CheckpointError(f"{path} is larger than {most:,} bytes, more than it can need")
        found = json.loads(text)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} holds no JSON: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {shown(found)}")
    return found


def is_number(value: Any) -> bool:
    """Whether a value is a finite number."""
    if isinstance(value, float):
        return math.isfinite(value)
    # The largest that JSON can say is no number that a float can hold.
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _LARGEST


class Reading:
    """A config.json being read. What does not fit is noted and something harmless returned, so
    that all problems are found; :meth:`finish` raises them."""

    def __init__(self, config: Mapping[str, Any], absent: Mapping[str, Any] | None = None) -> None:
        """``absent``: what a key means where it is missing or null."""
        self._config = config
        self._absent = dict(absent or {})
        self.problems: list[str] = []

    def get(self, *names: str) -> Any:
        """The value of the first of these keys that is given; else what they mean if absent."""
        for name in names:
            if self._config.get(name) is not None:
                return self._config[name]
        return next((self._absent[name] for name in names if name in self._absent), None)

    def whole(self, *names: str, most: int = _LARGEST) -> int:
        """A whole number from 1 to ``most``."""
        value = self.get(*names)
        if is_number(value) and value == int(value) and 1 <= value <= most:
            return int(value)
        self._expected(names, "a whole number from 1", value)
        return 1

    def number(self, *names: str) -> float:
        """A number above 0."""
        value = self.get(*names)
        if is_number(value) and 0 < value < _LARGEST:
            return float(value)
        self._expected(names, "a number above 0", value)
        return 1.0

    def switch(self, *names: str) -> bool:
        """True or false; a missing one that has no other meaning is false."""
        value = self.get(*names)
        if value is None or isinstance(value, bool):
            return bool(value)
        self._expected(names, "true or false", value)
        return False

    def section(self, *names: str) -> dict[str, Any]:
        """An object; empty where it is missing."""
        value = self.get(*names)
        if value is None or isinstance(value, dict):
            return dict(value or {})
        self._expected(names, "an object", value)
        return {}

    def refuse(self, name: str, value: Any, reason: str) -> None:
        """Note what megatron.core cannot express."""
        self.problems.append(f"{name}: {shown(value)} cannot be had: {reason}")

    def only(self, name: str, wanted: Any, reason: str) -> None:
        """Refuse any value of a key but ``wanted``, which is also what its absence means."""
        value = self._config.get(name)
        if value is not None and value != wanted:
            self.refuse(name, value, reason)

    def _expected(self, names: tuple[str, ...], what: str, value: Any) -> None:
        found = "it is missing" if value is None else f"found {shown(value)}"
        self.problems.append(f"{names[0]}: expected {what}, {found}")

    def finish(self, model_type: str) -> None:
        """
        Raises:
            CheckpointError: with every problem.
        """
        if self.problems:
            listed = "\n  ".join(self.problems)
            raise CheckpointError(f"{CONFIG} of a {model_type} model:\n  {listed}")
