"""Comparison of hosts without devices by all their rates together. Pure functions, standard library
alone.

All rates of such a host depend on the same cores, so a slow host is slow in each of them. On a busy
machine one rate is too noisy for a decision; the mean of all is not. With the rate x of a host in
check c and pass k,

    d = ln(x / median of all hosts in c and k)
    noise of a check: s = max(1.4826 * median of |d| over all hosts and passes, 0.005)
    speed in a pass, relative to the usual one: exp(sum of d / s over the checks / sum of 1 / s)

The speed of a host is the geometric mean of its speeds in the passes. The weights are 1 / s and not
1 / s**2, which would let one check decide whose s is small by accident. A host is slow if its speed
is too low among those of all hosts (:func:`.slow.compare_rates`), and if in each single pass it is
slower by more than a quarter of the smallest shortfall that counts there.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from flagscale.health.slow import (
    FLOOR,
    MIN_COUNT,
    NORMAL_CONSISTENCY,
    Comparison,
    compare_rates,
    noise_limit,
)

_MIN_PASS_SHORTFALL = FLOOR / 4
"""Shortfall above which a single pass agrees that a host is slow."""
_LEAST_NOISE = 0.005

Rates = Mapping[str, Mapping[int, float]]
"""Rates of one pass, all above 0, by check and host."""


@dataclass(frozen=True)
class HostSpeeds:
    """Speeds of equal hosts, relative to the usual one."""

    by_pass: Sequence[Mapping[int, float]]
    speeds: Mapping[int, float]
    """Over all passes."""
    comparison: Comparison

    def is_slow(self, host: int) -> bool:
        """Return True if one of :attr:`speeds` is too low, and every pass agrees."""
        return self._all_agree(host) and self.comparison.is_slow(self.speeds[host])

    def needs_another_pass(self, host: int) -> bool:
        """Return True if every pass agrees, and the speed is at least half as low as it has to be,
        and only noise may keep it from being too low.

        A pass that does not agree clears the host for good.
        """
        if not self._all_agree(host) or self.is_slow(host):
            return False
        return self.comparison.shortfall(self.speeds[host]) > max(
            FLOOR / 2, FLOOR - self._noise_limit
        )

    @cached_property
    def _noise_limit(self) -> float:
        return noise_limit(list(self.speeds.values()))

    def _all_agree(self, host: int) -> bool:
        return all(1 - speeds[host] > _MIN_PASS_SHORTFALL for speeds in self.by_pass)


def compare_hosts(passes: Sequence[Rates]) -> HostSpeeds | None:
    """Compare the hosts that have all rates, by the checks that all passes have in common.

    Args:
        passes: the rates of at least one pass.

    Returns:
        None if fewer than :data:`.slow.MIN_COUNT` hosts can be compared.
    """
    checks = sorted(set.intersection(*(set(rates) for rates in passes)))
    measured_hosts = [set(rates[check]) for rates in passes for check in checks]
    hosts = sorted(set.intersection(*measured_hosts)) if measured_hosts else []
    if len(hosts) < MIN_COUNT:
        return None
    deviations = {
        check: [_deviate({host: rates[check][host] for host in hosts}) for rates in passes]
        for check in checks
    }
    weights = {check: 1 / _find_noise(by_pass) for check, by_pass in deviations.items()}
    speeds_by_pass = []
    for index in range(len(passes)):
        speeds = {
            host: math.exp(
                sum(weights[check] * deviations[check][index][host] for check in checks)
                / sum(weights.values())
            )
            for host in hosts
        }
        usual = statistics.median(speeds.values())
        speeds_by_pass.append({host: speed / usual for host, speed in speeds.items()})
    speeds = {
        host: statistics.geometric_mean(by_host[host] for by_host in speeds_by_pass)
        for host in hosts
    }
    return HostSpeeds(speeds_by_pass, speeds, compare_rates(list(speeds.values())))


def _deviate(rates: Mapping[int, float]) -> dict[int, float]:
    """Return the logarithm of each host's rate relative to the median."""
    median = statistics.median(rates.values())
    return {host: math.log(rate / median) for host, rate in rates.items()}


def _find_noise(deviations: Sequence[Mapping[int, float]]) -> float:
    """Return the standard deviation of a check's deviations in all passes, which a few slow hosts
    do not change.
    """
    sizes = [abs(value) for by_host in deviations for value in by_host.values()]
    return max(NORMAL_CONSISTENCY * statistics.median(sizes), _LEAST_NOISE)
