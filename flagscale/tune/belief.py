"""Posterior distribution of the time of every layout, from predictions and measurements.

A layout is a choice of parallel sizes, micro-batch size and the like, which its ``setting`` has by
the names of arguments. Its predicted time is a sum of parts, the causes of
:data:`.prediction.CAUSES`: computation, memory traffic, communication of each kind, and so on.

Time. Cause ``k`` of layout ``x`` takes a multiple ``exp(b[k])`` of its prediction ``s[k](x)``, and
all causes take a multiple ``exp(b[0])``. The multiples are the same for all layouts, so that a
measurement corrects all of them, and no cause takes less than no time::

    log t(x) = b[0] + log(sum over k of exp(b[k]) s[k](x)) + r(x)
    b[k] ~ N(0, deviation[k]^2), independent of each other

The time in which ranks wait for others also grows with that of the others
(:meth:`.prediction.Prediction.correct`). A measurement adds its own error. This is the model of
Kennedy and O'Hagan, "Bayesian Calibration of Computer Models" (2001): a computed value with
unknown parameters, a discrepancy ``r`` and an error of observation.

Residuals. The errors that no multiple explains are a Gaussian process. Two layouts share those of a
cause by its shares ``w[k]`` of their times, the less the farther apart their settings are::

    cov(r(x), r(y)) = exp(-distance(x, y) / length) * sum over k of size_error[k]^2 w[k](x) w[k](y)
                      + (layout_error^2 if x = y)

It is the exponential covariance of Rasmussen and Williams, "Gaussian Processes for Machine
Learning" (2006), section 4.2.1, with the distance of :func:`_distance`.

Samples. The probability that a layout is faster than the best one comes from samples of all times
together. For each sample, prior means ``m``, residuals and errors of measurements are drawn, and
the parameters are fitted to them, by randomized maximum likelihood (Oliver, He and Reynolds,
"Conditioning Permeability Fields to Pressure Data", 1996)::

    b = argmin of |(b - m) / deviation|^2 + |log(measured) - drawn errors - log(time with b)|^2_C

``C`` is the covariance of residuals and errors of the measurements. Then the drawn residuals are
corrected by the measurements (Wilson et al., "Pathwise Conditioning of Gaussian Processes", 2021).
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

    Attributes:
        common: Error that all layouts share.
        by_cause: Error of each cause, of all of :data:`.prediction.CAUSES`.
        by_sizes: Error that a cause has in addition for some sizes.
        layout: Error of a single layout.
        trial: Error common to all steps of one trial, which differs if the same layout is started
            again. It is not used here: callers include it in :attr:`Observation.error`.
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
"""Order of the parameters after the common one."""
_FITS = 2
"""Number of fits. The shares of one determine the covariance of the next."""
_MAX_ITERATIONS = 8
"""Gauss-Newton steps of a fit. One that has not converged ends with the last of them: the result
serves as the point at which the model is linear.
"""
_MAX_STEP = 2.0
"""Largest change of a parameter in a step."""
_CONVERGED = 0.05
"""Largest change of a parameter in the last step."""
_SIMILARITY_LENGTH = 1.5
"""Distance of sizes, in factors of two, over which the correlation of errors falls by a factor of
e.
"""
_SAMPLES = 200
"""Number of samples of the joint distribution."""
_FIRST_SAMPLED = 40
"""Number of layouts that are sampled first."""
_MAX_SAMPLED = 320
"""Largest number of sampled layouts. It takes one to two seconds; the time grows with the cube."""
_NEGLIGIBLE = 0.1
"""Part of a decisive probability that the layouts that are not sampled may have together."""


class Expectation(NamedTuple):
    """Expected seconds of a layout's step, as the median, and the relative standard deviation."""

    seconds: float
    deviation: float

    @property
    def interval(self) -> tuple[float, float]:
        """Seconds between which the time lies with a probability of 95 %."""
        ratio = math.exp(1.96 * self.deviation)
        return self.seconds / ratio, self.seconds * ratio


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
        # Keyed by id(); the layout is kept alive, so that its id is not reused.
        self._expectations: dict[int, tuple[Layout, Expectation]] = {}
        self._observations = list(observations)
        self._logs = [math.log(observation.seconds) for observation in observations]
        prior_means = [0.0] * len(self._deviations)
        self._parameters = list(prior_means)
        self._noise_covariance: Matrix = []
        self._update_covariance()
        for _ in range(_FITS):
            self._parameters = self._fit(prior_means, self._logs, self._parameters)
            self._update_covariance()
        self._sensitivity_rows = [self._sensitivities(corrected) for corrected in self._corrected]
        self._cholesky = cholesky(self._measurement_covariance(self._sensitivity_rows))
        differences = [
            log - math.log(corrected.seconds)
            for log, corrected in zip(self._logs, self._corrected, strict=True)
        ]
        # Residuals explain what the parameters do not, also if their fit has not converged.
        self._weights = solve_both(cholesky(self._noise_covariance), differences)

    def _update_covariance(self) -> None:
        """Update the corrected predictions of the measured layouts, and the covariance of their
        residuals and errors, after a change of the parameters.
        """
        layouts = [observation.layout for observation in self._observations]
        self._corrected = [self._correct(layout, self._parameters) for layout in layouts]
        self._noise_covariance = self._residual_covariances(layouts)
        for index, observation in enumerate(self._observations):
            self._noise_covariance[index][index] += observation.error**2

    def expect(self, layout: Layout) -> Expectation:
        """Return the expected time of a layout."""
        if (cached := self._expectations.get(id(layout))) is not None:
            return cached[1]
        expectation = self._expect(layout)
        self._expectations[id(layout)] = layout, expectation
        return expectation

    def _expect(self, layout: Layout) -> Expectation:
        corrected = self._correct(layout, self._parameters)
        row = self._sensitivities(corrected)
        residuals = [
            self._residual_covariance(layout, corrected, observation.layout, other_corrected)
            for observation, other_corrected in zip(
                self._observations, self._corrected, strict=True
            )
        ]
        covariances = [
            residual + sum(map(mul, row, other_row))
            for residual, other_row in zip(residuals, self._sensitivity_rows, strict=True)
        ]
        projection = solve(self._cholesky, covariances)
        variance = (
            sum(map(mul, row, row))
            + self._residual_covariance(layout, corrected, layout, corrected)
            - sum(map(mul, projection, projection))
        )
        mean = math.log(corrected.seconds) + sum(map(mul, residuals, self._weights))
        return Expectation(math.exp(mean), math.sqrt(max(variance, 0.0)))

    def compare(
        self,
        layouts: Sequence[Layout],
        reference: Layout,
        *,
        min_gain: float,
        decisive_chance: float,
    ) -> Prospects:
        """Return the distribution of the times of layouts relative to a measured one.

        Layouts are sampled in the order of their chances to be faster, until the others have a
        small chance together. First only some of them are, which may be likely enough to win.

        Args:
            layouts: Layouts that may be faster.
            reference: Layout that was measured. Without a measurement the result is valid, but the
                selection of the sampled layouts neglects the error of its expected time.
            min_gain: Fraction by which a layout has to be faster to win.
            decisive_chance: Probability that any layout wins from which more of them would not
                change a decision.
        """
        reference_seconds = self.expect(reference).seconds
        chances = [
            (_chance_to_beat(reference_seconds, self.expect(layout)), layout) for layout in layouts
        ]
        chances.sort(key=lambda pair: -pair[0])
        negligible = _NEGLIGIBLE * decisive_chance
        left_out = sum(chance for chance, _ in chances)
        sampled: list[Layout] = []
        for limit in (_FIRST_SAMPLED, _MAX_SAMPLED):
            for chance, layout in chances[len(sampled) : limit]:
                if left_out <= negligible:
                    break
                sampled.append(layout)
                left_out -= chance
            prospects = self._sample_prospects(sampled, reference, max(left_out, 0.0))
            win_probability = prospects.win_probability_of_sampled(min_gain)
            if left_out <= negligible or win_probability >= decisive_chance:
                break
        return prospects

    def _sample_prospects(
        self, layouts: Sequence[Layout], reference: Layout, chance_of_others: float
    ) -> Prospects:
        samples = self._sample([reference, *layouts]) if layouts else []
        log_ratios = [[log - sample[0] for log in sample[1:]] for sample in samples]
        return Prospects(list(layouts), log_ratios, chance_of_others)

    def _sample(self, layouts: Sequence[Layout]) -> list[list[float]]:
        """Return samples of the logarithms of the times of some layouts.

        Unlike in the linear model, no sample gives a cause a negative time.
        """
        # A measured layout may occur twice: its covariance is singular, which `cholesky` accepts.
        everything = [*(observation.layout for observation in self._observations), *layouts]
        count = len(self._observations)
        covariance = self._residual_covariances(everything)
        residual_cholesky, noise_cholesky = cholesky(covariance), cholesky(self._noise_covariance)
        gauss = random.Random(0).gauss
        samples = []
        for _ in range(_SAMPLES):
            means = [gauss(0.0, deviation) for deviation in self._deviations]
            normal = [gauss(0.0, 1.0) for _ in everything]
            # Rows of the lower triangle are shorter: `map` ends with them, here and below.
            residuals = [sum(map(mul, row, normal)) for row in residual_cholesky]
            logs = [
                log - residual - gauss(0.0, observation.error)
                for log, residual, observation in zip(
                    self._logs, residuals[:count], self._observations, strict=True
                )
            ]
            parameters = self._fit(means, logs, self._parameters)
            times = self._log_times(everything, parameters)
            differences = [log - time for log, time in zip(logs, times[:count], strict=True)]
            weights = solve_both(noise_cholesky, differences)
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
        """Return the fitted multiple of the predicted time of a cause, the common factor
        included.
        """
        return math.exp(self._parameters[0] + self._parameters[1 + _CAUSES.index(cause)])

    def _fit(
        self, means: Sequence[float], logs: Sequence[float], start: Sequence[float]
    ) -> list[float]:
        """Return the most likely parameters by the Gauss-Newton method.

        Args:
            means: Prior means of the parameters.
            logs: Logarithms of the measured times.
            start: Parameters at which the iteration starts.
        """
        if not logs:
            return list(means)
        parameters = list(start)
        for _ in range(_MAX_ITERATIONS):
            rows, differences = self._linearize(means, logs, parameters)
            weights = solve_both(cholesky(self._measurement_covariance(rows)), differences)
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
        """Return the linear model of the logarithms of the measured layouts' times.

        Returns:
            The derivatives per standard deviation of each parameter, a row per layout, and the
            measured logarithms minus those of the linear model at ``means``.
        """
        distances = [
            (parameter - mean) / deviation
            for parameter, mean, deviation in zip(parameters, means, self._deviations, strict=True)
        ]
        factors = _cause_factors(parameters)
        rows, differences = [], []
        for log, observation in zip(logs, self._observations, strict=True):
            corrected = observation.layout.prediction.correct(factors)
            row = self._sensitivities(corrected)
            rows.append(row)
            time = parameters[0] + math.log(corrected.seconds)
            differences.append(log - time + sum(map(mul, row, distances)))
        return rows, differences

    def _sensitivities(self, corrected: Corrected) -> list[float]:
        """Return the change of the logarithm of a time per standard deviation of each parameter."""
        shares = (corrected.shares.get(cause, 0.0) for cause in _CAUSES)
        return list(map(mul, (1.0, *shares), self._deviations))

    def _correct(self, layout: Layout, parameters: Sequence[float]) -> Corrected:
        """Return the time of a layout with some parameters, the common factor included."""
        corrected = layout.prediction.correct(_cause_factors(parameters))
        return corrected._replace(seconds=math.exp(parameters[0]) * corrected.seconds)

    def _log_times(self, layouts: Sequence[Layout], parameters: Sequence[float]) -> list[float]:
        factors = _cause_factors(parameters)
        return [
            parameters[0] + math.log(layout.prediction.correct(factors).seconds)
            for layout in layouts
        ]

    def _measurement_covariance(self, rows: Matrix) -> Matrix:
        """Return the lower triangle of the covariance of the measurements."""
        return [
            # The rows of the covariance of the noise are those of a lower triangle.
            [sum(map(mul, row, other)) + noise for other, noise in zip(rows, noises, strict=False)]
            for row, noises in zip(rows, self._noise_covariance, strict=True)
        ]

    def _residual_covariances(self, layouts: Sequence[Layout]) -> Matrix:
        """Return the lower triangle of the covariance of the residuals."""
        corrected = [self._correct(layout, self._parameters) for layout in layouts]
        pairs = list(zip(layouts, corrected, strict=True))
        return [
            [self._residual_covariance(*pair, *other) for other in pairs[: index + 1]]
            for index, pair in enumerate(pairs)
        ]

    def _residual_covariance(
        self, layout: Layout, corrected: Corrected, other: Layout, other_corrected: Corrected
    ) -> float:
        by_sizes, other_share = self._prior.by_sizes, other_corrected.shares.get
        total = sum(
            by_sizes[cause] ** 2 * share * other_share(cause, 0.0)
            for cause, share in corrected.shares.items()
        )
        if layout.setting == other.setting:
            return total + self._prior.layout**2
        return total * math.exp(-_distance(layout.setting, other.setting) / _SIMILARITY_LENGTH)


def _cause_factors(parameters: Sequence[float]) -> dict[str, float]:
    """Return the factor of each cause, without the common one."""
    return dict(zip(_CAUSES, map(math.exp, parameters[1:]), strict=True))


@dataclass(frozen=True)
class Prospects:
    """Distribution of the times of layouts relative to a reference.

    Attributes:
        layouts: Layouts that were sampled.
        samples: Logarithms of the ratios of their times to that of the reference.
        chance_of_others: Sum of the probabilities of the layouts that were not sampled to be
            faster, by the linear model: an upper bound of the probability that any of them is.
    """

    layouts: Sequence[Layout]
    samples: Sequence[Sequence[float]]
    chance_of_others: float

    def win_probability(self, min_gain: float) -> float:
        """Return the probability that any layout is faster by more than a fraction, or an upper
        bound if layouts were not sampled: a search does not end because of them.
        """
        return min(self.win_probability_of_sampled(min_gain) + self.chance_of_others, 1.0)

    def win_probability_of_sampled(self, min_gain: float) -> float:
        """Return the probability that any sampled layout is faster by more than a fraction."""
        if not self.layouts:
            return 0.0
        limit = math.log(1 - min_gain)
        return sum(min(sample) < limit for sample in self.samples) / len(self.samples)

    def most_promising(
        self, cost: Callable[[Layout], float] = lambda _layout: 1.0
    ) -> Layout | None:
        """Return the layout with the largest expected improvement per cost; None without any."""
        pair = max(
            zip(self.layouts, self.expected_improvements, strict=True),
            key=lambda pair: pair[1] / cost(pair[0]),
            default=None,
        )
        return pair[0] if pair is not None else None

    @property
    def expected_improvements(self) -> list[float]:
        """Expected improvements by each layout, as logarithms of ratios. Losses count as zero."""
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


def _chance_to_beat(reference_seconds: float, expectation: Expectation) -> float:
    difference = math.log(reference_seconds / expectation.seconds)
    if not expectation.deviation:
        return float(difference > 0)
    return _normal_cdf(difference / expectation.deviation)


def _normal_cdf(value: float) -> float:
    return 0.5 * math.erfc(-value / math.sqrt(2))
