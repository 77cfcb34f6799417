"""What a user sees: a table that lives on a terminal, lines elsewhere; the table of the end."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from flagscale.bench.traffic.session import Rate, Traffic
from flagscale.bench.traffic.spec import Environment, Found, binary, bits
from flagscale.hosts.executor import Closing

_SHOWN_FLOWS = 16
_LINE_SECONDS = 10.0
_FEW = 20


class View(Closing):
    """Tells of a session; a :class:`~.calibration.Teller`."""

    def __init__(self, traffic: Traffic, *, plain: bool) -> None:
        self._traffic = traffic
        self._console = Console(highlight=False)
        self._phase, self._since, self._told = "", time.monotonic(), time.monotonic()
        self._samples: Sequence[float] = ()
        self._live: Live | None = None
        if self._console.is_terminal and not plain:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def phase(self, text: str) -> None:
        """What begins now."""
        if text != self._phase:
            self._phase, self._since, self._samples = text, time.monotonic(), ()
            if self._live is None:
                self.line(text)

    def line(self, text: str) -> None:
        """A line that stays."""
        self._console.print(Text(text), soft_wrap=True)

    def watch(self, samples: Sequence[float] | None = None) -> None:
        """Show how far it is; ``samples`` are the probe's seconds of now."""
        if samples is not None:
            self._samples = samples
        if self._live is not None:
            self._live.update(self._shown(), refresh=True)
        elif time.monotonic() - self._told > _LINE_SECONDS:
            self._told = time.monotonic()
            rates = self._traffic.rates()
            self.line(f"  {_total(rates)} in {len(rates)} flows{_felt(self._samples)}")

    def _shown(self) -> Group:
        rates = self._traffic.rates()
        table = Table(box=box.SIMPLE_HEAD)
        for name in ("flow", "now", "received"):
            table.add_column(name, justify="left" if name == "flow" else "right")
        hosts = self._traffic.environment.hosts
        for one in rates[:_SHOWN_FLOWS]:
            name = f"{hosts[one.flow.source].name} → {hosts[one.flow.target].name}"
            table.add_row(Text(name), bits(one.rate), binary(one.received))
        if len(rates) > _SHOWN_FLOWS:
            table.add_row(f"and {len(rates) - _SHOWN_FLOWS} more", "", "")
        table.add_row("all", _total(rates), binary(sum(one.received for one in rates)))
        pattern = self._traffic.environment.pattern
        what = f"bursts of {binary(pattern.burst)}, {bits(pattern.load)} a flow"
        seconds = f"{time.monotonic() - self._since:.0f} s"
        felt = f"{self._traffic.environment.probe.words}{_felt(self._samples)}"
        return Group(Text(f"{self._phase}, {seconds}", style="bold"), Text(what), table, Text(felt))


def _total(rates: Sequence[Rate]) -> str:
    return bits(sum(one.rate for one in rates))


def _felt(samples: Sequence[float]) -> str:
    """Such as ``: p50 12.7 ms, p99 21.2 ms, p99/p50 1.67 of 200``."""
    if len(samples) < _FEW:
        return ""
    ordered = sorted(samples)
    median, p99 = (
        ordered[len(ordered) // 2],
        ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)],
    )
    ms = f"p50 {1e3 * median:.2f} ms, p99 {1e3 * p99:.2f} ms"
    return f": {ms}, p99/p50 {p99 / median:.2f} of {len(ordered)}"


def looks(
    environment: Environment, checks: Sequence[tuple[float, Found]], held: Found | None
) -> Table:
    """The table of the end: what was found when, without traffic first, all looks last."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("when")
    for name in ("samples", "p50 ms", "p99 ms", "p99/p50", "95 % interval"):
        table.add_column(name, justify="right")
    rows = [("without traffic", environment.idle), ("calibrated", environment.found)]
    rows += [(f"{at:.0f} s", seen) for at, seen in checks]
    if len(checks) > 1:
        rows.append(("all looks", held))
    for when, seen in rows:
        if seen is not None:
            times = (f"{1e3 * seen.median:.2f}", f"{1e3 * seen.p99:.2f}")
            interval = f"{seen.low:.2f} to {seen.high:.2f}"
            table.add_row(when, str(seen.samples), *times, f"{seen.ratio:.2f}", interval)
    return table
