"""What parts of a model cost a rank: seconds and bytes, as measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields
from typing import Any

DENSE, MIXTURE = "dense", "mixture"


@dataclass(frozen=True)
class Cost:
    """Of a part of the model, for a rank: seconds of a micro-batch's passes; seconds after them,
    once a step (reducing gradients, the optimizer); bytes that it always takes, and bytes that a
    micro-batch takes between its passes."""

    forward: float = 0.0
    backward: float = 0.0
    after: float = 0.0
    held: float = 0.0
    kept: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def times(self, count: float) -> Cost:
        return Cost(*(count * value for value in astuple(self)))

    def less(self, other: Cost) -> Cost:
        """The rest without ``other``; what noise makes negative is none."""
        return Cost(*(max(a - b, 0.0) for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def both(self) -> float:
        """Seconds of a micro-batch's passes."""
        return self.forward + self.backward


@dataclass(frozen=True)
class Costs:
    """Of everything a rank may hold. ``layers``: of a layer, by its kind; ``memory``: bytes of the
    rank's device that training may take, None where they are not counted."""

    layers: Mapping[str, Cost]
    embedding: Cost = field(default_factory=Cost)
    head: Cost = field(default_factory=Cost)
    memory: float | None = None

    def as_json(self) -> dict[str, Any]:
        return {
            "layers": {kind: list(astuple(cost)) for kind, cost in self.layers.items()},
            "embedding": list(astuple(self.embedding)),
            "head": list(astuple(self.head)),
            "memory": self.memory,
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Costs:
        """Raises KeyError, TypeError or ValueError where it is none."""
        layers = {str(kind): _cost(cost) for kind, cost in found["layers"].items()}
        memory = None if found["memory"] is None else float(found["memory"])
        return cls(layers, _cost(found["embedding"]), _cost(found["head"]), memory)


def _cost(values: Sequence[Any]) -> Cost:
    if len(values) != len(fields(Cost)):
        raise ValueError("not as many numbers as a cost has")
    return Cost(*map(float, values))


def slowest(costs: Iterable[Costs]) -> Costs:
    """What the slowest, and the fullest, of several ranks takes, part by part."""
    every = list(costs)
    limits = [cost.memory for cost in every if cost.memory is not None]
    return Costs(
        {kind: _most(cost.layers[kind] for cost in every) for kind in every[0].layers},
        _most(cost.embedding for cost in every),
        _most(cost.head for cost in every),
        min(limits, default=None),
    )


def _most(costs: Iterable[Cost]) -> Cost:
    return Cost(*(max(values) for values in zip(*map(astuple, costs), strict=True)))


def least_of(costs: Iterable[Cost]) -> Cost:
    """The least of several measurements of one part, number by number."""
    return Cost(*(min(values) for values in zip(*map(astuple, costs), strict=True)))
