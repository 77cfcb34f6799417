"""Expected time of every layout, from its prediction and the measurements of others.

The logarithm of measured over predicted time is modelled as a Gaussian process. Two layouts have
similar errors if their time has similar causes, or if their sizes are similar. A measurement so
corrects each cause of a prediction for all layouts, and what is particular to some sizes for
similar ones. Rasmussen and Williams, "Gaussian Processes for Machine Learning" (2006), algorithm
2.1, computes the mean and the covariance.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from flagscale.tune.space import Layout


@dataclass(frozen=True)
class PriorErrors:
    """Standard deviations of relative errors of predictions, before any measurement.

    ``common`` is the error that all layouts share, ``by_cause`` that of each cause, ``sizes`` that
    of similar sizes, ``layout`` that of a single layout.
    """

    common: float
    by_cause: Mapping[str, float]
    sizes: float
    layout: float


_BY_CAUSE = {
    "compute": 0.08,
    "memory": 0.3,
    "kernels": 0.4,
    "launch": 0.4,
    "host": 0.5,
    "tensor": 0.5,
    "context": 0.7,
    "expert": 0.7,
    "pipeline": 0.4,
    "data": 0.7,
    "optimizer": 0.4,
    "cores": 0.3,
}
MEASURED_DEVICES = PriorErrors(0.1, _BY_CAUSE, sizes=0.04, layout=0.02)
"""Errors on devices like those of docs/benchmarks/training.md."""
OTHER_DEVICES = PriorErrors(
    2.0, {cause: 2 * error for cause, error in _BY_CAUSE.items()}, sizes=0.12, layout=0.03
)
"""Errors on devices whose speed is unknown, and on a CPU."""

_SIMILARITY_LENGTH = 1.5
"""Distance of sizes, in factors of two, over which errors become independent."""
_SAMPLES = 400
_MAX_SAMPLED = 40
"""Number of samples of the joint distribution, and of layouts in it: those most likely to win."""


class Expectation(NamedTuple):
    """Expected seconds of a layout's step, and the relative standard deviation."""

    seconds: float
    deviation: float

    @property
    def interval(self) -> tuple[float, float]:
        """Seconds between which the time lies with a probability of 95 %."""
        factor = math.exp(1.96 * self.deviation)
        return self.seconds / factor, self.seconds * factor


class Observation(NamedTuple):
    """Measured seconds of a layout's step, and the relative standard error."""

    layout: Layout
    seconds: float
    error: float


class Belief:
    """Distribution of the times of layouts after some observations."""

    def __init__(self, prior: PriorErrors, observations: Sequence[Observation] = ()) -> None:
        self._prior = prior
        self._expectations: dict[int, tuple[Layout, Expectation]] = {}
        self._observations = list(observations)
        layouts = [observation.layout for observation in observations]
        covariance = [[self._covariance(a, b) for b in layouts] for a in layouts]
        for index, observation in enumerate(observations):
            covariance[index][index] += observation.error**2
        self._factor = _cholesky(covariance)
        residuals = [math.log(o.seconds / o.layout.prediction.seconds) for o in observations]
        self._weights = _solve_transposed(self._factor, _solve(self._factor, residuals))

    def expect(self, layout: Layout) -> Expectation:
        """Return the expected time of a layout."""
        # By identity; the layout is kept, so that no other one takes its place.
        if (known := self._expectations.get(id(layout))) is not None:
            return known[1]
        expectation = self._expect(layout)
        self._expectations[id(layout)] = layout, expectation
        return expectation

    def _expect(self, layout: Layout) -> Expectation:
        mean, projection = self._project(layout)
        variance = self._covariance(layout, layout) - sum(value**2 for value in projection)
        return Expectation(
            layout.prediction.seconds * math.exp(mean), math.sqrt(max(variance, 0.0))
        )

    def expected_improvement(self, layout: Layout, best_seconds: float) -> float:
        """Return the expected relative improvement over a time, counting losses as zero."""
        expectation = self.expect(layout)
        gap = math.log(best_seconds / expectation.seconds)
        if not expectation.deviation:
            return max(gap, 0.0)
        ratio = gap / expectation.deviation
        return gap * _normal_cdf(ratio) + expectation.deviation * _normal_density(ratio)

    def win_probability(self, layouts: Sequence[Layout], seconds: float) -> float:
        """Return the probability that any of some layouts takes less than a time."""
        expectations = [(self.expect(layout), layout) for layout in layouts]
        likely = sorted(expectations, key=lambda pair: -_win(pair[0], seconds))[:_MAX_SAMPLED]
        likely = [pair for pair in likely if _win(pair[0], seconds) > 1e-4]
        if not likely:
            return 0.0
        projected = [self._project(layout) for _, layout in likely]
        covariance = [
            [
                self._covariance(a, b) - sum(x * y for x, y in zip(pa, pb, strict=True))
                for (_, b), (_, pb) in zip(likely, projected, strict=True)
            ]
            for (_, a), (_, pa) in zip(likely, projected, strict=True)
        ]
        factor = _cholesky(covariance)
        limits = [
            math.log(seconds / layout.prediction.seconds) - mean
            for (_, layout), (mean, _) in zip(likely, projected, strict=True)
        ]
        generator, wins = random.Random(0), 0
        for _ in range(_SAMPLES):
            noise = [generator.gauss(0.0, 1.0) for _ in limits]
            wins += any(
                sum(f * n for f, n in zip(row, noise, strict=False)) < limit
                for row, limit in zip(factor, limits, strict=True)
            )
        return wins / _SAMPLES

    def correction(self, cause: str) -> float:
        """Return the factor by which measurements correct a cause of all predictions."""
        share = self._prior.by_cause[cause] ** 2
        return math.exp(
            sum(
                weight
                * (share * o.layout.prediction.shares.get(cause, 0.0) + self._prior.common**2)
                for weight, o in zip(self._weights, self._observations, strict=True)
            )
        )

    def _project(self, layout: Layout) -> tuple[float, list[float]]:
        row = [self._covariance(layout, o.layout) for o in self._observations]
        mean = sum(a * b for a, b in zip(row, self._weights, strict=True))
        return mean, _solve(self._factor, row)

    def _covariance(self, a: Layout, b: Layout) -> float:
        prior, shares, others = self._prior, a.prediction.shares, b.prediction.shares
        total = prior.common**2 + sum(
            prior.by_cause[cause] ** 2 * share * others.get(cause, 0.0)
            for cause, share in shares.items()
        )
        total += prior.sizes**2 * math.exp(-_distance(a.setting, b.setting) / _SIMILARITY_LENGTH)
        return total + prior.layout**2 * (a.setting == b.setting)


def _distance(a: Mapping[str, Any], b: Mapping[str, Any]) -> float:
    """Return the distance of two settings: factors of two between sizes, 1 for another choice."""
    distance = 0.0
    for name, value in a.items():
        other = b[name]
        if value == other:
            continue
        are_sizes = all(isinstance(v, int) and not isinstance(v, bool) for v in (value, other))
        distance += abs(math.log2(value / other)) if are_sizes else 1.0
    return distance


def _win(expectation: Expectation, seconds: float) -> float:
    gap = math.log(seconds / expectation.seconds)
    if not expectation.deviation:
        return float(gap > 0)
    return _normal_cdf(gap / expectation.deviation)


def _normal_cdf(value: float) -> float:
    return 0.5 * math.erfc(-value / math.sqrt(2))


def _normal_density(value: float) -> float:
    return math.exp(-0.5 * value**2) / math.sqrt(2 * math.pi)


_Matrix = list[list[float]]
_JITTER = 1e-10


def _cholesky(matrix: _Matrix) -> _Matrix:
    """Return the lower triangular factor of a positive semidefinite matrix."""
    factor: _Matrix = []
    for i, row in enumerate(matrix):
        entries: list[float] = []
        for j in range(i + 1):
            rest = row[j] - sum(
                entries[k] * (factor[j][k] if j < i else entries[k]) for k in range(j)
            )
            entries.append(math.sqrt(max(rest, _JITTER)) if i == j else rest / factor[j][j])
        factor.append(entries)
    return factor


def _solve(factor: _Matrix, right: Sequence[float]) -> list[float]:
    """Solve ``L x = right`` for a lower triangular matrix."""
    solution: list[float] = []
    for row, value in zip(factor, right, strict=True):
        rest = value - sum(a * b for a, b in zip(row, solution, strict=False))
        solution.append(rest / row[-1])
    return solution


def _solve_transposed(factor: _Matrix, right: Sequence[float]) -> list[float]:
    """Solve ``L^T x = right`` for a lower triangular matrix."""
    solution = list(right)
    for i in reversed(range(len(right))):
        solution[i] /= factor[i][i]
        for j in range(i):
            solution[j] -= factor[i][j] * solution[i]
    return solution
