"""Posterior distribution of the time of every layout, from predictions and measurements.

The time of a layout is the sum of its causes, each of which takes an unknown multiple of its
prediction. These factors are the same for all layouts, so that a measurement corrects all of them.
Their prior is log-normal: no cause takes less than no time, and the speeds of cores and of links
err independently. What the factors do not explain is a Gaussian process over the sizes of a layout.
Its covariance is proportional to the shares of uncertain causes (Rasmussen and Williams, "Gaussian
Processes for Machine Learning", 2006, chapter 2).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import mul
from typing import Any, NamedTuple

from flagscale.tune.linear_algebra import Matrix, cholesky, solve, solve_both
from flagscale.tune.prediction import CAUSES, Corrected
from flagscale.tune.space import Layout


@dataclass(frozen=True)
class PriorErrors:
    """Standard deviations of relative errors of predictions, before any measurement.

    ``common`` is the error that all layouts share, ``by_cause`` that of each cause, ``by_sizes``
    what a cause has in addition for some sizes, ``layout`` the error of a single layout. ``trial``
    is the error of all steps of one trial, as other processes of the same layout show it.
    """

    common: float
    by_cause: Mapping[str, float]
    by_sizes: Mapping[str, float]
    layout: float
    trial: float


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
"""Errors of predictions for devices whose speed is known."""
_BY_SIZES = {cause: 0.4 * error for cause, error in _BY_CAUSE.items()}
MEASURED_DEVICES = PriorErrors(0.1, _BY_CAUSE, _BY_SIZES, layout=0.01, trial=0.006)
"""Errors on devices like those of docs/benchmarks/training.md."""
OTHER_DEVICES = PriorErrors(
    0.5,
    {**dict.fromkeys(_BY_CAUSE, 1.0), "pipeline": 0.4, "cores": 0.4},
    _BY_SIZES,
    layout=0.01,
    trial=0.02,
)
"""Errors on devices whose speed is unknown, and on a CPU."""

_CAUSES = tuple(CAUSES)
_FITS = 2
"""Number of fits. The shares of one determine the covariance of the next."""
_MAX_ITERATIONS = 8
_MAX_STEP = 2.0
_CONVERGED = 0.05
"""Largest change of a parameter in a Gauss-Newton step, and the one that ends the iteration."""
_LEAST_CHANCE = 1e-4
"""Probability to be faster than the best, from which a layout is compared with it."""
_SIMILARITY_LENGTH = 1.5
"""Distance of sizes, in factors of two, over which errors become independent."""
_SAMPLES = 200
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
    """Distribution of the times of layouts after some observations.

    Its parameters are the logarithms of the common factor and of the factor of each cause.
    """

    def __init__(self, prior: PriorErrors, observations: Sequence[Observation] = ()) -> None:
        self._prior = prior
        self._deviations = [prior.common, *(prior.by_cause[cause] for cause in _CAUSES)]
        self._expectations: dict[int, tuple[Layout, Expectation]] = {}
        self._observations = list(observations)
        logs = self._logs = [math.log(o.seconds) for o in observations]
        means = self._parameters = [0.0] * len(self._deviations)
        for _ in range(_FITS):
            self._corrected = [self._correct(o.layout, self._parameters) for o in observations]
            self._errors = self._residual_covariances([o.layout for o in observations])
            for index, observation in enumerate(observations):
                self._errors[index][index] += observation.error**2
            self._parameters = self._fit(means, logs, self._parameters)
        self._rows, gaps = self._linearize(means, logs, self._parameters)
        self._factor = cholesky(self._add_errors(self._rows))
        self._weights = solve_both(self._factor, gaps)

    def expect(self, layout: Layout) -> Expectation:
        """Return the expected time of a layout."""
        # By identity; the layout is kept, so that no other one takes its place.
        if (cached := self._expectations.get(id(layout))) is not None:
            return cached[1]
        expectation = self._expect(layout)
        self._expectations[id(layout)] = layout, expectation
        return expectation

    def _expect(self, layout: Layout) -> Expectation:
        corrected = self._correct(layout, self._parameters)
        row = self._scale(corrected)
        residuals = [
            self._residual_covariance(layout, corrected, o.layout, measured)
            for o, measured in zip(self._observations, self._corrected, strict=True)
        ]
        covariances = [
            residual + sum(map(mul, row, measured))
            for residual, measured in zip(residuals, self._rows, strict=True)
        ]
        projection = solve(self._factor, covariances)
        variance = (
            sum(map(mul, row, row))
            + self._residual_covariance(layout, corrected, layout, corrected)
            - sum(map(mul, projection, projection))
        )
        mean = math.log(corrected.seconds) + sum(map(mul, residuals, self._weights))
        return Expectation(math.exp(mean), math.sqrt(max(variance, 0.0)))

    def compare(self, layouts: Sequence[Layout], reference: Layout) -> Prospects:
        """Return the distribution of the times of layouts relative to a measured one."""
        limit = self.expect(reference).seconds
        chances = [(_win(self.expect(layout), limit), layout) for layout in layouts]
        chances.sort(key=lambda pair: -pair[0])
        likely = [layout for chance, layout in chances[:_MAX_SAMPLED] if chance > _LEAST_CHANCE]
        samples = self._sample([reference, *likely]) if likely else []
        return Prospects(likely, [[log - sample[0] for log in sample[1:]] for sample in samples])

    def _sample(self, layouts: Sequence[Layout]) -> list[list[float]]:
        """Return samples of the logarithms of the times of some layouts.

        Randomized maximum likelihood (Oliver, He and Reynolds, 1996): for each sample, the
        parameters are fitted again, to measurements and prior means with random errors. Unlike the
        linear model, the samples have no cause that takes less than no time.
        """
        everything = [*(o.layout for o in self._observations), *layouts]
        count = len(self._observations)
        covariance = self._residual_covariances(everything)
        factor, errors = cholesky(covariance), cholesky(self._errors)
        gauss = random.Random(0).gauss
        samples = []
        for _ in range(_SAMPLES):
            means = [gauss(0.0, deviation) for deviation in self._deviations]
            normal = [gauss(0.0, 1.0) for _ in everything]
            residuals = [sum(map(mul, row, normal)) for row in factor]
            logs = [
                log - residual - gauss(0.0, observation.error)
                for log, residual, observation in zip(
                    self._logs, residuals[:count], self._observations, strict=True
                )
            ]
            parameters = self._fit(means, logs, self._parameters)
            times = self._log_times(everything, parameters)
            gaps = [log - time for log, time in zip(logs, times[:count], strict=True)]
            weights = solve_both(errors, gaps)
            samples.append(
                [
                    time + residual + sum(map(mul, row, weights))
                    for time, residual, row in zip(
                        times[count:], residuals[count:], covariance[count:], strict=True
                    )
                ]
            )
        return samples

    def correction(self, cause: str) -> float:
        """Return the factor by which measurements correct a cause of all predictions."""
        return math.exp(self._parameters[0] + self._parameters[1 + _CAUSES.index(cause)])

    def _fit(
        self, means: Sequence[float], logs: Sequence[float], start: Sequence[float]
    ) -> list[float]:
        """Return the most likely parameters by the Gauss-Newton method.

        Args:
            means: Parameters that the prior has for the most likely.
            logs: Logarithms of the measured times.
            start: Parameters at which the iteration starts.
        """
        if not logs:
            return list(means)
        parameters = list(start)
        for _ in range(_MAX_ITERATIONS):
            rows, gaps = self._linearize(means, logs, parameters)
            weights = solve_both(cholesky(self._add_errors(rows)), gaps)
            changes = [
                mean + deviation * sum(map(mul, column, weights)) - parameter
                for mean, deviation, column, parameter in zip(
                    means, self._deviations, zip(*rows, strict=True), parameters, strict=True
                )
            ]
            largest = max(map(abs, changes))
            step = min(_MAX_STEP / largest, 1.0) if largest else 1.0
            parameters = [p + step * change for p, change in zip(parameters, changes, strict=True)]
            if largest < _CONVERGED:
                break
        return parameters

    def _linearize(
        self, means: Sequence[float], logs: Sequence[float], parameters: Sequence[float]
    ) -> tuple[Matrix, list[float]]:
        """Return the derivatives of the logarithms of the measured layouts' times, per standard
        deviation of each parameter, and what the linear model lacks with parameters ``means``.
        """
        distances = [
            (parameter - mean) / deviation
            for parameter, mean, deviation in zip(parameters, means, self._deviations, strict=True)
        ]
        factors = _factors(parameters)
        rows, gaps = [], []
        for log, observation in zip(logs, self._observations, strict=True):
            corrected = observation.layout.prediction.correct(factors)
            row = self._scale(corrected)
            rows.append(row)
            time = parameters[0] + math.log(corrected.seconds)
            gaps.append(log - time + sum(map(mul, row, distances)))
        return rows, gaps

    def _scale(self, corrected: Corrected) -> list[float]:
        share_of = corrected.shares.get
        return [
            self._prior.common,
            *(share_of(cause, 0.0) * error for cause, error in self._prior.by_cause.items()),
        ]

    def _correct(self, layout: Layout, parameters: Sequence[float]) -> Corrected:
        corrected = layout.prediction.correct(_factors(parameters))
        return corrected._replace(seconds=math.exp(parameters[0]) * corrected.seconds)

    def _log_times(self, layouts: Sequence[Layout], parameters: Sequence[float]) -> list[float]:
        factors = _factors(parameters)
        return [parameters[0] + math.log(o.prediction.correct(factors).seconds) for o in layouts]

    def _add_errors(self, rows: Matrix) -> Matrix:
        """Return the lower triangle of the covariance of the measurements."""
        return [
            [sum(map(mul, row, other)) + error for other, error in zip(rows, errors, strict=False)]
            for row, errors in zip(rows, self._errors, strict=True)
        ]

    def _residual_covariances(self, layouts: Sequence[Layout]) -> Matrix:
        """Return the lower triangle of the covariance of what no parameter explains."""
        corrected = [self._correct(layout, self._parameters) for layout in layouts]
        pairs = list(zip(layouts, corrected, strict=True))
        return [
            [self._residual_covariance(*pair, *other) for other in pairs[: index + 1]]
            for index, pair in enumerate(pairs)
        ]

    def _residual_covariance(
        self, a: Layout, corrected: Corrected, b: Layout, other: Corrected
    ) -> float:
        by_sizes, share_of = self._prior.by_sizes, other.shares.get
        total = sum(
            by_sizes[cause] ** 2 * share * share_of(cause, 0.0)
            for cause, share in corrected.shares.items()
        )
        if a.setting == b.setting:
            return total + self._prior.layout**2
        return total * math.exp(-_distance(a.setting, b.setting) / _SIMILARITY_LENGTH)


def _factors(parameters: Sequence[float]) -> dict[str, float]:
    return dict(zip(_CAUSES, map(math.exp, parameters[1:]), strict=True))


@dataclass(frozen=True)
class Prospects:
    """Samples of the times of some layouts relative to a reference, as logarithms. Other layouts
    are slower almost certainly.
    """

    layouts: Sequence[Layout]
    samples: Sequence[Sequence[float]]

    def win_probability(self, tolerance: float) -> float:
        """Return the probability that any layout is faster by more than a fraction."""
        if not self.layouts:
            return 0.0
        limit = math.log(1 - tolerance)
        return sum(min(sample) < limit for sample in self.samples) / len(self.samples)

    def most_promising(self, cost: Callable[[Layout], float] = lambda _layout: 1.0) -> Layout:
        """Return the layout with the largest expected improvement per cost."""
        return max(
            zip(self.layouts, self.expected_improvements, strict=True),
            key=lambda pair: pair[1] / cost(pair[0]),
        )[0]

    @property
    def expected_improvements(self) -> list[float]:
        """Expected relative improvements by each layout, counting losses as zero."""
        return [
            sum(max(-log, 0.0) for log in logs) / len(logs)
            for logs in zip(*self.samples, strict=True)
        ]


def _distance(setting: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """Return the distance of two settings: factors of two between sizes, 1 for another choice."""
    distance = 0.0
    for name, value in setting.items():
        other_value = other[name]
        if value == other_value:
            continue
        if _is_size(value) and _is_size(other_value):
            distance += abs(_log_size(value) - _log_size(other_value))
        else:
            distance += 1.0
    return distance


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _log_size(size: int) -> float:
    """Return the logarithm of a size. Nothing, such as no offloaded layers, is half of 1."""
    return math.log2(size) if size else -1.0


def _win(expectation: Expectation, seconds: float) -> float:
    gap = math.log(seconds / expectation.seconds)
    if not expectation.deviation:
        return float(gap > 0)
    return _normal_cdf(gap / expectation.deviation)


def _normal_cdf(value: float) -> float:
    return 0.5 * math.erfc(-value / math.sqrt(2))
