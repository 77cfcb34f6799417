"""``flagscale bench traffic``: find the bursts, play them, look at the tail beside them."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console

from flagscale.bench.machine import facts
from flagscale.bench.spawn import interruptible
from flagscale.bench.traffic.calibration import HELD_REACH, Calibration, calibrate
from flagscale.bench.traffic.environment import write
from flagscale.bench.traffic.options import Plan, parse
from flagscale.bench.traffic.session import MOST_SECONDS, Rate, Traffic, play
from flagscale.bench.traffic.spec import Environment, Found, binary, bits, names
from flagscale.bench.traffic.statistics import found
from flagscale.bench.traffic.steering import Steering
from flagscale.bench.traffic.view import View, looks
from flagscale.files import json_text, plain, write_atomic

MISSED = 1
"""The exit code where a tail was asked for and not reached."""
_STARTING = 120.0
_LOOK_SECONDS = 30.0
_LEAST_LOOK = 2.0
"""Seconds. Shorter ones tell nothing of a 99th percentile."""
_RATE_SAMPLES = 100
_POOL = 4000
"""Of the last looks' samples: what is asked whether the tail has been left."""
_MOST_KEPT = 100_000
_MODE = 0o644


def main(words: Sequence[str], prog: str = "flagscale bench traffic") -> int:
    """Run a command line; the exit code.

    Raises:
        FlagscaleError: it is wrong, or a host cannot be reached or is lost.
    """
    plan = parse(words, prog)
    for note in plan.notes:
        print(f"note: {note}", file=sys.stderr)
    with interruptible():
        return _Run(plan).run()


class _Run:
    """One session from its start to its result."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._checks: list[tuple[float, Found]] = []
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
            seconds=min(MOST_SECONDS, plan.seconds + calibrating + _STARTING),
            paused=True,
            ssh_config=plan.ssh_config,
            interface=plan.interface,
            port=plan.port,
        ) as traffic:
            complete = False
            try:
                with View(traffic, plain=plan.plain) as view:
                    self._play(traffic, view)
                complete = True
                rates = traffic.rates()
            finally:
                self._keep(traffic, complete)
        self._tell(traffic.environment, rates)
        missed = self._calibration is not None and self._calibration.why
        if missed:
            print(f"error: --tail {plan.tail:g}: {missed}", file=sys.stderr)
        return MISSED if missed else 0

    def _play(self, traffic: Traffic, view: View) -> None:
        plan, environment = self._plan, traffic.environment
        view.line(f"{', '.join(names(environment)[:8])}{' …' if environment.flows[8:] else ''}")
        if plan.measure_rate:
            self._measure_rate(traffic, view)
        if plan.tail is not None:
            tolerance = environment.tolerance
            self._calibration = calibrate(traffic, plan.tail, tolerance, plan.within, view)
            if self._calibration.why:
                view.line(f"--tail {plan.tail:g}: {self._calibration.why}")
            if plan.keep is not None:
                write(_dated(traffic.environment), plan.keep)
            burst = traffic.environment.pattern.burst
            self._steering = Steering(plan.tail, burst)
        view.phase("playing")
        traffic.resume()
        begin = time.monotonic()
        following = 0.0
        while (now := time.monotonic() - begin) < plan.seconds:
            if now >= following and plan.probe_every < float("inf"):
                self._look(traffic, view, begin)
                following = max(following + plan.probe_every, time.monotonic() - begin)
                continue
            until = min(
                following if plan.probe_every < float("inf") else plan.seconds, plan.seconds
            )
            time.sleep(max(0.0, min(0.5, until - now)))
            traffic.check()
            view.watch()

    def _measure_rate(self, traffic: Traffic, view: View) -> None:
        """Take the path's rate for what the probe moves without traffic."""
        view.phase("the path's rate, by the probe")
        traffic.pause()
        seen = found(traffic.sample(_RATE_SAMPLES, _LOOK_SECONDS, view.watch))
        probe, count = traffic.environment.probe, len(traffic.environment.hosts)
        ring = 2 * (count - 1) / count
        rate = 8 * probe.size * (ring if probe.kind == "ring" else 2) / seen.median
        pattern = traffic.environment.pattern
        share = pattern.load / pattern.rate
        traffic.change(replace(pattern, rate=rate, load=share * rate))
        traffic.resume()
        view.line(f"the path: {bits(rate)} by the probe; {share:.0%} of it a flow")

    def _look(self, traffic: Traffic, view: View, begin: float) -> None:
        """One look at the tail; where it has left the target for sure, the bursts are corrected."""
        plan = self._plan
        left = begin + plan.seconds - time.monotonic()
        if self._checks and left < _LEAST_LOOK:
            return
        times = traffic.sample(
            plan.probe_samples, min(_LOOK_SECONDS, max(_LEAST_LOOK, left)), view.watch
        )
        at, seen = time.monotonic() - begin, found(times)
        self._checks.append((at, seen))
        self._all = [*self._all, *times][-_MOST_KEPT:]
        view.line(f"{at:5.0f} s  {traffic.environment.probe.words}: p99/p50 {seen.words}")
        environment = traffic.environment
        reached = self._calibration is not None and not self._calibration.why
        if not reached or self._steering is None or environment.target is None:
            return
        self._pool = [*self._pool, *times][-_POOL:]
        pooled = found(self._pool)
        low, high = environment.target - environment.tolerance, environment.target
        high += environment.tolerance
        if pooled.low > high or pooled.high < low:
            burst = environment.pattern.burst
            other = self._steering.learn(burst, pooled.ratio, pooled.samples, HELD_REACH)
            traffic.change(replace(environment.pattern, burst=other))
            view.line(f"       it has left {environment.target:g}: bursts of {binary(other)}")
            self._pool, self._corrections = [], self._corrections + 1

    def _keep(self, traffic: Traffic, complete: bool) -> None:
        """Write the files that were asked for, whatever has happened."""
        plan = self._plan
        if plan.keep is not None and plan.tail is None:
            seen = self._checks[-1][1] if self._checks else None
            write(_dated(replace(traffic.environment, found=seen)), plan.keep)
        if plan.result is not None:
            text = json_text(self._record(traffic, complete))
            write_atomic(plan.result, text, _MODE, durable=False)

    def _record(self, traffic: Traffic, complete: bool) -> dict[str, Any]:
        hosts = traffic.environment.hosts
        flows = [
            {
                "from": hosts[one.flow.source].name,
                "to": hosts[one.flow.target].name,
                "sent_bytes": one.sent,
                "received_bytes": one.received,
            }
            for one in traffic.rates()
        ]
        calibration = self._calibration
        return {
            **facts("flagscale", "numpy"),
            "complete": complete,
            "environment": plain(_dated(traffic.environment)),
            "calibration": None
            if calibration is None
            else {
                "target": traffic.environment.target,
                "reached": not calibration.why,
                "why": calibration.why,
                "seconds": round(calibration.seconds, 1),
                "windows": calibration.windows,
                "found": plain(calibration.environment.found),
                "burst": calibration.environment.pattern.burst,
            },
            "corrections": self._corrections,
            "late_seconds": round(traffic.late, 3),
            "held": plain(found(self._all)) if self._all else None,
            "checks": [{"at": round(at, 1), **plain(seen)} for at, seen in self._checks],
            "flows": flows,
        }

    def _tell(self, environment: Environment, rates: Sequence[Rate]) -> None:
        pattern, probe = environment.pattern, environment.probe
        console = Console(highlight=False)
        what = f"{len(environment.flows)} {pattern.transport} flows of {bits(pattern.load)}"
        console.print(f"{what}, bursts of {binary(pattern.burst)}; probe: {probe.words}")
        sent, received = (sum(getattr(r, n) for r in rates) for n in ("sent", "received"))
        console.print(f"sent {binary(sent)}, received {binary(received)}")
        table = looks(environment, self._checks, found(self._all) if self._all else None)
        if table.row_count:
            console.print(table)


def _dated(environment: Environment) -> Environment:
    return replace(environment, date=time.strftime("%Y-%m-%d"))
