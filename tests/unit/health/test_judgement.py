"""Tests of the judgement of measurements, and of the rows that describe it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest

from flagscale.accelerators.health import DeviceReading, Rate
from flagscale.health.judgement import Severity, judge_passes
from flagscale.health.measurements import HostMeasurement, Measurements
from flagscale.health.messages import DeviceMeasurement, PairMeasurement
from flagscale.health.names import ALL_REDUCE, DEVICE_STATE, EXCHANGE, HARDWARE
from flagscale.health.rows import HealthRow, list_rows, list_undecided, to_json
from flagscale.health.session import HealthResult

PRODUCT = "matrix product"
TIMEOUT = "no answer within 30 s"


def device(rate: float = 800.0, number: int = 0, **more: object) -> DeviceMeasurement:
    rates = (Rate(PRODUCT, rate, "TFLOP/s"),)
    return replace(DeviceMeasurement(f"GPU {number}", "H200", rates=rates), **more)  # type: ignore[arg-type]


def measured(
    *hosts: DeviceMeasurement | Sequence[DeviceMeasurement],
    pairs: Mapping[int, Sequence[PairMeasurement]] | None = None,
    failures: Mapping[int, str] | None = None,
) -> Measurements:
    """Return the measurements of hosts, each given by its devices."""
    measurements = {}
    for host, devices in enumerate(hosts):
        listed = (devices,) if isinstance(devices, DeviceMeasurement) else tuple(devices)
        measurements[host] = HostMeasurement(listed, tuple((pairs or {}).get(host, ())))
    return Measurements(measurements, failures or {})


def result_of(*passes: Measurements) -> HealthResult:
    hosts = {host for measurement in passes for host in (*measurement.hosts, *measurement.failures)}
    names = tuple(f"h{host:02}" for host in range(len(hosts)))
    return HealthResult(names, passes, judge_passes(passes), 9.5)


def rows_of(*passes: Measurements) -> dict[tuple[str, str], HealthRow]:
    return {(row.host, row.check): row for row in list_rows(result_of(*passes))}


HEALTHY = measured(*[device(rate) for rate in (800.0, 805.0, 798.0, 802.0)])
SLOW = measured(device(800.0), device(805.0), device(640.0), device(802.0))
OTHER_SLOW = measured(device(640.0), device(805.0), device(798.0), device(802.0))


@pytest.mark.parametrize(
    ("passes", "sick", "warned"),
    [
        pytest.param([HEALTHY], [], [], id="healthy"),
        pytest.param([SLOW, SLOW], [2], [], id="twice"),
        pytest.param([SLOW, HEALTHY], [], [2], id="first only"),
        pytest.param([HEALTHY, SLOW], [], [2], id="second only"),
        pytest.param([SLOW, OTHER_SLOW], [], [0, 2], id="different hosts"),
        pytest.param([SLOW, HEALTHY, SLOW], [2], [], id="two of three"),
        pytest.param([SLOW, HEALTHY, HEALTHY], [], [2], id="one of three"),
        pytest.param([HEALTHY, SLOW, SLOW, HEALTHY], [], [2], id="two of four"),
    ],
)
def test_two_measurements_must_agree(
    passes: list[Measurements], sick: list[int], warned: list[int]
) -> None:
    judgement = judge_passes(passes)
    assert judgement.hosts_with(Severity.SICK) == sick
    assert judgement.hosts_with(Severity.WARNING) == warned


def test_host_that_cannot_be_measured_again_stays_unclear() -> None:
    again = measured(device(800.0), device(805.0), failures={2: "no answer"})
    judgement = judge_passes([SLOW, again])
    assert judgement.hosts_with(Severity.UNCLEAR) == [2]
    (warning,) = [f for f in judgement.findings if f.severity is Severity.WARNING]
    assert warning.text.endswith("(801), and could not be measured again")


def test_only_suspicions_need_a_second_pass() -> None:
    assert not judge_passes([HEALTHY]).is_open
    assert judge_passes([SLOW]).is_open
    warning = DeviceReading(warnings={"power limit": "the power limit is 500 W"})
    assert not judge_passes([measured(*[device(reading=warning)] * 4)]).is_open
    assert not judge_passes([measured(device(), failures={1: "no route"})]).is_open


def test_devices_of_other_products_are_compared_apart() -> None:
    old = [device(300.0, product="A100") for _ in range(4)]
    other = [device(500.0, machine="with another bus") for _ in range(4)]
    assert judge_passes([measured(*[device()] * 4, *old, *other)]).findings == ()


@pytest.mark.parametrize(
    ("hosts", "check", "is_host", "count", "slow_devices"),
    [
        pytest.param(2, PRODUCT, False, 4, ["GPU 1"], id="devices of two hosts"),
        pytest.param(2, PRODUCT, True, 2, [], id="processes on the CPUs of two hosts"),
        pytest.param(2, ALL_REDUCE, False, 2, [], id="all_reduce within two hosts"),
        pytest.param(4, ALL_REDUCE, False, 4, [""], id="all_reduce within four hosts"),
    ],
)
def test_what_devices_share_counts_once_per_host(
    hosts: int, check: str, is_host: bool, count: int, slow_devices: list[str]
) -> None:
    rates = (Rate(check, 100.0, "GB/s"),)
    devices = [device(number=n, is_host=is_host, rates=rates) for n in range(2)]
    slow = [devices[0], device(number=1, is_host=is_host, rates=(Rate(check, 70.0, "GB/s"),))]
    judgement = judge_passes([measured(slow, *[devices] * (hosts - 1))])
    assert [group.comparison.count for group in judgement.groups] == [count]
    assert [finding.device for finding in judgement.findings] == slow_devices


def test_passes_agree_on_a_host_by_different_slowest_devices() -> None:
    def measure(*rates: float) -> Measurements:
        slow = [
            device(number=number, rates=(Rate(ALL_REDUCE, rate, "GB/s"),))
            for number, rate in enumerate(rates)
        ]
        usual = [replace(item, rates=(Rate(ALL_REDUCE, 100.0, "GB/s"),)) for item in slow]
        return measured(slow, usual, usual, usual)

    judgement = judge_passes([measure(70.0, 72.0), measure(72.0, 70.0)])
    assert [finding.text for finding in judgement.findings] == [
        "GPU 1: 70 GB/s, 30% below the median of 4 equal ones (100)"
    ]
    assert judgement.hosts_with(Severity.SICK) == [0]


def test_one_slow_device_of_a_host_is_named() -> None:
    sick = [device(number=0), device(600.0, number=1)]
    measurements = measured([device(number=0), device(number=1)], sick)
    row = rows_of(measurements, measurements)["h01", PRODUCT]
    assert not row.ok
    assert row.text == "GPU 1: 600 TFLOP/s, 25% below the median of 4 equal ones (800)"


def test_device_in_use_by_others_is_not_compared() -> None:
    busy = DeviceReading(other_processes=("python (pid 12)",))
    measurements = measured(*[device()] * 4, device(400.0, reading=busy))
    rows = rows_of(measurements)
    assert ("h04", PRODUCT) not in rows
    assert rows["h04", DEVICE_STATE].text == "GPU 0: in use by python (pid 12); not compared"
    assert rows["h04", DEVICE_STATE].warning


WIDE, NARROW = DeviceReading(widths={"PCIe width": 16}), DeviceReading(widths={"PCIe width": 8})
CAPPED, FREE = DeviceReading(limits={"power": 500}), DeviceReading(limits={"power": 700})
BROKEN = DeviceReading(faults={"ECC": "3 uncorrected ECC error(s)"})


@pytest.mark.parametrize(
    ("readings", "sick", "warned"),
    [
        pytest.param([WIDE, WIDE, WIDE, NARROW], [3], [], id="narrow link"),
        pytest.param([NARROW, NARROW, WIDE, WIDE], [], [], id="no majority"),
        pytest.param([NARROW, NARROW, NARROW, WIDE], [], [], id="most are narrow"),
        pytest.param([WIDE, WIDE, NARROW], [], [], id="too few"),
        pytest.param([FREE, FREE, FREE, CAPPED], [], [3], id="power limit"),
        pytest.param([BROKEN, WIDE], [0], [], id="fault"),
    ],
)
def test_reading_of_a_device(
    readings: list[DeviceReading], sick: list[int], warned: list[int]
) -> None:
    judgement = judge_passes([measured(*[device(reading=reading) for reading in readings])] * 2)
    assert judgement.hosts_with(Severity.SICK) == sick
    assert judgement.hosts_with(Severity.WARNING) == warned


def good(partner: int, rate: float = 40.0) -> PairMeasurement:
    return PairMeasurement(partner, (rate,))


def bad(partner: int) -> PairMeasurement:
    return PairMeasurement(partner, (), TIMEOUT)


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        pytest.param(
            {0: [bad(3), good(1)], 1: [bad(3), good(0)], 3: [bad(0), bad(1)]},
            {3: Severity.SICK},
            id="all pairs of one",
        ),
        pytest.param(
            {0: [bad(1)], 1: [bad(0)]},
            {0: Severity.UNCLEAR, 1: Severity.UNCLEAR},
            id="the only pair",
        ),
        pytest.param(
            {0: [bad(1), good(2)], 1: [bad(0), good(3)], 2: [good(0)], 3: [good(1)]},
            {0: Severity.WARNING, 1: Severity.WARNING},
            id="one link",
        ),
        pytest.param(
            {0: [good(3, 20.0), good(1)], 1: [good(3, 20.0), good(0)], 2: [good(3, 21.0), good(0)],
             3: [good(0, 20.0), good(1, 20.0)]},
            {3: Severity.SICK},
            id="slow link of one",
        ),
    ],
)  # fmt: skip
def test_host_is_blamed_only_for_what_its_partners_do_better(
    pairs: dict[int, list[PairMeasurement]], expected: dict[int, Severity]
) -> None:
    judgement = judge_passes([measured(*[device()] * 4, pairs=pairs)])
    assert {finding.host: finding.severity for finding in judgement.findings} == expected
    assert {finding.check for finding in judgement.findings} == {EXCHANGE}


@pytest.mark.parametrize(
    ("failing", "severity"),
    [
        pytest.param(1, Severity.SICK, id="one of four"),
        pytest.param(4, Severity.UNCLEAR, id="all: rather their software"),
    ],
)
def test_device_that_cannot_compute(failing: int, severity: Severity) -> None:
    failed = DeviceMeasurement("GPU 0", "", problem="CUDA error: unspecified launch failure")
    judgement = judge_passes([measured(*[failed] * failing, *[device()] * (4 - failing))])
    assert {f.severity for f in judgement.findings} == {severity}


@pytest.mark.parametrize(
    ("counts", "sick"),
    [
        pytest.param([2, 2, 2, 1], [3], id="one is lost"),
        pytest.param([2, 2, 1], [], id="too few hosts"),
        pytest.param([2, 2, 1, 1], [], id="no majority"),
        pytest.param([1, 1, 1, 2], [], id="one more"),
    ],
)
def test_host_with_a_lost_device(counts: list[int], sick: list[int]) -> None:
    judgement = judge_passes(
        [measured(*[[device(number=n) for n in range(count)] for count in counts])]
    )
    assert judgement.hosts_with(Severity.SICK) == sick
    texts = ["1 x H200, but most equal hosts have 2"] if sick else []
    assert [finding.text for finding in judgement.findings] == texts


def test_host_that_cannot_be_measured_is_unclear() -> None:
    row = rows_of(measured(device(), failures={1: "its Python cannot import torch"}))
    assert row["h01", HARDWARE].text == "not measured: its Python cannot import torch"
    assert not row["h01", HARDWARE].ok


def test_host_without_an_address_is_said_to_have_no_pairs() -> None:
    measurements = measured(device(), device())
    alone = replace(measurements.hosts[1], has_address=False)
    row = rows_of(replace(measurements, hosts={**measurements.hosts, 1: alone}))["h01", EXCHANGE]
    assert row.ok and row.warning
    assert row.text.startswith("not measured: the names of other hosts do not resolve there")


@pytest.mark.parametrize(
    ("measurements", "text", "warning"),
    [
        pytest.param(
            HEALTHY,
            "4 equal ones, median 801 TFLOP/s: none is more than 10% below",
            False,
            id="compared",
        ),
        pytest.param(
            measured(device()), "800 TFLOP/s; nothing to compare it with", False, id="one host"
        ),
        pytest.param(
            measured(device(), device(640.0)),
            "not judged: 640 to 800 TFLOP/s; 4 equal ones are needed, not 2",
            True,
            id="two hosts that differ",
        ),
        pytest.param(
            measured(device(), device(790.0)),
            "not judged: 790 to 800 TFLOP/s; 4 equal ones are needed, not 2",
            False,
            id="two hosts",
        ),
        pytest.param(
            measured(*[device(rate) for rate in (800.0, 600.0, 700.0, 500.0)]),
            "not judged: 4 equal ones differ too much, 500 to 800 TFLOP/s: one that is 20 % slow "
            "would not stand out",
            True,
            id="noise",
        ),
    ],
)
def test_row_says_what_cannot_be_judged(
    measurements: Measurements, text: str, warning: bool
) -> None:
    row = rows_of(measurements)["h00", PRODUCT]
    assert (row.text, row.warning, row.ok) == (text, warning, True)
    is_compared = text.startswith("4 equal ones, median")
    assert list_undecided(result_of(measurements)) == ([] if is_compared else [PRODUCT])


def test_json_lists_every_host_once() -> None:
    reading = DeviceReading(details={"temperature": "40 °C"})
    slow = measured(
        *[device(reading=reading)] * 3, device(600.0), failures={4: "connection refused"}
    )
    record = json.loads(json.dumps(to_json(result_of(slow, slow))))
    assert record["passing"] == ["h00", "h01", "h02"]
    assert record["failing"] == ["h03"]
    assert record["unclear"] == ["h04"]
    assert record["passes"] == 2
    state = record["hosts"][0]["devices"][0]["state"]
    assert state["details"] == {"temperature": "40 °C"}
    (comparison,) = record["comparisons"]
    assert comparison["median"] == 800.0 and comparison["decidable"]


@pytest.mark.parametrize("change", [lambda m: m, lambda m: replace(m, failures={})])
def test_judgement_does_not_depend_on_the_order_of_hosts(
    change: Callable[[Measurements], Measurements],
) -> None:
    backwards = change(replace(SLOW, hosts=dict(sorted(SLOW.hosts.items(), reverse=True))))
    assert judge_passes([backwards]) == judge_passes([SLOW])
