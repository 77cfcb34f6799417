"""``flagscale bench traffic``: generates background traffic between hosts.

With ``--tail`` the size of the bursts is calibrated to a requested tail ratio: p99/p50 of the
times of a probe, a small all_reduce or echo between the same hosts. The tail ratio is measured
again at intervals while the traffic is sent, and the size is corrected if the ratio has left its
target. Called by :mod:`flagscale.bench.cli`.

An :class:`.spec.Environment` describes the traffic: hosts, flows, their pattern, and the probe. To
*play* it is to send the traffic. The environment can be stored in a file and played again.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console

from flagscale.bench.machine import describe_machine
from flagscale.bench.traffic.calibration import MAX_HOLD_STEP, Calibration, calibrate
from flagscale.bench.traffic.environment import write_environment
from flagscale.bench.traffic.options import TrafficPlan, parse_command
from flagscale.bench.traffic.session import MAX_SESSION_SECONDS, FlowRate, Traffic, play
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

EXIT_MISSED = 1
"""Exit code if the requested tail ratio was not reached."""
_STARTUP_SECONDS = 120.0
_MAX_MEASURE_SECONDS = 30.0
_MIN_MEASURE_SECONDS = 2.0
"""Shortest measurement that supports a 99th percentile."""
_RATE_SAMPLES = 100
_DRIFT_SAMPLES = 4000
"""Number of latest samples used to decide whether the tail ratio has left its target."""
_MAX_SAMPLES = 100_000
"""Number of latest samples summarized at the end."""
_FILE_MODE = 0o644


def main(words: Sequence[str], prog: str = "flagscale bench traffic") -> int:
    """Run a command line and return the exit code.

    Raises:
        FlagscaleError: the command line is wrong, or a host cannot be reached or is lost.
    """
    plan = parse_command(words, prog)
    for note in plan.notes:
        print(f"note: {note}", file=sys.stderr)
    with unwind_on_signal():
        return _TrafficRun(plan).run()


class _TrafficRun:
    """One traffic session from its start to its result."""

    def __init__(self, plan: TrafficPlan) -> None:
        self._plan = plan
        self._checks: list[tuple[float, ProbeResult]] = []
        """Measurements of the tail, each with its time in seconds since the traffic began."""
        self._samples: list[float] = []
        """Times of the probe in seconds, from all measurements."""
        self._samples_since_correction: list[float] = []
        self._corrections = 0
        """Number of changes of the burst size after calibration."""
        self._calibration: Calibration | None = None
        self._steering: Steering | None = None

    def run(self) -> int:
        plan = self._plan
        calibration_seconds = plan.calibration_limit_seconds if plan.tail is not None else 0.0
        with play(
            plan.environment,
            seconds=min(MAX_SESSION_SECONDS, plan.seconds + calibration_seconds + _STARTUP_SECONDS),
            paused=True,
            ssh_config=plan.ssh_config,
            interface=plan.interface,
            port=plan.port,
        ) as traffic:
            complete = False
            try:
                with TrafficView(traffic, plain_output=plan.plain_output) as view:
                    self._play(traffic, view)
                complete = True
                rates = traffic.rates()
            finally:
                self._write_files(traffic, complete)
        self._print_summary(traffic.environment, rates)
        miss_reason = self._calibration.miss_reason if self._calibration is not None else ""
        if miss_reason:
            print(f"error: --tail {plan.tail:g}: {miss_reason}", file=sys.stderr)
        return EXIT_MISSED if miss_reason else 0

    def _play(self, traffic: Traffic, view: TrafficView) -> None:
        plan, environment = self._plan, traffic.environment
        view.print_line(
            f"{', '.join(flow_names(environment)[:8])}{' …' if environment.flows[8:] else ''}"
        )
        if plan.measure_rate:
            self._measure_rate(traffic, view)
        if plan.tail is not None:
            tolerance = environment.tolerance
            self._calibration = calibrate(
                traffic, plan.tail, tolerance, plan.calibration_limit_seconds, view
            )
            if self._calibration.miss_reason:
                view.print_line(f"--tail {plan.tail:g}: {self._calibration.miss_reason}")
            if plan.environment_output is not None:
                write_environment(_with_date(traffic.environment), plan.environment_output)
            burst = traffic.environment.pattern.burst
            self._steering = Steering(plan.tail, burst)
        view.on_phase("playing")
        traffic.resume()
        begin = time.monotonic()
        # Times in seconds since ``begin``.
        next_probe_time = 0.0
        while (now := time.monotonic() - begin) < plan.seconds:
            if now >= next_probe_time and plan.probe_interval_seconds < float("inf"):
                self._measure_tail(traffic, view, begin)
                next_probe_time = max(
                    next_probe_time + plan.probe_interval_seconds, time.monotonic() - begin
                )
                continue
            wake_time = min(
                next_probe_time if plan.probe_interval_seconds < float("inf") else plan.seconds,
                plan.seconds,
            )
            time.sleep(max(0.0, min(0.5, wake_time - now)))
            traffic.check()
            view.on_samples()

    def _measure_rate(self, traffic: Traffic, view: TrafficView) -> None:
        """Measure the path's rate with the probe while traffic is paused. The load of a flow keeps
        its share of the rate.
        """
        view.on_phase("the path's rate, by the probe")
        traffic.pause()
        result = summarize(traffic.sample(_RATE_SAMPLES, _MAX_MEASURE_SECONDS, view.on_samples))
        probe, host_count = traffic.environment.probe, len(traffic.environment.hosts)
        # Bytes that cross a link, as a multiple of the probe's size: of a ring all_reduce, or of
        # an echo there and back.
        traffic_factor = 2 * (host_count - 1) / host_count if probe.kind == "ring" else 2
        rate = 8 * probe.size * traffic_factor / result.median
        pattern = traffic.environment.pattern
        load_fraction = pattern.load / pattern.rate
        traffic.change(replace(pattern, rate=rate, load=load_fraction * rate))
        traffic.resume()
        view.print_line(
            f"the path: {format_rate(rate)} by the probe; {load_fraction:.0%} of it a flow"
        )

    def _measure_tail(self, traffic: Traffic, view: TrafficView, begin: float) -> None:
        """Measure the tail ratio. If the 95 % interval of the latest samples is outside the
        target ± tolerance, correct the burst size.
        """
        plan = self._plan
        remaining = begin + plan.seconds - time.monotonic()
        if self._checks and remaining < _MIN_MEASURE_SECONDS:
            return
        times = traffic.sample(
            plan.probe_samples,
            min(_MAX_MEASURE_SECONDS, max(_MIN_MEASURE_SECONDS, remaining)),
            view.on_samples,
        )
        elapsed, result = time.monotonic() - begin, summarize(times)
        self._checks.append((elapsed, result))
        self._samples = [*self._samples, *times][-_MAX_SAMPLES:]
        view.print_line(
            f"{elapsed:5.0f} s  {traffic.environment.probe.label}: p99/p50 {result.label}"
        )
        environment = traffic.environment
        reached = self._calibration is not None and not self._calibration.miss_reason
        if not reached or self._steering is None or environment.target is None:
            return
        samples = [*self._samples_since_correction, *times][-_DRIFT_SAMPLES:]
        self._samples_since_correction = samples
        result = summarize(samples)
        low = environment.target - environment.tolerance
        high = environment.target + environment.tolerance
        if result.low > high or result.high < low:
            burst = self._steering.record_window(
                environment.pattern.burst, result.ratio, result.samples, MAX_HOLD_STEP
            )
            traffic.change(replace(environment.pattern, burst=burst))
            view.print_line(
                f"       it has left {environment.target:g}: bursts of {format_bytes(burst)}"
            )
            self._samples_since_correction, self._corrections = [], self._corrections + 1

    def _write_files(self, traffic: Traffic, complete: bool) -> None:
        """Write the requested files, also after a failure."""
        plan = self._plan
        if plan.environment_output is not None and plan.tail is None:
            result = self._checks[-1][1] if self._checks else None
            environment = _with_date(replace(traffic.environment, found=result))
            write_environment(environment, plan.environment_output)
        if plan.json_output is not None:
            text = format_json(self._to_record(traffic, complete))
            write_atomic(plan.json_output, text, _FILE_MODE, durable=False)

    def _to_record(self, traffic: Traffic, complete: bool) -> dict[str, Any]:
        """Return the content of the ``--json`` file."""
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
                "reached": not calibration.miss_reason,
                "why": calibration.miss_reason,
                "seconds": round(calibration.seconds, 1),
                "windows": calibration.windows,
                "found": to_plain(calibration.environment.found),
                "burst": calibration.environment.pattern.burst,
            },
            "corrections": self._corrections,
            # Seconds of bursts that were dropped, because the path is too slow for the load.
            "late_seconds": round(traffic.dropped_seconds, 3),
            # Over all measurements after calibration: how well the ratio was held at its target.
            "held": to_plain(summarize(self._samples)) if self._samples else None,
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
        all_samples = summarize(self._samples) if self._samples else None
        table = result_table(environment, self._checks, all_samples)
        if table.row_count:
            console.print(table)


def _with_date(environment: Environment) -> Environment:
    return replace(environment, date=time.strftime("%Y-%m-%d"))
