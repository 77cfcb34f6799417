"""Tests of problems with a hostfile: settings for hosts and device types that it does not have,
fewer hosts than requested, and loopback addresses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flagscale.config.schema import Environments, Experiment, HostOverride, Runner
from flagscale.errors import ConfigError
from flagscale.launcher.runners.hosts import HostRunner

MakeExperiment = Callable[..., Experiment]
TYPED = "127.0.0.1 slots=2 type=A\nnode2 slots=2 type=B800\n"
UNTYPED = "127.0.0.1 slots=2\nnode2 slots=2\n"


@pytest.fixture
def make_on_hosts(
    make_experiment: MakeExperiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Experiment]:
    monkeypatch.chdir(tmp_path)

    def make(hostfile: str, nnodes: int | None = None, **settings: Any) -> Experiment:
        path = tmp_path / "hosts"
        path.write_text(hostfile, encoding="utf-8")
        runner = Runner(nproc_per_node=2, hostfile=path, nnodes=nnodes)
        return make_experiment(runner=runner, **settings)

    return make


@pytest.mark.parametrize(
    ("hostfile", "settings", "message"),
    [
        pytest.param(
            TYPED,
            {"by_host": {"nod2": HostOverride()}},
            "node_specific.nod2: no host in hosts has this name; did you mean 'node2'?",
            id="unknown-host",
        ),
        pytest.param(
            TYPED,
            {"envs": Environments(by_host={"noode": {"X": "1"}})},
            "experiment.envs.node_specific.noode: no host in hosts has this name; did you mean",
            id="unknown-host-of-envs",
        ),
        pytest.param(
            TYPED,
            {"by_type": {"B80": HostOverride()}},
            "device_type_specific.B80: no host in hosts has this type; did you mean 'B800'?",
            id="unknown-type",
        ),
        pytest.param(
            TYPED,
            {"envs": Environments(by_type={"Q": {"X": "1"}})},
            "experiment.envs.device_type_specific.Q: no host in hosts has this type; it has A,B800",
            id="unknown-type-of-envs",
        ),
        pytest.param(
            UNTYPED,
            {"by_type": {"A": HostOverride()}},
            "no host in hosts has this type; its lines have no type=",
            id="hostfile-without-types",
        ),
    ],
)
def test_settings_for_an_unknown_host_or_type_are_rejected(
    make_on_hosts: Callable[..., Experiment], hostfile: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        HostRunner().plan(make_on_hosts(hostfile, **settings))
    assert message in str(raised.value)


def test_all_unknown_names_are_reported_with_their_locations(
    make_on_hosts: Callable[..., Experiment],
) -> None:
    experiment = make_on_hosts(
        TYPED,
        by_type={"C": HostOverride()},
        by_host={"x": HostOverride()},
        sources={"device_type_specific.C": "t.yaml:3", "node_specific.x.seed": "override"},
    )
    with pytest.raises(ConfigError) as raised:
        HostRunner().plan(experiment)
    assert [problem.where for problem in raised.value.problems] == ["t.yaml:3", "override"]


def test_settings_for_an_unused_host_of_the_hostfile_are_accepted(
    make_on_hosts: Callable[..., Experiment],
) -> None:
    experiment = make_on_hosts(
        TYPED, nnodes=1, by_type={"B800": HostOverride()}, by_host={"node2": HostOverride()}
    )
    assert [host.name for host in HostRunner().plan(experiment).hosts] == ["127.0.0.1"]


@pytest.mark.parametrize(
    ("nnodes", "note"),
    [
        pytest.param(None, "", id="not-set"),
        pytest.param(1, "", id="fewer"),
        pytest.param(2, "", id="all"),
        pytest.param(
            5,
            "2 host(s) take part: experiment.runner.nnodes is 5, the hostfile has 2",
            id="more",
        ),
    ],
)
def test_note_for_more_hosts_than_available(
    make_on_hosts: Callable[..., Experiment], nnodes: int | None, note: str
) -> None:
    notes = HostRunner().plan(make_on_hosts(UNTYPED, nnodes)).notes
    assert [text for text in notes if "take part" in text] == ([note] if note else [])


@pytest.mark.parametrize(
    ("hostfile", "noted"),
    [
        pytest.param("localhost slots=1\nb slots=1\n", True, id="loopback-name"),
        pytest.param("localhost slots=1 addr=10.0.0.1\nb slots=1\n", False, id="other-addr"),
        pytest.param("b slots=1\nlocalhost slots=1\n", False, id="not-the-first-host"),
        pytest.param("localhost slots=1\n", False, id="single-host"),
    ],
)
def test_loopback_rendezvous_of_several_hosts_is_noted(
    make_on_hosts: Callable[..., Experiment], hostfile: str, noted: bool
) -> None:
    notes = HostRunner().plan(make_on_hosts(hostfile)).notes
    assert any("localhost is a loopback address" in text for text in notes) is noted


def test_without_a_hostfile_unused_settings_are_noted(make_experiment: MakeExperiment) -> None:
    experiment = make_experiment(
        by_type={"A": HostOverride()}, by_host={"localhost": HostOverride(), "n": HostOverride()}
    )
    (note,) = [text for text in HostRunner().plan(experiment).notes if "hostfile" in text]
    assert note.startswith("device_type_specific.A, node_specific.n: not used")
    named = replace(experiment, by_type={}, by_host={"localhost": HostOverride()})
    assert not [text for text in HostRunner().plan(named).notes if "hostfile" in text]
