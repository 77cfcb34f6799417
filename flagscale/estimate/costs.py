"""Measured costs of a model's parts for a rank: seconds and bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields
from typing import Any

DENSE, MIXTURE = "dense", "mixture"


@dataclass(frozen=True)
class PartCost:
    """Cost of a part of the model for a rank.

    ``forward_seconds`` and ``backward_seconds`` are per micro-batch, ``step_seconds`` per step
    after all passes (gradient reduction, optimizer). ``static_bytes`` are always allocated,
    ``activation_bytes`` per micro-batch between its forward and backward pass.
    """

    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    step_seconds: float = 0.0
    static_bytes: float = 0.0
    activation_bytes: float = 0.0

    def __add__(self, other: PartCost) -> PartCost:
        return PartCost(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def scale(self, count: float) -> PartCost:
        return PartCost(*(count * value for value in astuple(self)))

    def subtract(self, other: PartCost) -> PartCost:
        """Return the difference, with components that noise makes negative set to zero."""
        return PartCost(
            *(max(a - b, 0.0) for a, b in zip(astuple(self), astuple(other), strict=True))
        )

    @property
    def pass_seconds(self) -> float:
        """Seconds of a micro-batch's forward and backward pass."""
        return self.forward_seconds + self.backward_seconds


@dataclass(frozen=True)
class RankCosts:
    """Costs of all model parts that a rank may hold.

    ``layers`` is the cost of one layer by kind (:data:`DENSE`, :data:`MIXTURE`).
    ``memory_limit_bytes`` is the number of bytes of the rank's device that training may use, None
    if its memory is not counted.
    """

    layers: Mapping[str, PartCost]
    embedding: PartCost = field(default_factory=PartCost)
    head: PartCost = field(default_factory=PartCost)
    memory_limit_bytes: float | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "layers": {kind: list(astuple(cost)) for kind, cost in self.layers.items()},
            "embedding": list(astuple(self.embedding)),
            "head": list(astuple(self.head)),
            "memory": self.memory_limit_bytes,
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> RankCosts:
        """Convert the result of :meth:`to_json` back. Raises KeyError, TypeError or ValueError."""
        layers = {str(kind): _parse_cost(cost) for kind, cost in record["layers"].items()}
        memory_limit_bytes = None if record["memory"] is None else float(record["memory"])
        return cls(
            layers,
            _parse_cost(record["embedding"]),
            _parse_cost(record["head"]),
            memory_limit_bytes,
        )


def _parse_cost(values: Sequence[Any]) -> PartCost:
    if len(values) != len(fields(PartCost)):
        raise ValueError("not as many numbers as a cost has")
    return PartCost(*map(float, values))


def max_costs(costs: Iterable[RankCosts]) -> RankCosts:
    """Return the maximum over several ranks, component by component, and the minimum of their
    memory.
    """
    rank_costs = list(costs)
    memory_limits = [
        cost.memory_limit_bytes for cost in rank_costs if cost.memory_limit_bytes is not None
    ]
    return RankCosts(
        {
            kind: _max_cost(cost.layers[kind] for cost in rank_costs)
            for kind in rank_costs[0].layers
        },
        _max_cost(cost.embedding for cost in rank_costs),
        _max_cost(cost.head for cost in rank_costs),
        min(memory_limits, default=None),
    )


def _max_cost(costs: Iterable[PartCost]) -> PartCost:
    return PartCost(*(max(values) for values in zip(*map(astuple, costs), strict=True)))


def min_cost(costs: Iterable[PartCost]) -> PartCost:
    """Return the minimum over several measurements of one part, component by component."""
    return PartCost(*(min(values) for values in zip(*map(astuple, costs), strict=True)))
