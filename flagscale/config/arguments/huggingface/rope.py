"""Rotary positions: what a config.json says of them, and what it is told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flagscale.config.arguments.huggingface.reading import Reading, is_number

Values = Mapping[str, Any]

_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""What megatron.core has written into its code."""


def base_of(read: Reading) -> tuple[dict[str, Any], dict[str, Any], str]:
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


def rope(read: Reading) -> dict[str, Any]:
    """Base and scaling of rotary positions, as config.json has them before and since v5 of
    transformers."""
    found, scaling, kind = base_of(read)
    factor: Any = scaling.get("factor")
    if kind == "llama3":
        given = {name: scaling.get(name) for name in _LLAMA3}
        if given != _LLAMA3 or not is_number(factor):
            wanted = ", ".join(f"{name} {value:g}" for name, value in _LLAMA3.items())
            reason = f"megatron.core scales with {wanted}, and a factor"
            read.refuse("rope_scaling", scaling, reason)
            factor = 1
        found |= {"use_rope_scaling": True, "rope_scaling_factor": float(factor)}
    elif kind == "linear":
        if not is_number(factor) or factor != int(factor) or factor < 1:
            read.refuse("rope_scaling.factor", factor, "positions are divided by a whole number")
            factor = 1
        found["rotary_seq_len_interpolation_factor"] = int(factor)
    elif kind != "default":
        reason = "positions are scaled as Llama 3.1 does (llama3) or all alike (linear)"
        read.refuse("rope_scaling", kind, reason)
    return found


def scaling_of(values: Values) -> dict[str, Any] | None:
    if values["use_rope_scaling"]:
        return {"rope_type": "llama3", "factor": values["rope_scaling_factor"], **_LLAMA3}
    if values["rotary_seq_len_interpolation_factor"]:
        factor = float(values["rotary_seq_len_interpolation_factor"])
        return {"rope_type": "linear", "factor": factor}
    return None
