"""Tests of network settings from environment files of `flagscale bench traffic`."""

from __future__ import annotations

from pathlib import Path

import pytest

from flagscale.bench.traffic import environment
from flagscale.bench.traffic.spec import (
    Environment,
    Pattern,
    ProbeResult,
    TrafficHost,
    flows_between,
)
from flagscale.bench.training.results import SessionResult, TailRatio, TrainingSubject
from flagscale.bench.training.settings import read_settings
from flagscale.errors import ConfigError

pytestmark = pytest.mark.torch  # needs numpy, which is installed with torch


def _write_environment(path: Path, target: float | None, result: ProbeResult | None = None) -> Path:
    hosts = (TrafficHost("a", "10.0.0.1"), TrafficHost("b", "10.0.0.2"))
    flows = flows_between(2, "all")
    environment.write_environment(
        Environment(hosts, flows, Pattern(1e9, 1e8, 65536), target=target, found=result), path
    )
    return path


def test_no_traffic_comes_first_and_the_control_last(tmp_path: Path) -> None:
    result = ProbeResult(800, 0.01, 0.0152, 1.52, 1.44, 1.6)
    low, high = (
        _write_environment(tmp_path / "low.json", 1.5, result),
        _write_environment(tmp_path / "loud.json", None),
    )
    without_traffic, first, second, control = read_settings(
        [low, high], ["b=192.168.0.2", "a=192.168.0.1"]
    )
    labels = [setting.label for setting in (without_traffic, first, second, control)]
    assert labels == ["none", "1.5", "loud", "loud apart"]
    assert first.description == "traffic 1.5 (p99/p50 1.52 [1.44, 1.60], 800 samples)"
    assert second.description == "traffic loud (not calibrated)"
    session = SessionResult(TrainingSubject("x", "X"), "", 2, "cpu", (), ())
    tail_ratio = TailRatio(1.5, 1.4, 1.6)
    sessions = [
        s.add_tail_ratios(session, tail_ratio, tail_ratio)
        for s in (without_traffic, first, second, control)
    ]
    # Traffic on the control's network must not affect the probe, so the control has no target.
    assert [(setting.target, setting.tolerance) for setting in sessions] == [
        *((None, 0), (1.5, 0.1), (None, 0), (None, 0))
    ]
    assert {setting.before for setting in sessions} == {tail_ratio}
    assert control.environment is not None
    hosts = control.environment.hosts
    # Flows use the other network, and the probe that of the ranks.
    assert [(s.addr, s.flow_addr) for s in hosts] == [
        ("10.0.0.1", "192.168.0.1"),
        ("10.0.0.2", "192.168.0.2"),
    ]


def test_environments_with_equal_targets_are_labelled_by_file(tmp_path: Path) -> None:
    paths = [_write_environment(tmp_path / name, 3) for name in ("shallow.json", "deep.json")]
    assert [setting.label for setting in read_settings(paths, [])] == ["none", "shallow", "deep"]


@pytest.mark.parametrize(
    ("names", "apart", "message"),
    [
        (["x.json"], ["a"], "--apart 'a'; expected HOST=ADDRESS"),
        (["x.json"], ["a="], "--apart 'a='; expected HOST=ADDRESS"),
        (["x.json"], ["a=1", "bb=2"], "bb is not a host of the environment; did you mean 'b'?"),
        (["x.json"], ["a=1"], "--apart: an address of b is missing"),
        (["x.json", "x.json"], [], "give the files names that differ"),
        (["none.json"], [], "give the files names that differ, none 'none'"),
    ],
)
def test_invalid_options_are_refused(
    names: list[str], apart: list[str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as error:
        read_settings([_write_environment(tmp_path / name, None) for name in names], apart)
    assert message in str(error.value)
