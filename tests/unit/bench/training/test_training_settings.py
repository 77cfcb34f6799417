"""The network's settings out of environments that were kept."""

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

pytestmark = pytest.mark.torch  # numpy comes with it


def _keep(path: Path, target: float | None, found: ProbeResult | None = None) -> Path:
    sites = (TrafficHost("a", "10.0.0.1"), TrafficHost("b", "10.0.0.2"))
    flows = flows_between(2, "all")
    environment.write_environment(
        Environment(sites, flows, Pattern(1e9, 1e8, 65536), target=target, found=found), path
    )
    return path


def test_no_traffic_comes_first_and_the_control_last(tmp_path: Path) -> None:
    found = ProbeResult(800, 0.01, 0.0152, 1.52, 1.44, 1.6)
    low, loud = _keep(tmp_path / "low.json", 1.5, found), _keep(tmp_path / "loud.json", None)
    quiet, first, second, control = read_settings([low, loud], ["b=192.168.0.2", "a=192.168.0.1"])
    labels = [one.label for one in (quiet, first, second, control)]
    assert labels == ["none", "1.5", "loud", "loud apart"]
    assert first.description == "traffic 1.5 (p99/p50 1.52 [1.44, 1.60], 800 samples)"
    assert second.description == "traffic loud (not calibrated)"
    session = SessionResult(TrainingSubject("x", "X"), "", 2, "cpu", (), ())
    probed = TailRatio(1.5, 1.4, 1.6)
    judged = [s.add_tail_ratios(session, probed, probed) for s in (quiet, first, second, control)]
    # On the control's network the probe is to feel nothing.
    assert [(one.target, one.tolerance) for one in judged] == [
        *((None, 0), (1.5, 0.1), (None, 0), (None, 0))
    ]
    assert {one.before for one in judged} == {probed}
    assert control.environment is not None
    sites = control.environment.hosts
    # Flows go over the other network, and the probe stays where the ranks are.
    assert [(s.addr, s.flow_addr) for s in sites] == [
        ("10.0.0.1", "192.168.0.1"),
        ("10.0.0.2", "192.168.0.2"),
    ]


def test_environments_with_equal_targets_are_labelled_by_file(tmp_path: Path) -> None:
    paths = [_keep(tmp_path / name, 3) for name in ("shallow.json", "deep.json")]
    assert [one.label for one in read_settings(paths, [])] == ["none", "shallow", "deep"]


@pytest.mark.parametrize(
    ("names", "apart", "told"),
    [
        (["x.json"], ["a"], "--apart 'a'; expected HOST=ADDRESS"),
        (["x.json"], ["a="], "--apart 'a='; expected HOST=ADDRESS"),
        (["x.json"], ["a=1", "bb=2"], "bb is no host of the environment; did you mean 'b'?"),
        (["x.json"], ["a=1"], "--apart: an address of b is missing"),
        (["x.json", "x.json"], [], "give the files names that differ"),
        (["none.json"], [], "give the files names that differ, none 'none'"),
    ],
)
def test_invalid_options_are_refused(
    names: list[str], apart: list[str], told: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as error:
        read_settings([_keep(tmp_path / name, None) for name in names], apart)
    assert told in str(error.value)
