"""Gemma, Gemma 2 and the text of Gemma 3: what config.json says, and the other way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flagscale.config.arguments.huggingface.llama import (
    KINDS,
    LlamaLike,
    layer_types,
    sliding_layers,
)
from flagscale.config.arguments.huggingface.reading import Reading, is_number
from flagscale.config.arguments.huggingface.rope import rope

Values = Mapping[str, Any]

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
        found = super().arguments({**_ABSENT, **self.absent, **_given(config)})
        found |= {"layernorm_zero_centered_gamma": True, "scale_embeddings": True}
        read = Reading(config)
        read.only("use_bidirectional_attention", False, "tokens attend to those before them alone")
        if self.period:
            found |= self._later(read, config, found["num_layers"])
        read.finish(self.model_type)
        return found

    def _activation(self, read: Reading) -> dict[str, Any]:
        name = "hidden_activation" if self.period else "hidden_act"
        known = (_TANH,) if self.period else (_TANH, "gelu")
        if (act := read.get(name)) not in known:
            read.refuse(name, act, f"the gated MLP of {self.model_type} is {_TANH}")
        return {"gated_linear_unit": True, "openai_gelu": True, "swiglu": False}

    def _rope(self, read: Reading) -> dict[str, Any]:
        return {} if self.qk_norm else rope(read)

    def _later(self, read: Reading, config: Mapping[str, Any], layers: int) -> dict[str, Any]:
        """What Gemma 2 and 3 have more than the first."""
        found: dict[str, Any] = {"sandwich_norm": True}
        scale = config.get("query_pre_attn_scalar", 256)
        if not is_number(scale) or scale <= 0:
            read.refuse("query_pre_attn_scalar", scale, "expected a number above 0")
            scale = 1
        found["softmax_scale"] = float(scale) ** -0.5
        for name, absent in zip(_CAPS, self.caps, strict=True):
            cap = config.get(name, absent)
            if cap is not None and (not is_number(cap) or cap <= 0):
                read.refuse(name, cap, "expected a number above 0, or null")
            elif cap is not None:
                found[name] = float(cap)
        if self.qk_norm and found.pop("attn_logit_softcapping", None):
            reason = "transformers bounds no scores of this family, whatever its config.json says"
            read.refuse("attn_logit_softcapping", config["attn_logit_softcapping"], reason)
        pattern = self._sliding(read, config, layers)
        if any(pattern):
            width = Reading({"sliding_window": 4096, **config})
            found["window_size"] = [width.whole("sliding_window") - 1, 0]
            found["window_attn_skip_freq"] = pattern
            read.problems += width.problems
        return found | (self._both_ropes(read, config, pattern) if self.qk_norm else {})

    def _sliding(self, read: Reading, config: Mapping[str, Any], layers: int) -> list[int]:
        """1 for each layer with a window."""
        step = Reading({"sliding_window_pattern": self.period, **config})
        period = step.whole("sliding_window_pattern")
        read.problems += step.problems
        plain = [int((layer + 1) % period != 0) for layer in range(layers)]
        return sliding_layers(read, config, layers, plain)

    def _both_ropes(
        self, read: Reading, config: Mapping[str, Any], pattern: list[int]
    ) -> dict[str, Any]:
        """Rotary positions of layers that see everything, and of those with a window."""
        given = read.section("rope_parameters")
        own = {kind: given.get(kind) for kind in KINDS}
        old = {"rope_scaling": config.get("rope_scaling"), "rope_theta": config.get("rope_theta")}
        full = Reading({**old, "rope_parameters": own[_FULL]}, {"rope_theta": 1e6})
        local = {"rope_theta": config.get("rope_local_base_freq")}
        windowed = Reading({**local, "rope_parameters": own[_SLIDING]}, {"rope_theta": 1e4})
        found, base = rope(full), rope(windowed)
        read.problems += full.problems + windowed.problems
        if set(base) != {"rotary_base"}:
            read.refuse("rope_parameters", own[_SLIDING], "layers with a window scale no positions")
        if any(pattern):
            found["window_rotary_base"] = base["rotary_base"]
        return found

    def config(self, values: Values) -> dict[str, Any]:
        made = super().config(values)
        made |= {"hidden_act": _TANH, "hidden_activation": _TANH}
        if not self.period:
            return made
        window = values["window_size"]
        made |= {
            "query_pre_attn_scalar": _whole((values["softmax_scale"] or 1.0) ** -2),
            "layer_types": layer_types(values),
            "sliding_window": 4096 if window is None else window[0] + 1,
            **{name: values[name] for name in _CAPS},
        }
        if self.qk_norm:
            full = {"rope_theta": made.pop("rope_theta"), **(made.pop("rope_scaling") or {})}
            local = {"rope_theta": float(values["window_rotary_base"] or 1e4)}
            made["rope_parameters"] = {
                _FULL: {"rope_type": "default", **full},
                _SLIDING: {"rope_type": "default", **local},
            }
        return made


def _given(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if value is not None}


def _whole(number: float) -> float | int:
    """What rounding has moved away from a whole number as one."""
    nearest = round(number)
    return nearest if abs(number - nearest) < 1e-6 * nearest else number
