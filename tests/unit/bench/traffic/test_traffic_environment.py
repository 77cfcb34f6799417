"""Tests of environment files: round trip, default values, and errors that name the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flagscale.bench.traffic.environment import read_environment, write_environment
from flagscale.bench.traffic.spec import (
    DISTRIBUTIONS,
    FLOW_LAYOUTS,
    LARGEST_BURST,
    PROBE_KINDS,
    SMALLEST_BURST,
    Environment,
    Flow,
    FlowLayout,
    Pattern,
    Probe,
    ProbeResult,
    TrafficHost,
    default_tolerance,
    flows_between,
)
from flagscale.errors import ConfigError

HOSTS = (TrafficHost("a", "10.0.0.1"), TrafficHost("b", "10.0.0.2", via="netns"))
PATTERN = Pattern(1e9, 6e7, 65536.0)
ENVIRONMENT = Environment(HOSTS, flows_between(2, "pairs"), PATTERN)

texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)
probe_results = st.builds(ProbeResult, st.integers(1, 10**6), *[st.floats(1e-6, 1e3)] * 5)
rates = st.floats(1e5, 1e11)


@st.composite
def environments(draw: st.DrawFn) -> Environment:
    names = draw(st.lists(texts, min_size=2, max_size=5, unique=True))
    hosts = tuple(
        TrafficHost(name, draw(texts), draw(st.none() | texts), user=draw(st.none() | texts))
        for name in names
    )
    rate = draw(rates)
    pattern = Pattern(
        rate=rate,
        load=rate * draw(st.floats(0.01, 0.99 / len(hosts))),
        burst=draw(st.floats(SMALLEST_BURST, LARGEST_BURST)),
        transport=draw(st.sampled_from(("tcp", "udp"))),
        bursts=draw(st.sampled_from(DISTRIBUTIONS)),
        gaps=draw(st.sampled_from(DISTRIBUTIONS)),
        peak=draw(st.none() | st.just(rate)),
        seed=draw(st.integers(-(1 << 60), 1 << 60)),
    )
    return Environment(
        hosts,
        flows_between(len(hosts), draw(st.sampled_from(FLOW_LAYOUTS))),
        pattern,
        Probe(draw(st.sampled_from(PROBE_KINDS)), draw(st.integers(64, 1 << 30))),
        target=draw(st.none() | st.floats(1.01, 50)),
        tolerance=draw(st.floats(0, 5)),
        found=draw(st.none() | probe_results),
        idle=draw(st.none() | probe_results),
        congestion=tuple((host.name, draw(texts)) for host in hosts),
        date=draw(texts),
    )


@given(environments())
def test_environment_file_round_trip(tmp_path_factory: Any, environment: Environment) -> None:
    path = tmp_path_factory.mktemp("kept") / "environment.json"
    write_environment(environment, path)
    assert read_environment(path) == environment


def test_fields_with_defaults_are_optional(tmp_path: Path) -> None:
    path = tmp_path / "short.json"
    record = {
        "flagscale_traffic": 1,
        "hosts": [{"name": "a", "addr": "10.0.0.1"}, {"name": "b", "addr": "10.0.0.2"}],
        "flows": [{"source": 0, "target": 1}],
        "pattern": {"rate": 1e9, "load": 6e7, "burst": 65536},
    }
    path.write_text(json.dumps(record), encoding="utf-8")
    environment = read_environment(path)
    assert (environment.flows, environment.pattern, environment.probe) == (
        (Flow(0, 1),),
        PATTERN,
        Probe(),
    )


def _set_field(key: str, value: Any) -> Any:
    def change(record: dict[str, Any]) -> None:
        *path, last = key.split(".")
        for word in path:
            record = record[int(word) if word.isdigit() else word]
        record[last] = value

    return change


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("flagscale_traffic", 2, "flagscale_traffic: found 2, expected 1"),
        ("pattern.load", 2e9, "load: 2 Gbit/s a flow on a path of 1 Gbit/s"),
        ("pattern.load", 0, "load: 0 bit/s a flow"),
        ("pattern.burst", 1 << 40, "burst: 1024 GiB, expected 1 KiB to 64 MiB"),
        ("pattern.bursts", "gauss", "pattern: "),
        ("pattern.peak", 1.0, "peak: 1 bit/s is below the load"),
        (
            "flows",
            [{"source": 0, "target": 1}] * 17,
            "a would send 1.02 Gbit/s by 17 flows on a path",
        ),
        ("flows", [{"source": 0, "target": 2}], "flows: number 0 has a host beyond the 2"),
        ("flows", [{"source": 1, "target": 1}], "flows: number 0 goes from a host to itself"),
        ("hosts", [{"name": "a", "addr": "x"}], "hosts: 1 found, expected two or more"),
        ("hosts.1.name", "a", "hosts: a is named twice"),
        ("hosts.0.addr", 7, "hosts: "),
        ("probe.size", 1 << 40, "probe.size: "),
        ("probe.kind", "star", "probe: "),
    ],
)
def test_invalid_field_is_named(tmp_path: Path, key: str, value: Any, message: str) -> None:
    path = tmp_path / "wrong.json"
    write_environment(ENVIRONMENT, path)
    record = json.loads(path.read_text(encoding="utf-8"))
    _set_field(key, value)(record)
    path.write_text(json.dumps(record), encoding="utf-8")
    with pytest.raises(ConfigError) as error_info:
        read_environment(path)
    assert f"{path}: {message}" in error_info.value.message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("{", "is no JSON", id="cut-off"),
        pytest.param("[" * 100_000, "is no JSON", id="deep"),
        pytest.param("[]", "found 'list'", id="list"),
        pytest.param('{"flagscale_traffic": 1}', "hosts is missing", id="empty"),
        pytest.param("\xff", "is no JSON", id="binary"),
    ],
)
def test_invalid_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "none.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=message):
        read_environment(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_environment(tmp_path / "absent.json")


@pytest.mark.parametrize(
    ("count", "between", "expected"),
    [
        pytest.param(2, "pairs", "01 10", id="two"),
        pytest.param(4, "pairs", "01 10 23 32", id="pairs"),
        pytest.param(3, "pairs", "01 10 20 02", id="odd"),
        pytest.param(3, "ring", "01 12 20", id="ring"),
        pytest.param(3, "all", "01 02 10 12 20 21", id="all"),
    ],
)
def test_flow_layouts(count: int, between: FlowLayout, expected: str) -> None:
    flow_texts = [f"{flow.source}{flow.target}" for flow in flows_between(count, between)]
    assert " ".join(flow_texts) == expected


def test_flows_on_another_network_keep_the_probe() -> None:
    moved = ENVIRONMENT.on_network({"a": "10.9.0.1", "b": "10.9.0.2"})
    assert [host.flow_addr for host in moved.hosts] == ["10.9.0.1", "10.9.0.2"]
    assert [host.addr for host in moved.hosts] == ["10.0.0.1", "10.0.0.2"]


@pytest.mark.parametrize(("target", "tolerance"), [(1.5, 0.1), (3.0, 0.2)])
def test_the_tolerance_is_a_fifteenth(target: float, tolerance: float) -> None:
    assert default_tolerance(target) == tolerance
