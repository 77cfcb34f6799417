"""Names of the states of a model's parameters, by which checkpoints contain them."""

from __future__ import annotations

from typing import Any

MOMENTUM, FIRST_MOMENT, SECOND_MOMENT = "momentum_buffer", "exp_avg", "exp_avg_sq"
ADAM_STATES, LION_STATES = (FIRST_MOMENT, SECOND_MOMENT), (FIRST_MOMENT,)
MUON_STATES: tuple[str, ...] = (MOMENTUM,)
_MARK = "optimizer_state_names"
"""Attribute of a model's parameter."""


def mark_states(weight: Any, names: tuple[str, ...]) -> None:
    """Set the names of the states of a parameter of the model."""
    setattr(weight, _MARK, names)


def state_names(weight: Any) -> tuple[str, ...]:
    """Return the names of the states of a parameter of the model."""
    names: tuple[str, ...] = getattr(weight, _MARK, ADAM_STATES)
    return names
