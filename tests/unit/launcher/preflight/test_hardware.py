"""Tests of the hardware checks of a run: hosts that are left alone, and rows of equal results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from flagscale.accelerators.health import Rate
from flagscale.config.schema import Experiment, Runner
from flagscale.health.judgement import judge_passes
from flagscale.health.measurements import HostMeasurement, Measurements
from flagscale.health.messages import DeviceMeasurement
from flagscale.health.session import HealthResult
from flagscale.hosts.connection import Endpoint
from flagscale.hosts.facts import HostFacts
from flagscale.hosts.fan_out import Hosts
from flagscale.hosts.hostfile import Host
from flagscale.hosts.python_environment import PythonEnvironment
from flagscale.launcher.planning.per_host import resolve_all_settings
from flagscale.launcher.preflight.checks import Check
from flagscale.launcher.preflight.hardware import check_hardware, make_checks
from flagscale.launcher.preflight.host_probe import HostReplies

PYTHON = PythonEnvironment("3.11.7", "/opt/python", {"torch": "2.13.0"}, code="ours")
FACTS = HostFacts(8, {}, "eth0", "b", 0.0, python=PYTHON, has_project=True)


@pytest.mark.parametrize(
    ("facts", "runner", "reason"),
    [
        pytest.param(
            replace(FACTS, live_run_id="20261127-1"),
            {},
            "run 20261127-1 is alive there",
            id="live run",
        ),
        pytest.param(replace(FACTS, python=None), {}, "its Python did not answer", id="no Python"),
        pytest.param(
            replace(FACTS, python=replace(PYTHON, packages={})),
            {},
            "its Python has no torch",
            id="no torch",
        ),
        pytest.param(
            replace(FACTS, python=replace(PYTHON, code="another")),
            {"no_shared_fs": True, "sync": "code"},
            "the code is copied when the run starts, and the hardware is checked after that",
            id="other code",
        ),
    ],
)
def test_host_that_is_left_alone(
    make_experiment: Callable[..., Experiment],
    facts: HostFacts,
    runner: dict[str, object],
    reason: str,
) -> None:
    """A connection to this host would fail the test."""
    hosts = (Host("n1", 1), Host("n2", 1))
    experiment = make_experiment(runner=Runner(health="quick", **runner))  # type: ignore[arg-type]
    replies = HostReplies(
        hosts,
        resolve_all_settings(experiment, hosts),
        facts=dict.fromkeys(range(2), facts),
        code_digest="ours",
    )
    connections = Hosts([Endpoint(host.name, "unknown") for host in hosts], {})
    checks = check_hardware(experiment, replies, connections)
    text = f"not measured: {reason}"
    assert checks == [Check("hardware", True, text, warning=True, hosts="n[1-2]")]


def test_equal_results_share_a_row() -> None:
    rates = {0: 100.0, 1: 101.0, 2: 70.0, 3: 100.0, 4: 99.0}
    hosts = {
        host: HostMeasurement(
            (DeviceMeasurement("GPU 0", "H200", rates=(Rate("memory", rate, "GB/s"),)),)
        )
        for host, rate in rates.items()
    }
    measurements = Measurements(hosts)
    judgement = judge_passes([measurements] * 2)
    names = tuple(f"n{host}" for host in hosts)
    checks = make_checks(HealthResult(names, (measurements,) * 2, judgement, 9.0))
    assert [(check.hosts, check.ok) for check in checks] == [("n[0-1,3-4]", True), ("n2", False)]
    assert checks[1].hint == "leave the host out, or have it repaired"
