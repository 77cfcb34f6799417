"""Gemma, Gemma 2 and Gemma 3 (text)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flagscale.config.arguments.compat.huggingface.llama import (
    KINDS,
    LlamaLike,
    layer_types,
    sliding_layers,
)
from flagscale.config.arguments.compat.huggingface.reading import (
    ConfigReader,
    is_number,
    rope_arguments,
)
from flagscale.config.arguments.spec.argument import Values

_SLIDING, _FULL = KINDS
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
_TANH = "gelu_pytorch_tanh"
_ABSENT = {
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
    "hidden_activation": _TANH,
}
"""What all of them mean by a key that is missing."""


@dataclass(frozen=True)
class Gemma(LlamaLike):
    """Norms whose weights count from 1, gated GELU by tanh, embeddings scaled by the root of their
    width.

    ``period`` of later ones, which have norms behind attention and MLP as well, scale queries by a
    number of their own and have windows in all layers but each so manieth; 0 of the first one.
    ``caps`` are what scores and logits are bounded by where config.json does not say.
    """

    period: int = 0
    caps: tuple[float | None, float | None] = (None, None)

    def arguments(self, config: Mapping[str, Any]) -> dict[str, Any]:
        arguments = super().arguments({**_ABSENT, **self.absent, **_given_keys(config)})
        arguments |= {"layernorm_zero_centered_gamma": True, "scale_embeddings": True}
        read = ConfigReader(config)
        read.only("use_bidirectional_attention", False, "tokens attend to those before them alone")
        if self.period:
            arguments |= self._later(read, config, arguments["num_layers"])
        read.finish(self.model_type)
        return arguments

    def _activation(self, read: ConfigReader) -> dict[str, Any]:
        name = "hidden_activation" if self.period else "hidden_act"
        allowed = (_TANH,) if self.period else (_TANH, "gelu")
        if (act := read.get(name)) not in allowed:
            read.refuse(name, act, f"the gated MLP of {self.model_type} is {_TANH}")
        return {"gated_linear_unit": True, "openai_gelu": True, "swiglu": False}

    def _rope(self, read: ConfigReader) -> dict[str, Any]:
        return {} if self.qk_norm else rope_arguments(read)

    def _later(self, read: ConfigReader, config: Mapping[str, Any], layers: int) -> dict[str, Any]:
        """Read the settings that Gemma 2 and 3 have in addition to the first Gemma."""
        arguments: dict[str, Any] = {"sandwich_norm": True}
        scale = config.get("query_pre_attn_scalar", 256)
        if not is_number(scale) or scale <= 0:
            read.refuse("query_pre_attn_scalar", scale, "expected a number above 0")
            scale = 1
        arguments["softmax_scale"] = float(scale) ** -0.5
        for name, absent in zip(_CAPS, self.caps, strict=True):
            cap = config.get(name, absent)
            if cap is not None and (not is_number(cap) or cap <= 0):
                read.refuse(name, cap, "expected a number above 0, or null")
            elif cap is not None:
                arguments[name] = float(cap)
        if self.qk_norm and arguments.pop("attn_logit_softcapping", None):
            reason = "transformers bounds no scores of this family, whatever its config.json says"
            read.refuse("attn_logit_softcapping", config["attn_logit_softcapping"], reason)
        pattern = self._sliding(read, config, layers)
        if any(pattern):
            width = ConfigReader({"sliding_window": 4096, **config})
            arguments["window_size"] = [width.whole("sliding_window") - 1, 0]
            arguments["window_attn_skip_freq"] = pattern
            read.problems += width.problems
        return arguments | (self._both_ropes(read, config, pattern) if self.qk_norm else {})

    def _sliding(self, read: ConfigReader, config: Mapping[str, Any], layers: int) -> list[int]:
        """1 for each layer with a window."""
        step = ConfigReader({"sliding_window_pattern": self.period, **config})
        period = step.whole("sliding_window_pattern")
        read.problems += step.problems
        plain = [int((layer + 1) % period != 0) for layer in range(layers)]
        return sliding_layers(read, config, layers, plain)

    def _both_ropes(
        self, read: ConfigReader, config: Mapping[str, Any], pattern: list[int]
    ) -> dict[str, Any]:
        """Rotary positions of layers that see everything, and of those with a window."""
        sections = read.section("rope_parameters")
        by_kind = {kind: sections.get(kind) for kind in KINDS}
        old = {"rope_scaling": config.get("rope_scaling"), "rope_theta": config.get("rope_theta")}
        full = ConfigReader({**old, "rope_parameters": by_kind[_FULL]}, {"rope_theta": 1e6})
        local = {"rope_theta": config.get("rope_local_base_freq")}
        windowed = ConfigReader(
            {**local, "rope_parameters": by_kind[_SLIDING]}, {"rope_theta": 1e4}
        )
        arguments, base = rope_arguments(full), rope_arguments(windowed)
        read.problems += full.problems + windowed.problems
        if set(base) != {"rotary_base"}:
            read.refuse(
                "rope_parameters", by_kind[_SLIDING], "layers with a window scale no positions"
            )
        if any(pattern):
            arguments["window_rotary_base"] = base["rotary_base"]
        return arguments

    def config(self, values: Values) -> dict[str, Any]:
        config = super().config(values)
        config |= {"hidden_act": _TANH, "hidden_activation": _TANH}
        if not self.period:
            return config
        window = values["window_size"]
        config |= {
            "query_pre_attn_scalar": _is_whole((values["softmax_scale"] or 1.0) ** -2),
            "layer_types": layer_types(values),
            "sliding_window": 4096 if window is None else window[0] + 1,
            **{name: values[name] for name in _CAPS},
        }
        if self.qk_norm:
            full = {"rope_theta": config.pop("rope_theta"), **(config.pop("rope_scaling") or {})}
            local = {"rope_theta": float(values["window_rotary_base"] or 1e4)}
            config["rope_parameters"] = {
                _FULL: {"rope_type": "default", **full},
                _SLIDING: {"rope_type": "default", **local},
            }
        return config


def _given_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if value is not None}


def _is_whole(number: float) -> float | int:
    """Round a number to the nearest integer if it differs from one only by rounding."""
    nearest = round(number)
    return nearest if abs(number - nearest) < 1e-6 * nearest else number
