"""``flagscale bench traffic``: generates background traffic between hosts.

Bursts are calibrated to a requested tail, the ratio p99/p50 of the times of a probe, which is
measured while they are played.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console

from flagscale.bench.machine import describe_machine
from flagscale.bench.traffic.calibration import HELD_REACH, Calibration, calibrate
from flagscale.bench.traffic.environment import write_environment
from flagscale.bench.traffic.options import TrafficPlan, parse_command
from flagscale.bench.traffic.session import MOST_SECONDS, FlowRate, Traffic, play
from flagscale.bench.traffic.spec import (
    Environment,
    ProbeResult,
    flow_names,
    format_bytes,
    format_rate,
)
from flagscale.bench.traffic.steering import Steering
from flagscale.bench.traffic.summary import summarize
from flagscale.bench.traffic.view import TrafficView, result_table
from flagscale.files import format_json, to_plain, write_atomic
from flagscale.hosts.workers.children import unwind_on_signal

MISSED = 1
"""Exit code if the requested tail was not reached."""
_STARTUP_SECONDS = 120.0
_MEASURE_SECONDS = 30.0
_LEAST_MEASURE_SECONDS = 2.0
"""Shortest measurement in seconds that supports a 99th percentile."""
_RATE_SAMPLES = 100
_POOL = 4000
"""Latest samples used to decide whether the tail has left its target."""
_MOST_KEPT = 100_000
_MODE = 0o644


def main(words: Sequence[str], prog: str = "flagscale bench traffic") -> int:
    """Run a command line and return the exit code.

    Raises:
        FlagscaleError: the line is wrong, or a host cannot be reached or is lost.
    """
    plan = parse_command(words, prog)
    for note in plan.notes:
        print(f"note: {note}", file=sys.stderr)
    with unwind_on_signal():
        return _TrafficRun(plan).run()


class _TrafficRun:
    """One session from its start to its result."""

    def __init__(self, plan: TrafficPlan) -> None:
        self._plan = plan
        self._checks: list[tuple[float, ProbeResult]] = []
        self._pool: list[float] = []
        self._all: list[float] = []
        self._corrections = 0
        self._calibration: Calibration | None = None
        self._steering: Steering | None = None

    def run(self) -> int:
        plan = self._plan
        calibrating = plan.within if plan.tail is not None else 0.0
        with play(
            plan.environment,
            seconds=min(MOST_SECONDS, plan.seconds + calibrating + _STARTUP_SECONDS),
            paused=True,
            ssh_config=plan.ssh_config,
            interface=plan.interface,
            port=plan.port,
        ) as traffic:
            complete = False
            try:
                with TrafficView(traffic, plain=plan.plain) as view:
                    self._play(traffic, view)
                complete = True
                rates = traffic.rates()
            finally:
                self._write_files(traffic, complete)
        self._print_summary(traffic.environment, rates)
        missed = self._calibration is not None and self._calibration.why
        if missed:
            print(f"error: --tail {plan.tail:g}: {missed}", file=sys.stderr)
        return MISSED if missed else 0

    def _play(self, traffic: Traffic, view: TrafficView) -> None:
        plan, environment = self._plan, traffic.environment
        view.print_line(
            f"{', '.join(flow_names(environment)[:8])}{' …' if environment.flows[8:] else ''}"
        )
        if plan.measure_rate:
            self._measure_rate(traffic, view)
        if plan.tail is not None:
            tolerance = environment.tolerance
            self._calibration = calibrate(traffic, plan.tail, tolerance, plan.within, view)
            if self._calibration.why:
                view.print_line(f"--tail {plan.tail:g}: {self._calibration.why}")
            if plan.keep is not None:
                write_environment(_with_date(traffic.environment), plan.keep)
            burst = traffic.environment.pattern.burst
            self._steering = Steering(plan.tail, burst)
        view.on_phase("playing")
        traffic.resume()
        begin = time.monotonic()
        following = 0.0
        while (now := time.monotonic() - begin) < plan.seconds:
            if now >= following and plan.probe_every < float("inf"):
                self._measure_tail(traffic, view, begin)
                following = max(following + plan.probe_every, time.monotonic() - begin)
                continue
            until = min(
                following if plan.probe_every < float("inf") else plan.seconds, plan.seconds
            )
            time.sleep(max(0.0, min(0.5, until - now)))
            traffic.check()
            view.on_samples()

    def _measure_rate(self, traffic: Traffic, view: TrafficView) -> None:
        """Measure the path's rate by the probe while traffic is paused."""
        view.on_phase("the path's rate, by the probe")
        traffic.pause()
        result = summarize(traffic.sample(_RATE_SAMPLES, _MEASURE_SECONDS, view.on_samples))
        probe, count = traffic.environment.probe, len(traffic.environment.hosts)
        ring = 2 * (count - 1) / count
        rate = 8 * probe.size * (ring if probe.kind == "ring" else 2) / result.median
        pattern = traffic.environment.pattern
        share = pattern.load / pattern.rate
        traffic.change(replace(pattern, rate=rate, load=share * rate))
        traffic.resume()
        view.print_line(f"the path: {format_rate(rate)} by the probe; {share:.0%} of it a flow")

    def _measure_tail(self, traffic: Traffic, view: TrafficView, begin: float) -> None:
        """Measure the tail. If it has left the target with certainty, correct the burst size."""
        plan = self._plan
        remaining = begin + plan.seconds - time.monotonic()
        if self._checks and remaining < _LEAST_MEASURE_SECONDS:
            return
        times = traffic.sample(
            plan.probe_samples,
            min(_MEASURE_SECONDS, max(_LEAST_MEASURE_SECONDS, remaining)),
            view.on_samples,
        )
        elapsed, result = time.monotonic() - begin, summarize(times)
        self._checks.append((elapsed, result))
        self._all = [*self._all, *times][-_MOST_KEPT:]
        view.print_line(
            f"{elapsed:5.0f} s  {traffic.environment.probe.label}: p99/p50 {result.label}"
        )
        environment = traffic.environment
        reached = self._calibration is not None and not self._calibration.why
        if not reached or self._steering is None or environment.target is None:
            return
        self._pool = [*self._pool, *times][-_POOL:]
        pooled = summarize(self._pool)
        low, high = environment.target - environment.tolerance, environment.target
        high += environment.tolerance
        if pooled.low > high or pooled.high < low:
            burst = environment.pattern.burst
            corrected = self._steering.record_window(
                burst, pooled.ratio, pooled.samples, HELD_REACH
            )
            traffic.change(replace(environment.pattern, burst=corrected))
            view.print_line(
                f"       it has left {environment.target:g}: bursts of {format_bytes(corrected)}"
            )
            self._pool, self._corrections = [], self._corrections + 1

    def _write_files(self, traffic: Traffic, complete: bool) -> None:
        """Write the requested files, also after a failure."""
        plan = self._plan
        if plan.keep is not None and plan.tail is None:
            result = self._checks[-1][1] if self._checks else None
            write_environment(_with_date(replace(traffic.environment, found=result)), plan.keep)
        if plan.result is not None:
            text = format_json(self._record(traffic, complete))
            write_atomic(plan.result, text, _MODE, durable=False)

    def _record(self, traffic: Traffic, complete: bool) -> dict[str, Any]:
        hosts = traffic.environment.hosts
        flows = [
            {
                "from": hosts[rate.flow.source].name,
                "to": hosts[rate.flow.target].name,
                "sent_bytes": rate.sent,
                "received_bytes": rate.received,
            }
            for rate in traffic.rates()
        ]
        calibration = self._calibration
        return {
            **describe_machine("flagscale", "numpy"),
            "complete": complete,
            "environment": to_plain(_with_date(traffic.environment)),
            "calibration": None
            if calibration is None
            else {
                "target": traffic.environment.target,
                "reached": not calibration.why,
                "why": calibration.why,
                "seconds": round(calibration.seconds, 1),
                "windows": calibration.windows,
                "found": to_plain(calibration.environment.found),
                "burst": calibration.environment.pattern.burst,
            },
            "corrections": self._corrections,
            "late_seconds": round(traffic.late, 3),
            "held": to_plain(summarize(self._all)) if self._all else None,
            "checks": [{"at": round(at, 1), **to_plain(result)} for at, result in self._checks],
            "flows": flows,
        }

    def _print_summary(self, environment: Environment, rates: Sequence[FlowRate]) -> None:
        pattern, probe = environment.pattern, environment.probe
        console = Console(highlight=False)
        pattern_text = (
            f"{len(environment.flows)} {pattern.transport} flows of {format_rate(pattern.load)}"
        )
        console.print(
            f"{pattern_text}, bursts of {format_bytes(pattern.burst)}; probe: {probe.label}"
        )
        sent, received = (sum(getattr(r, n) for r in rates) for n in ("sent", "received"))
        console.print(f"sent {format_bytes(sent)}, received {format_bytes(received)}")
        table = result_table(environment, self._checks, summarize(self._all) if self._all else None)
        if table.row_count:
            console.print(table)


def _with_date(environment: Environment) -> Environment:
    return replace(environment, date=time.strftime("%Y-%m-%d"))
