"""Display of a traffic session: a live table on a terminal, else lines; and a table at its end.

A session is the time from the start of the flows to their end (:mod:`.session`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from flagscale.bench.traffic.session import FlowRate, Traffic
from flagscale.bench.traffic.spec import Environment, ProbeResult, format_bytes, format_rate
from flagscale.hosts.connection import Closeable

_SHOWN_FLOWS = 16
_LINE_SECONDS = 10.0
_MIN_PERCENTILE_SAMPLES = 20


class TrafficView(Closeable):
    """Progress display; a :class:`~.calibration.CalibrationListener`.

    Args:
        traffic: session to display.
        plain_output: print lines even on a terminal, instead of a live table.
    """

    def __init__(self, traffic: Traffic, *, plain_output: bool) -> None:
        self._traffic = traffic
        self._console = Console(highlight=False)
        self._phase, self._phase_begin, self._last_line = "", time.monotonic(), time.monotonic()
        self._samples: Sequence[float] = ()
        self._live: Live | None = None
        if self._console.is_terminal and not plain_output:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def on_phase(self, text: str) -> None:
        """Show that a phase begins, with its description."""
        if text != self._phase:
            self._phase, self._phase_begin, self._samples = text, time.monotonic(), ()
            if self._live is None:
                self.print_line(text)

    def print_line(self, text: str) -> None:
        """Print a line that stays visible."""
        self._console.print(Text(text), soft_wrap=True)

    def on_samples(self, samples: Sequence[float] | None = None) -> None:
        """Update the display. ``samples`` are the times of the current window in seconds; None
        leaves them unchanged.
        """
        if samples is not None:
            self._samples = samples
        if self._live is not None:
            self._live.update(self._render(), refresh=True)
        elif time.monotonic() - self._last_line > _LINE_SECONDS:
            self._last_line = time.monotonic()
            rates = self._traffic.rates()
            self.print_line(
                f"  {_total_rate(rates)} in {len(rates)} flows{_format_samples(self._samples)}"
            )

    def _render(self) -> Group:
        rates = self._traffic.rates()
        table = Table(box=box.SIMPLE_HEAD)
        for name in ("flow", "now", "received"):
            table.add_column(name, justify="left" if name == "flow" else "right")
        hosts = self._traffic.environment.hosts
        for rate in rates[:_SHOWN_FLOWS]:
            name = f"{hosts[rate.flow.source].name} → {hosts[rate.flow.target].name}"
            table.add_row(Text(name), format_rate(rate.rate), format_bytes(rate.received))
        if len(rates) > _SHOWN_FLOWS:
            table.add_row(f"and {len(rates) - _SHOWN_FLOWS} more", "", "")
        table.add_row("all", _total_rate(rates), format_bytes(sum(rate.received for rate in rates)))
        pattern = self._traffic.environment.pattern
        pattern_text = (
            f"bursts of {format_bytes(pattern.burst)}, {format_rate(pattern.load)} a flow"
        )
        seconds = f"{time.monotonic() - self._phase_begin:.0f} s"
        probe_text = f"{self._traffic.environment.probe.label}{_format_samples(self._samples)}"
        return Group(
            Text(f"{self._phase}, {seconds}", style="bold"),
            Text(pattern_text),
            table,
            Text(probe_text),
        )


def _total_rate(rates: Sequence[FlowRate]) -> str:
    return format_rate(sum(rate.rate for rate in rates))


def _format_samples(samples: Sequence[float]) -> str:
    """Format samples, such as ``: p50 12.7 ms, p99 21.2 ms, p99/p50 1.67 of 200``."""
    if len(samples) < _MIN_PERCENTILE_SAMPLES:
        return ""
    ordered = sorted(samples)
    median, p99 = (
        ordered[len(ordered) // 2],
        ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)],
    )
    ms = f"p50 {1e3 * median:.2f} ms, p99 {1e3 * p99:.2f} ms"
    return f": {ms}, p99/p50 {p99 / median:.2f} of {len(ordered)}"


def result_table(
    environment: Environment,
    checks: Sequence[tuple[float, ProbeResult]],
    all_samples: ProbeResult | None,
) -> Table:
    """Return the table that is printed at the end of a session.

    Its rows are the probe's results without traffic, at the end of the calibration, of each
    measurement in ``checks`` (seconds since the traffic began, result), and of all their samples.
    """
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("when")
    for name in ("samples", "p50 ms", "p99 ms", "p99/p50", "95 % interval"):
        table.add_column(name, justify="right")
    rows = [("without traffic", environment.idle), ("calibrated", environment.found)]
    rows += [(f"{at:.0f} s", result) for at, result in checks]
    if len(checks) > 1:
        rows.append(("all looks", all_samples))
    for when, result in rows:
        if result is not None:
            times = (f"{1e3 * result.median:.2f}", f"{1e3 * result.p99:.2f}")
            interval = f"{result.low:.2f} to {result.high:.2f}"
            table.add_row(when, str(result.samples), *times, f"{result.ratio:.2f}", interval)
    return table
