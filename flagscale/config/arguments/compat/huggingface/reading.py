"""Reading a config.json of Hugging Face: checked values, and the settings of rotary positions.

Nothing of the file is trusted, and all problems are reported together.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flagscale.config.arguments.spec.argument import Values
from flagscale.config.arguments.spec.values import format_value
from flagscale.errors import CheckpointError

CONFIG = "config.json"
_MOST_BYTES = 1 << 20
_LARGEST = 1 << 40
MOST_LAYERS = 1 << 16
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
        content = json.loads(text)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} holds no JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {format_value(content)}")
    return content


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number."""
    if isinstance(value, float):
        return math.isfinite(value)
    # The largest that JSON can say is no number that a float can hold.
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _LARGEST


class ConfigReader:
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
        self.problems.append(f"{name}: {format_value(value)} cannot be had: {reason}")

    def only(self, name: str, wanted: Any, reason: str) -> None:
        """Refuse any value of a key but ``wanted``, which is also what its absence means."""
        value = self._config.get(name)
        if value is not None and value != wanted:
            self.refuse(name, value, reason)

    def _expected(self, names: tuple[str, ...], what: str, value: Any) -> None:
        actual = "it is missing" if value is None else f"found {format_value(value)}"
        self.problems.append(f"{names[0]}: expected {what}, {actual}")

    def finish(self, model_type: str) -> None:
        """
        Raises:
            CheckpointError: with every problem.
        """
        if self.problems:
            listed = "\n  ".join(self.problems)
            raise CheckpointError(f"{CONFIG} of a {model_type} model:\n  {listed}")


_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""What megatron.core has written into its code."""


def rope_base(read: ConfigReader) -> tuple[dict[str, Any], dict[str, Any], str]:
    """The base of rotary positions, and their scaling as it is given, with its kind."""
    scaling = read.section("rope_parameters") or read.section("rope_scaling")
    theta = scaling.get("rope_theta") or read.get("rope_theta")
    if not is_number(theta) or theta != int(theta) or theta < 1:
        read.refuse("rope_theta", theta, "rotary_base is a whole number from 1")
        theta = 1
    share = scaling.get("partial_rotary_factor") or read.get("partial_rotary_factor") or 1.0
    if share != 1.0:
        read.refuse("partial_rotary_factor", share, "this family rotates whole heads")
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    return {"rotary_base": int(theta)}, scaling, kind


def rope_arguments(read: ConfigReader) -> dict[str, Any]:
    """Base and scaling of rotary positions, as config.json has them before and since v5 of
    transformers."""
    arguments, scaling, kind = rope_base(read)
    factor: Any = scaling.get("factor")
    if kind == "llama3":
        scaling_values = {name: scaling.get(name) for name in _LLAMA3}
        if scaling_values != _LLAMA3 or not is_number(factor):
            expected = ", ".join(f"{name} {value:g}" for name, value in _LLAMA3.items())
            reason = f"megatron.core scales with {expected}, and a factor"
            read.refuse("rope_scaling", scaling, reason)
            factor = 1
        arguments |= {"use_rope_scaling": True, "rope_scaling_factor": float(factor)}
    elif kind == "linear":
        if not is_number(factor) or factor != int(factor) or factor < 1:
            read.refuse("rope_scaling.factor", factor, "positions are divided by a whole number")
            factor = 1
        arguments["rotary_seq_len_interpolation_factor"] = int(factor)
    elif kind != "default":
        reason = "positions are scaled as Llama 3.1 does (llama3) or all alike (linear)"
        read.refuse("rope_scaling", kind, reason)
    return arguments


def rope_scaling(values: Values) -> dict[str, Any] | None:
    if values["use_rope_scaling"]:
        return {"rope_type": "llama3", "factor": values["rope_scaling_factor"], **_LLAMA3}
    if values["rotary_seq_len_interpolation_factor"]:
        factor = float(values["rotary_seq_len_interpolation_factor"])
        return {"rope_type": "linear", "factor": factor}
    return None
