"""Judgement of hosts by the measurements of equal devices. Pure functions, standard library alone.

One pass gives suspicions. :func:`judge_passes` keeps those that passes agree on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import chain
from typing import NamedTuple

from flagscale.accelerators.health import DeviceReading
from flagscale.health.all_rates import Rates, compare_hosts
from flagscale.health.measurements import HostMeasurement, Measurements
from flagscale.health.messages import DeviceMeasurement
from flagscale.health.names import (
    ALL_RATES,
    ALL_REDUCE,
    DEVICE_STATE,
    EXCHANGE,
    HARDWARE,
    format_rate,
)
from flagscale.health.slow import MIN_COUNT, Comparison, compare_rates

EXCHANGE_UNIT = "GB/s"
_CHECKS_OF_HOSTS = (ALL_REDUCE, EXCHANGE)
_NOT_MEASURED = "not measured"


class Severity(Enum):
    """Effect of a finding."""

    SICK = "sick"
    """The host is sick."""
    UNCLEAR = "unclear"
    """A run would suffer, and it is not clear which host is the cause."""
    WARNING = "warning"
    """The user should know; a run can start."""


@dataclass(frozen=True)
class Finding:
    """A deviation on a host."""

    host: int
    check: str
    """Name of the check, see :mod:`.names`; for a rate its own name."""
    device: str
    """Label of the device; empty for the host."""
    aspect: str
    """Further distinction between findings of a device."""
    severity: Severity
    text: str

    @property
    def key(self) -> tuple[int, str, str, str]:
        """Identity of the finding, which two passes must agree on."""
        return self.host, self.check, self.device, self.aspect


@dataclass(frozen=True)
class Group:
    """Devices that were compared by one rate."""

    check: str
    product: str
    """Product and model of the machines."""
    unit: str
    hosts: frozenset[int]
    comparison: Comparison


@dataclass(frozen=True)
class Judgement:
    """Findings and comparisons of all passes so far."""

    findings: tuple[Finding, ...] = ()
    groups: tuple[Group, ...] = ()
    is_open: bool = False
    """True if another pass, in which hosts that failed take no part, may change it."""

    def hosts_with(self, severity: Severity) -> list[int]:
        """Return the hosts that have a finding of a severity, in order."""
        return sorted({item.host for item in self.findings if item.severity is severity})


class _Sample(NamedTuple):
    host: int
    device: DeviceMeasurement
    value: float


def judge_passes(passes: Sequence[Measurements]) -> Judgement:
    """Judge at least one pass. Among several, a host is sick

    - if more than half of the passes, at least two, agree on a finding,
    - if it is slow by all of its rates in all passes together, or
    - if it could not be measured any more, which is no reason for doubt.

    What fewer passes have found becomes a warning. The findings of a single pass are preliminary:
    the judgement is open if there are any.
    """
    findings_by_pass, groups_by_pass = zip(*map(_judge_pass, passes), strict=True)
    findings = _confirm(findings_by_pass, passes[-1].failures)
    by_all_rates = [
        _judge_all_rates(product, rates) for product, rates in _collect_rates(passes).items()
    ]
    for part in by_all_rates:
        findings += part.findings
    is_preliminary = len(passes) == 1 and any(map(_needs_agreement, findings))
    return Judgement(
        tuple(findings),
        (*groups_by_pass[-1], *chain.from_iterable(part.groups for part in by_all_rates)),
        is_preliminary or any(part.is_open for part in by_all_rates),
    )


def _needs_agreement(finding: Finding) -> bool:
    return finding.severity is not Severity.WARNING and finding.aspect != _NOT_MEASURED


def _judge_pass(measurements: Measurements) -> tuple[list[Finding], list[Group]]:
    findings = [
        Finding(host, HARDWARE, "", _NOT_MEASURED, Severity.UNCLEAR, f"not measured: {reason}")
        for host, reason in measurements.failures.items()
    ]
    findings += _judge_problems(measurements)
    findings += _judge_counts(measurements)
    findings += _judge_readings(measurements)
    findings += _judge_broken_pairs(measurements)
    groups = []
    for (check, product, unit), samples in _collect_samples(measurements).items():
        comparison = compare_rates([sample.value for sample in samples])
        hosts = frozenset(sample.host for sample in samples)
        groups.append(Group(check, product, unit, hosts, comparison))
        findings += [
            Finding(
                sample.host,
                check,
                # In another pass, another device may be the slowest one, which stands for the host.
                "" if _is_shared(check, sample) else sample.device.label,
                "slow",
                Severity.SICK,
                f"{sample.device.label}: {format_rate(sample.value)} {unit}, "
                f"{comparison.shortfall(sample.value):.0%} below the median of "
                f"{comparison.count} equal ones ({format_rate(comparison.median)})",
            )
            for sample in samples
            if comparison.is_slow(sample.value)
        ]
    return findings, groups


def _confirm(
    findings_by_pass: Sequence[Sequence[Finding]], failures: Container[int]
) -> list[Finding]:
    """Return the last finding of each key, as a warning if too few passes have found it.

    Args:
        findings_by_pass: Findings of each pass.
        failures: Hosts that the last pass could not measure.
    """
    count = len(findings_by_pass)
    suspicions = Counter(
        key
        for findings in findings_by_pass
        for key in {finding.key for finding in findings if _needs_agreement(finding)}
    )
    confirmed = []
    for finding in {f.key: f for findings in findings_by_pass for f in findings}.values():
        found = suspicions[finding.key]
        if count == 1 or 2 * found > count or not _needs_agreement(finding):
            confirmed.append(finding)
            continue
        reason = f"but in {found} of {count} measurements only"
        if finding.host in failures:
            reason = "and could not be measured again"
        text = f"{finding.text}, {reason}"
        confirmed.append(replace(finding, severity=Severity.WARNING, text=text))
    return confirmed


def _collect_rates(passes: Sequence[Measurements]) -> Mapping[str, Sequence[Rates]]:
    """Return the rates of hosts without devices by product, one entry per pass."""
    rates: dict[str, list[dict[str, Mapping[int, float]]]] = {}
    for number, measurements in enumerate(passes):
        for (check, product, _), samples in _collect_samples(measurements).items():
            if samples[0].device.is_host:
                by_pass = rates.setdefault(product, [{} for _ in passes])
                by_pass[number][check] = {sample.host: sample.value for sample in samples}
    return rates


def _judge_all_rates(product: str, passes: Sequence[Rates]) -> Judgement:
    """Judge equal hosts by all of their rates in all passes."""
    speeds = compare_hosts(passes)
    if speeds is None:
        return Judgement()
    comparison = speeds.comparison
    count = "" if len(passes) == 1 else f" in {len(passes)} measurements"
    findings = tuple(
        Finding(
            host,
            ALL_RATES,
            "",
            "slow",
            Severity.SICK,
            f"{comparison.shortfall(speed):.0%} slower than the median of {comparison.count} equal "
            f"hosts{count}",
        )
        for host, speed in speeds.speeds.items()
        if speeds.is_slow(host)
    )
    group = Group(ALL_RATES, product, "of the usual speed", frozenset(speeds.speeds), comparison)
    return Judgement(findings, (group,), any(map(speeds.needs_another_pass, speeds.speeds)))


def _collect_samples(
    measurements: Measurements,
) -> Mapping[tuple[str, str, str], list[_Sample]]:
    """Return the comparable rates by check, product and unit, without those of devices in use.

    Where the devices of a host share what is measured, the slowest one stands for the host.
    """
    samples: dict[tuple[str, str, str], list[_Sample]] = {}
    for host, measurement in sorted(measurements.hosts.items()):
        best_exchange = _best_exchange(measurement)
        for number, device in enumerate(measurement.devices):
            if device.reading is not None and device.reading.other_processes:
                continue
            rates = [(rate.name, rate.unit, rate.value) for rate in device.rates]
            if number in best_exchange:
                rates.append((EXCHANGE, EXCHANGE_UNIT, best_exchange[number]))
            for name, unit, value in rates:
                key = (name, describe_product(device), unit)
                samples.setdefault(key, []).append(_Sample(host, device, value))
    return {
        key: _slowest_by_host(members) if _is_shared(key[0], members[0]) else members
        for key, members in samples.items()
    }


def _is_shared(check: str, sample: _Sample) -> bool:
    """Return True if the devices of a host share what is measured."""
    return check in _CHECKS_OF_HOSTS or sample.device.is_host


def _slowest_by_host(samples: Sequence[_Sample]) -> list[_Sample]:
    slowest: dict[int, _Sample] = {}
    for sample in samples:
        if sample.host not in slowest or sample.value < slowest[sample.host].value:
            slowest[sample.host] = sample
    return list(slowest.values())


def describe_product(device: DeviceMeasurement) -> str:
    """Return the text that equal devices in equal machines share."""
    return f"{device.product} in {device.machine}" if device.machine else device.product


def _best_exchange(measurement: HostMeasurement) -> Mapping[int, float]:
    """Return each device's rate with the best partner: the others may be the slow ones."""
    best: dict[int, float] = {}
    for pair in measurement.pairs:
        for number, rate in enumerate(pair.rates):
            best[number] = max(rate, best.get(number, 0.0))
    return best


def _judge_problems(measurements: Measurements) -> Iterator[Finding]:
    """Yield devices that could not be measured. If most could not, the cause is not the device."""
    devices = [
        (host, device)
        for host, measurement in measurements.hosts.items()
        for device in measurement.devices
    ]
    failed = [(host, device) for host, device in devices if device.problem]
    severity = Severity.SICK if 2 * len(failed) < len(devices) else Severity.UNCLEAR
    for host, device in failed:
        text = f"{device.label}: {device.problem}"
        yield Finding(host, HARDWARE, device.label, "failed", severity, text)


def _find_usual(values: Sequence[float]) -> float | None:
    """Return the value that most of enough values are equal to; None if there is none."""
    value, count = Counter(values).most_common(1)[0]
    return value if len(values) >= MIN_COUNT and 2 * count > len(values) else None


def _judge_counts(measurements: Measurements) -> Iterator[Finding]:
    """Yield hosts with fewer devices than most equal hosts: one may have fallen off the bus."""
    counts: dict[str, dict[int, int]] = {}
    for host, measurement in measurements.hosts.items():
        if any(device.problem for device in measurement.devices):
            continue  # which is reported itself
        for product, number in Counter(map(describe_product, measurement.devices)).items():
            counts.setdefault(product, {})[host] = number
    for product, numbers in counts.items():
        usual = _find_usual(list(numbers.values()))
        for host, number in numbers.items():
            if usual is not None and number < usual:
                text = f"{number} x {product}, but most equal hosts have {usual:g}"
                yield Finding(host, HARDWARE, "", "count", Severity.SICK, text)


def _judge_readings(measurements: Measurements) -> Iterator[Finding]:
    """Yield what the vendors' libraries report."""
    equal: dict[str, list[tuple[int, str, DeviceReading]]] = {}
    for host, measurement in measurements.hosts.items():
        for device in measurement.devices:
            if device.reading is not None:
                entry = (host, device.label, device.reading)
                equal.setdefault(describe_product(device), []).append(entry)
    for entries in equal.values():
        for host, label, reading in entries:
            for kind, severity, texts in (
                ("fault", Severity.SICK, reading.faults),
                ("warning", Severity.WARNING, reading.warnings),
            ):
                for name, text in texts.items():
                    aspect = f"{kind}: {name}"
                    yield Finding(host, DEVICE_STATE, label, aspect, severity, f"{label}: {text}")
            if reading.other_processes:
                text = f"{label}: in use by {', '.join(reading.other_processes)}; not compared"
                yield Finding(host, DEVICE_STATE, label, "in use", Severity.WARNING, text)
        yield from _compare_readings(entries)


def _compare_readings(
    entries: Sequence[tuple[int, str, DeviceReading]],
) -> Iterator[Finding]:
    """Yield values that are lower than those of most equal devices."""
    for severity, attribute in ((Severity.SICK, "widths"), (Severity.WARNING, "limits")):
        names = {name for _, _, reading in entries for name in getattr(reading, attribute)}
        for name in sorted(names):
            values = [
                (host, label, getattr(reading, attribute)[name])
                for host, label, reading in entries
                if name in getattr(reading, attribute)
            ]
            usual = _find_usual([value for _, _, value in values])
            for host, label, value in values:
                if usual is not None and value < usual:
                    text = f"{label}: {name} is {value:g}, that of most equal ones {usual:g}"
                    aspect = f"{attribute}: {name}"
                    yield Finding(host, DEVICE_STATE, label, aspect, severity, text)


def _judge_broken_pairs(measurements: Measurements) -> Iterator[Finding]:
    """Yield hosts that could not exchange data.

    A host is the cause if it succeeded with none and failed with at least two that succeeded with
    others.
    """
    working = {
        host
        for host, measurement in measurements.hosts.items()
        if any(pair.rates for pair in measurement.pairs)
    }
    for host, measurement in measurements.hosts.items():
        if not measurement.has_address:
            text = "not measured: the names of other hosts do not resolve there; set addr= in a "
            text += "hostfile"
            yield Finding(host, EXCHANGE, "", "address", Severity.WARNING, text)
        broken = [pair for pair in measurement.pairs if pair.problem]
        if not broken:
            continue
        is_cause = host not in working and sum(pair.partner in working for pair in broken) > 1
        partners_are_cause = host in working and all(pair.partner not in working for pair in broken)
        if partners_are_cause:
            continue
        severity = Severity.SICK if is_cause else Severity.UNCLEAR
        if host in working:
            severity = Severity.WARNING
        text = f"{len(broken)} of {len(measurement.pairs)} failed: {broken[0].problem}"
        yield Finding(host, EXCHANGE, "", "failed", severity, text)
