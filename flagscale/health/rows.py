"""Results of a hardware check as rows, one per check and host. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flagscale.health.judgement import Group, Severity
from flagscale.health.names import DEVICE_STATE, HARDWARE, format_rate
from flagscale.health.session import HealthResult
from flagscale.health.slow import FLOOR, MIN_COUNT

_MAX_TEXTS = 3
_SICK_HINT = "leave the host out, or have it repaired"


@dataclass(frozen=True)
class HealthRow:
    """Result of one check on one host."""

    host: str
    check: str
    ok: bool
    text: str
    hint: str = ""
    warning: bool = False


def list_rows(result: HealthResult) -> list[HealthRow]:
    """Return the rows of all hosts that were checked, grouped by check."""
    groups = {
        check: [g for g in result.judgement.groups if g.check == check] for check in _checks(result)
    }
    return [row for check, members in groups.items() for row in _check_rows(result, check, members)]


def _checks(result: HealthResult) -> list[str]:
    judgement = result.judgement
    checks = [HARDWARE] if any(f.check == HARDWARE for f in judgement.findings) else []
    if any(_has_reading(result, host) for host in result.passes[-1].hosts):
        checks.append(DEVICE_STATE)
    checks += [group.check for group in judgement.groups]
    checks += [finding.check for finding in judgement.findings]
    return list(dict.fromkeys(checks))


def _check_rows(result: HealthResult, check: str, groups: list[Group]) -> Iterator[HealthRow]:
    for host, name in enumerate(result.names):
        findings = [f for f in result.judgement.findings if f.host == host and f.check == check]
        severities = {finding.severity for finding in findings}
        if findings:
            worst = next(severity for severity in Severity if severity in severities)
            texts = [finding.text for finding in findings if finding.severity is worst]
            text = "; ".join(texts[:_MAX_TEXTS])
            text += f"; {len(texts) - _MAX_TEXTS} more" if texts[_MAX_TEXTS:] else ""
            hint = _SICK_HINT if worst is Severity.SICK else ""
            is_warning = worst is Severity.WARNING
            yield HealthRow(name, check, is_warning, text, hint, is_warning)
        elif check == DEVICE_STATE and _has_reading(result, host):
            yield HealthRow(name, check, ok=True, text=_describe_reading(result, host))
        else:
            for group in groups:
                if host in group.hosts:
                    yield HealthRow(name, check, True, *_describe_group(group))


def _has_reading(result: HealthResult, host: int) -> bool:
    measurement = result.passes[-1].hosts.get(host)
    return measurement is not None and any(d.reading is not None for d in measurement.devices)


def _describe_reading(result: HealthResult, host: int) -> str:
    devices = result.passes[-1].hosts[host].devices
    reasons = (device.reading.unread for device in devices if device.reading is not None)
    reason = next(filter(None, reasons), "")
    return f"not read: {reason}" if reason else "no errors"


def _describe_group(group: Group) -> tuple[str, str, bool]:
    """Return the text, hint and warning of a host without a finding."""
    comparison, unit = group.comparison, group.unit
    if comparison.is_decidable:
        text = f"{comparison.count} equal ones, median {format_rate(comparison.median)} {unit}: "
        return f"{text}none is more than {comparison.threshold:.0%} below", "", False
    if comparison.count == 1:
        return f"{format_rate(comparison.median)} {unit}; nothing to compare it with", "", False
    difference = 1 - comparison.lowest / comparison.highest
    values = f"{format_rate(comparison.lowest)} to {format_rate(comparison.highest)} {unit}"
    if comparison.count < MIN_COUNT:
        text = f"not judged: {values}; {MIN_COUNT} equal ones are needed, not {comparison.count}"
        return text, "", difference > FLOOR
    text = f"not judged: {comparison.count} equal ones differ too much, {values}: one that is 20 % "
    return f"{text}slow would not stand out", "", True


def list_undecided(result: HealthResult) -> list[str]:
    """Return the checks in which some devices could not be compared."""
    groups = result.judgement.groups
    undecided = [group.check for group in groups if not group.comparison.is_decidable]
    return list(dict.fromkeys(undecided))


def sort_hosts(result: HealthResult) -> dict[str, list[str]]:
    """Return the names of the hosts that were checked, as ``passing``, ``failing`` or ``unclear``
    ones."""
    last, judgement = result.passes[-1], result.judgement
    failing = judgement.hosts_with(Severity.SICK)
    unclear = [h for h in judgement.hosts_with(Severity.UNCLEAR) if h not in failing]
    checked = sorted({*last.hosts, *last.failures})
    passing = [host for host in checked if host not in (*failing, *unclear)]
    groups = {"passing": passing, "failing": failing, "unclear": unclear}
    return {title: [result.names[host] for host in hosts] for title, hosts in groups.items()}


def to_json(result: HealthResult) -> dict[str, Any]:
    """Return the result for programs."""
    last, judgement = result.passes[-1], result.judgement
    return {
        **sort_hosts(result),
        "undecided": list_undecided(result),
        "seconds": round(result.seconds, 1),
        "passes": len(result.passes),
        "findings": [
            {
                "host": result.names[finding.host],
                "check": finding.check,
                "device": finding.device,
                "severity": finding.severity.value,
                "text": finding.text,
            }
            for finding in judgement.findings
        ],
        "comparisons": [
            {
                "check": group.check,
                "product": group.product,
                "unit": group.unit,
                "hosts": [result.names[host] for host in sorted(group.hosts)],
                **vars(group.comparison),
                "decidable": group.comparison.is_decidable,
            }
            for group in judgement.groups
        ],
        "hosts": [
            {"host": result.names[host], **_host_json(result, host)} for host in sorted(last.hosts)
        ],
    }


def _host_json(result: HealthResult, host: int) -> dict[str, Any]:
    measurement = result.passes[-1].hosts[host]
    return {
        "devices": [
            {
                "device": device.label,
                "product": device.product,
                "machine": device.machine,
                "problem": device.problem,
                "rates": {
                    rate.name: {"value": rate.value, "unit": rate.unit} for rate in device.rates
                },
                "state": None
                if device.reading is None
                else {
                    name: dict(value) if isinstance(value, dict) else value
                    for name, value in vars(device.reading).items()
                },
            }
            for device in measurement.devices
        ],
        "pairs": [
            {
                "partner": result.names[pair.partner],
                "gb_per_second": list(pair.rates),
                "problem": pair.problem,
            }
            for pair in measurement.pairs
        ],
    }
