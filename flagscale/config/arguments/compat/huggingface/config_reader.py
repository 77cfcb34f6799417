"""Validated reading of a config.json of Hugging Face, and its settings of rotary positions.

The file is untrusted input. All problems are reported together.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flagscale.config.arguments.compat.huggingface.resolved_config import LAYER_TYPES
from flagscale.config.arguments.spec.argument import Values
from flagscale.config.arguments.spec.values import format_value
from flagscale.errors import CheckpointError

CONFIG = "config.json"
_MAX_CONFIG_BYTES = 1 << 20
_MAX_NUMBER = 1 << 40
QUANTIZATION_REASON = "quantized weights cannot be read; use the bf16 weights"
SWIGLU_REASON = "the activation of this family is silu (SwiGLU)"
MAX_LAYERS = 1 << 16
"""Limit of the layers of a model, or the experts of a layer, because code loops over them."""


def read_config(directory: Path) -> dict[str, Any]:
    """Read the config.json in the directory of a model.

    Raises:
        CheckpointError: the file is missing, cannot be read, or does not contain a JSON object.
    """
    return read_json(directory / CONFIG, _MAX_CONFIG_BYTES)


def read_json(path: Path, max_bytes: int) -> dict[str, Any]:
    """Read a JSON object from a file of at most ``max_bytes`` bytes.

    Raises:
        CheckpointError: the file cannot be read, is larger, or does not contain a JSON object.
    """
    try:
        with path.open("rb") as file:
            text = file.read(max_bytes + 1)
        if len(text) > max_bytes:
            raise CheckpointError(f"{path}: expected at most {max_bytes:,} bytes, found more")
        content = json.loads(text)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {format_value(content)}")
    return content


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number of moderate size, which fits in a float."""
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _MAX_NUMBER


class ConfigReader:
    """Reader of the values of a config.json.

    Getters record invalid values as problems and return a valid placeholder, so that all problems
    are found; :meth:`raise_problems` raises them together.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        """
        Args:
            config: values of a config.json (:func:`.resolved_config.resolve_config`).
        """
        self._config = config
        self.problems: list[str] = []

    def get(self, name: str) -> Any:
        """Return an unchecked value; None if it is missing or null."""
        return self._config.get(name)

    def integer(self, name: str, *, minimum: int = 1, maximum: int = _MAX_NUMBER) -> int:
        """Return an integer from ``minimum`` to ``maximum``."""
        value = self.get(name)
        if is_number(value) and value == int(value) and minimum <= value <= maximum:
            return int(value)
        limit = "" if maximum == _MAX_NUMBER else f" to {maximum}"
        self._add_unexpected(name, f"a whole number from {minimum}{limit}", value)
        return minimum

    def positive_number(self, name: str) -> float:
        """Return a number above 0."""
        value = self.get(name)
        if is_number(value) and 0 < value < _MAX_NUMBER:
            return float(value)
        self._add_unexpected(name, "a number above 0", value)
        return 1.0

    def boolean(self, name: str) -> bool:
        """Return a boolean; False if it is missing."""
        value = self._config.get(name, False)
        if isinstance(value, bool):
            return value
        self._add_unexpected(name, "true or false", value)
        return False

    def section(self, name: str) -> dict[str, Any]:
        """Return a JSON object; empty if it is missing or null."""
        value = self.get(name)
        if value is None or isinstance(value, dict):
            return dict(value or {})
        self._add_unexpected(name, "an object", value)
        return {}

    def refuse(self, name: str, value: Any, reason: str) -> None:
        """Record a value that is not supported."""
        self.problems.append(f"{name}: {format_value(value)} is not supported: {reason}")

    def require_value(self, name: str, expected: Any, reason: str) -> None:
        """Record a value that is neither missing, null nor ``expected``."""
        value = self._config.get(name)
        if value is not None and value != expected:
            self.refuse(name, value, reason)

    def require_plain_model(self) -> None:
        """Record settings that no family supports."""
        self.require_value("quantization_config", {}, QUANTIZATION_REASON)
        self.require_value("per_layer_config", {}, "layers that differ are not supported")
        self.require_value("is_causal", True, "only causal attention is supported")

    def require_equal_layers(self, layer_type: str) -> None:
        """Record ``layer_types`` of a family that ignores it, unless all layers are of this
        type."""
        types = self.get("layer_types")
        if types is None or (isinstance(types, list) and all(t == layer_type for t in types)):
            return
        reason = f"transformers ignores it for this family, whose layers have {layer_type}"
        self.refuse("layer_types", types, reason)

    def _add_unexpected(self, name: str, expected: str, value: Any) -> None:
        observation = f"found {format_value(value)}"
        if value is None:
            observation = "found null" if name in self._config else "it is missing"
        self.problems.append(f"{name}: expected {expected}, {observation}")

    def raise_problems(self, model_type: str) -> None:
        """Raise the recorded problems, if any.

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
"""Parameters of Llama 3 scaling that are constants in megatron.core."""


def rope_base(read: ConfigReader) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Return the base of rotary positions (as arguments), their settings in config.json, and the
    type of scaling."""
    settings = read.section("rope_parameters")
    if nested := [name for name in LAYER_TYPES if name in settings]:
        read.refuse("rope_parameters", nested, "this family has the same positions in all layers")
    theta: Any = settings.get("rope_theta")
    if not is_number(theta) or theta != int(theta) or theta < 1:
        read.refuse("rope_theta", theta, "rotary_base is an integer of at least 1")
        theta = 1
    fraction = settings.get("partial_rotary_factor")
    if fraction not in (None, 1):
        read.refuse("partial_rotary_factor", fraction, "this family rotates whole heads")
    kind = settings.get("rope_type")
    if (old_kind := settings.get("type", kind)) != kind:
        read.refuse("rope_scaling.type", old_kind, f"rope_type is {format_value(kind)}")
    return {"rotary_base": int(theta)}, settings, str(kind)


def rope_arguments(read: ConfigReader) -> dict[str, Any]:
    """Return the arguments of rotary positions: base and scaling."""
    arguments, settings, kind = rope_base(read)
    factor: Any = settings.get("factor")
    if kind == "llama3":
        scaling_values = {name: settings.get(name) for name in _LLAMA3}
        if scaling_values != _LLAMA3 or not is_number(factor):
            expected = ", ".join(f"{name} {value:g}" for name, value in _LLAMA3.items())
            reason = f"megatron.core scales by a factor with the constants {expected}"
            read.refuse("rope_scaling", settings, reason)
            factor = 1
        arguments |= {"use_rope_scaling": True, "rope_scaling_factor": float(factor)}
    elif kind == "linear":
        if not is_number(factor) or factor != int(factor) or factor < 1:
            read.refuse("rope_scaling.factor", factor, "expected an integer of at least 1")
            factor = 1
        arguments["rotary_seq_len_interpolation_factor"] = int(factor)
    elif kind != "default":
        read.refuse("rope_scaling", kind, "supported types are llama3 and linear")
    return arguments


def rope_scaling(values: Values) -> dict[str, Any] | None:
    """Return ``rope_scaling`` of config.json for arguments; None without scaling."""
    if values["use_rope_scaling"]:
        return {"rope_type": "llama3", "factor": values["rope_scaling_factor"], **_LLAMA3}
    if values["rotary_seq_len_interpolation_factor"]:
        factor = float(values["rotary_seq_len_interpolation_factor"])
        return {"rope_type": "linear", "factor": factor}
    return None
