"""Tests of the comparison of hosts by all their rates, on measured and on generated rates."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flagscale.accelerators.health import Rate
from flagscale.health.all_rates import Rates, compare_hosts
from flagscale.health.judgement import Judgement, Severity, judge_passes
from flagscale.health.measurements import HostMeasurement, Measurements
from flagscale.health.messages import DeviceMeasurement
from flagscale.health.names import ALL_RATES

# Two passes on eight hosts, of which host 6 had 80 % of the others' share of the machine's cores.
SLOW: Sequence[Mapping[str, Sequence[float]]] = (
    {
        "matrix product": [6.09, 6.07, 6.34, 6.17, 5.51, 6.5, 4.88, 6.54],
        "memory copy": [1.11, 1.2, 1.53, 1.31, 1.26, 1.12, 1.11, 1.5],
        "all_reduce": [0.102, 0.104, 0.106, 0.109, 0.101, 0.105, 0.0883, 0.099],
        "exchange": [0.111, 0.109, 0.111, 0.124, 0.109, 0.109, 0.0944, 0.109],
    },
    {
        "matrix product": [5.55, 6.17, 5.94, 5.75, 5.44, 5.34, 4.87, 5.65],
        "memory copy": [1.46, 1.39, 1.3, 1.22, 1.09, 1.1, 1.08, 1.26],
        "all_reduce": [0.106, 0.109, 0.117, 0.105, 0.103, 0.104, 0.0825, 0.107],
        "exchange": [0.122, 0.116, 0.107, 0.105, 0.104, 0.112, 0.0952, 0.111],
    },
)
# The same hosts with equal shares.
EQUAL: Sequence[Mapping[str, Sequence[float]]] = (
    {
        "matrix product": [5.44, 6.02, 5.36, 5.44, 5.87, 5.65, 5.69, 5.71],
        "memory copy": [1.11, 1.15, 1.25, 1.17, 1.09, 1.16, 1.05, 1.07],
        "all_reduce": [0.0962, 0.101, 0.112, 0.108, 0.112, 0.107, 0.106, 0.106],
        "exchange": [0.112, 0.112, 0.116, 0.113, 0.119, 0.116, 0.111, 0.115],
    },
    {
        "matrix product": [5.98, 6.63, 5.97, 6.48, 5.49, 6.35, 6.2, 6.65],
        "memory copy": [1.11, 1.29, 1.34, 1.14, 1.14, 1.34, 1.14, 1.17],
        "all_reduce": [0.117, 0.119, 0.126, 0.118, 0.117, 0.123, 0.116, 0.114],
        "exchange": [0.155, 0.136, 0.131, 0.137, 0.142, 0.131, 0.133, 0.132],
    },
)


def measured(rates: Mapping[str, Sequence[float]]) -> Measurements:
    """Return a pass in which each host has one device, the host itself."""
    count = len(next(iter(rates.values())))
    hosts = {
        host: HostMeasurement(
            (
                DeviceMeasurement(
                    "CPU device 0",
                    "processor",
                    is_host=True,
                    rates=tuple(Rate(name, values[host], "GB/s") for name, values in rates.items()),
                ),
            )
        )
        for host in range(count)
    }
    return Measurements(hosts, {})


def judge(*passes: Mapping[str, Sequence[float]]) -> Judgement:
    return judge_passes([measured(rates) for rates in passes])


def test_slow_host_is_named_by_all_rates() -> None:
    judgement = judge(*SLOW)
    assert judgement.hosts_with(Severity.SICK) == [6]
    (finding,) = [f for f in judgement.findings if f.check == ALL_RATES]
    assert finding.text == "17% slower than the median of 8 equal hosts in 2 measurements"


def test_equal_hosts_are_not_named() -> None:
    judgement = judge(*EQUAL)
    assert judgement.findings == ()
    assert not judgement.is_open


@pytest.mark.parametrize(
    ("passes", "sick", "is_open"),
    [
        pytest.param(SLOW[:1], [6], True, id="one pass decides nothing"),
        pytest.param([SLOW[0], EQUAL[0]], [], False, id="passes that disagree"),
        pytest.param([SLOW[0], *EQUAL, *EQUAL], [], False, id="slow at first"),
    ],
)
def test_passes(
    passes: Sequence[Mapping[str, Sequence[float]]], sick: list[int], is_open: bool
) -> None:
    judgement = judge(*passes)
    found = {f.host for f in judgement.findings if f.check == ALL_RATES}
    assert (sorted(found), judgement.is_open) == (sick, is_open)


def test_too_few_hosts_are_not_compared() -> None:
    assert compare_hosts([{"copy": {0: 1.0, 1: 1.0, 2: 0.5}}]) is None


def test_hosts_without_a_rate_are_left_out() -> None:
    complete = dict.fromkeys(range(5), 1.0)
    speeds = compare_hosts([{"copy": complete, "product": complete | {5: 0.1}}])
    assert speeds is not None
    assert set(speeds.speeds) == set(range(5))


@st.composite
def noisy_passes(draw: st.DrawFn, slowed_to: float) -> list[Rates]:
    """Return two passes of 8 to 32 hosts whose rates differ by 3 %; host 0 is slowed."""
    generator = random.Random(draw(st.integers(0, 2**32)))
    hosts = draw(st.integers(8, 32))
    checks = draw(st.integers(3, 5))
    return [
        {
            f"check {check}": {
                host: math.exp(generator.gauss(0.0, 0.03)) * (slowed_to if host == 0 else 1.0)
                for host in range(hosts)
            }
            for check in range(checks)
        }
        for _ in range(2)
    ]


@given(noisy_passes(0.75))
def test_slow_host_is_found_in_noise(passes: list[Rates]) -> None:
    speeds = compare_hosts(passes)
    assert speeds is not None
    assert [host for host in speeds.speeds if speeds.is_slow(host)] == [0]


@given(noisy_passes(1.0))
def test_noise_is_not_slow(passes: list[Rates]) -> None:
    speeds = compare_hosts(passes)
    assert speeds is not None
    assert not any(map(speeds.is_slow, speeds.speeds))
