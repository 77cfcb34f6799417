"""HTML page of a hardware check: which hosts pass, and every device compared with its equals."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from flagscale.health.judgement import EXCHANGE_UNIT, Group, Severity, describe_product
from flagscale.health.messages import DeviceMeasurement
from flagscale.health.names import format_rate
from flagscale.health.rows import list_rows, sort_hosts
from flagscale.health.session import HealthResult
from flagscale.hosts.names import compress_names
from flagscale.launcher.preflight.hardware import make_checks
from flagscale.report.frame import render_page
from flagscale.report.html import Cell, Html, definition_list, details, element, section, table
from flagscale.report.pages import write_text

_STATES = {True: ("ok", "good"), False: ("FAILS", "bad")}


def write_health_page(result: HealthResult, output: Path) -> Path:
    """Write the page to a private file, and return its path.

    Raises:
        OSError: it cannot be written.
    """
    return write_text(render_health(result), output)


def render_health(result: HealthResult) -> str:
    """Return the page."""
    number = len({row.host for row in list_rows(result)})
    note = f"{time.strftime('%Y-%m-%d %H:%M')}, {number} host(s), {result.seconds:.0f} s"
    note += f", measured {'twice' if len(result.passes) > 1 else 'once'}"
    parts = [_overview(result), section("Checks", _checks_table(result))]
    if result.judgement.groups:
        parts.append(section("Devices", *_rate_tables(result)))
    if pairs := list(_pair_rows(result)):
        headings = ("host", "with", f"{EXCHANGE_UNIT} by device", "failed")
        parts.append(section("Pairs of hosts", table(headings, pairs)))
    if readings := list(_reading_details(result)):
        parts.append(section("State of the devices", *readings))
    return render_page("Hardware check", *parts, note=note)


def _overview(result: HealthResult) -> Html:
    values: dict[str, object] = {
        title: compress_names(names) for title, names in sort_hosts(result).items()
    }
    if values["failing"]:
        values["failing"] = element("span", values["failing"], class_="bad")
    return element("article", element("h2", "Hosts"), definition_list(values), class_="card")


def _checks_table(result: HealthResult) -> Html:
    rows = []
    for check in make_checks(result):
        text, class_ = _STATES[check.ok]
        if check.ok and check.warning:
            text, class_ = "warning", "warn"
        rows.append([check.name, check.hosts, Cell(text, class_), check.found])
    return table(("check", "hosts", "result", "found"), rows)


def _rate_tables(result: HealthResult) -> Iterator[Html]:
    """Yield a table per kind of device: rates, and their difference from the median."""
    for product in dict.fromkeys(group.product for group in result.judgement.groups):
        groups = [group for group in result.judgement.groups if group.product == product]
        headings = ["host", "device"]
        headings += [f"{group.check} ({group.unit})" for group in groups]
        rows = [
            [
                result.names[host],
                device.label,
                *(_rate_cell(result, host, device, g) for g in groups),
            ]
            for host, measurement in sorted(result.passes[-1].hosts.items())
            for device in measurement.devices
            if describe_product(device) == product
        ]
        yield table(headings, rows, caption=product, align_numbers=True)


def _rate_cell(result: HealthResult, host: int, device: DeviceMeasurement, group: Group) -> object:
    value = next((rate.value for rate in device.rates if rate.name == group.check), None)
    if value is None:
        number = result.passes[-1].hosts[host].devices.index(device)
        pairs = result.passes[-1].hosts[host].pairs
        rates = [pair.rates[number] for pair in pairs if number < len(pair.rates)]
        value = max(rates, default=None)
    if value is None:
        return ""
    difference = value / group.comparison.median - 1
    is_sick = any(
        finding.severity is Severity.SICK
        and (finding.host, finding.check, finding.device) == (host, group.check, device.label)
        for finding in result.judgement.findings
    )
    text = f"{format_rate(value)} ({difference:+.1%})"
    return Cell(element("b", text), "bad") if is_sick else text


def _pair_rows(result: HealthResult) -> Iterator[list[object]]:
    for host, measurement in sorted(result.passes[-1].hosts.items()):
        for pair in measurement.pairs:
            if host < pair.partner or pair.problem:
                rates = ", ".join(map(format_rate, pair.rates))
                partner = result.names[pair.partner]
                yield [result.names[host], partner, rates, Cell(pair.problem, "bad")]


def _reading_details(result: HealthResult) -> Iterator[Html]:
    for host, measurement in sorted(result.passes[-1].hosts.items()):
        for device in measurement.devices:
            reading = device.reading
            if reading is None:
                continue
            values = {
                **reading.details,
                **{name: f"{value:g}" for name, value in reading.limits.items()},
            }
            texts = [*reading.faults.values(), *reading.warnings.values(), reading.unread]
            found = [element("p", text) for text in texts if text]
            title = f"{result.names[host]}: {device.label}"
            yield details(title, *found, definition_list(values), is_open=bool(reading.faults))
