"""Tests of the settings of one host."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.arguments import arguments_of, train_arguments, values_by_yaml_name

from flagscale.config.schema import PROJECT, Commands, Experiment, HostOverride, Runner
from flagscale.hosts.hostfile import Host
from flagscale.launcher.planning.per_host import rebase_path, resolve_settings

MakeExperiment = Callable[..., Experiment]


@pytest.mark.parametrize(
    ("base", "layers", "expected"),
    [
        pytest.param({"m": {"a": 1}}, [{"a": 2}], {"a": 2}, id="in-its-section"),
        pytest.param({"m": {"a": 1}}, [{"x": {"a": 2}}], {"a": 2}, id="other-section"),
        pytest.param({"m": {"a": 1}}, [{"a": 2}, {"a": 3}], {"a": 3}, id="last-wins"),
        pytest.param({"m": {"a-b": 1}}, [{"a_b": 2}], {"a_b": 2}, id="dashes"),
        pytest.param({"m": {"a": 1}}, [{"a": None}], {"a": None}, id="taken-away"),
        pytest.param({"m": {}}, [{"b": [1]}], {"b": [1]}, id="added"),
        pytest.param(
            {"m": {"no_bias_gelu_fusion": True}},
            [{"bias_activation_fusion": True}],
            {"bias_activation_fusion": True},
            id="another-spelling",
        ),
    ],
)
def test_overlay(base: dict[str, Any], layers: list[dict[str, Any]], expected: Any) -> None:
    args = train_arguments(**base)
    representation_before = repr(args)
    merged = args
    for number, layer in enumerate(layers):
        merged = merged.overlaid(arguments_of(layer, f"layer{number}."))
    assert values_by_yaml_name(merged) == expected
    assert repr(args) == representation_before


def test_node_wins_over_type_and_nothing_leaks(make_experiment: MakeExperiment) -> None:
    experiment = make_experiment(
        runner=Runner(python="/common/bin/python"),
        cmds=Commands("common", "after"),
        train=train_arguments(model={"size": 1}),
        by_type={
            "A": HostOverride(
                build_dir=Path("/a"), conda="for a", arguments=arguments_of({"size": 2, "more": 1})
            )
        },
        by_host={
            "h1": HostOverride(
                before_start="own", python="python3", arguments=arguments_of({"size": 3})
            )
        },
    )
    first, second, third = (
        resolve_settings(experiment, host)
        for host in (Host("h0", 1, "A"), Host("h1", 1, "A"), Host("h2"))
    )
    assert (first.build_dir, first.before_start, values_by_yaml_name(first.train)) == (
        Path("/a"),
        "common",
        {"size": 2, "more": 1},
    )
    assert (second.before_start, second.after_stop, second.python) == ("own", "after", "python3")
    assert values_by_yaml_name(second.train) == {"size": 3, "more": 1}
    assert (third.conda, third.origins, values_by_yaml_name(third.train)) == (None, (), {"size": 1})
    assert ("node_specific.h1.cmds.before_start", "own") in second.origins
    assert ("device_type_specific.A.conda", "for a") in second.origins


def test_environments_are_activated(make_experiment: MakeExperiment, tmp_path: Path) -> None:
    """A stub conda that logs every step stands in for the real one, which is a gigabyte."""
    conda = tmp_path / "bin" / "conda"
    conda.parent.mkdir()
    conda.write_text("#!/bin/sh\necho 'conda() { echo \"conda $1 <$2>\"; }'\n")
    conda.chmod(0o755)
    settings = resolve_settings(
        make_experiment(runner=Runner(conda="it's $mine", python="/x y/bin/python")), Host("h")
    )
    result = subprocess.run(
        ["bash", "-euc", f'PATH={conda.parent}:$PATH\n{settings.setup}echo "$PATH"'],
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.splitlines()[0] == "conda activate <it's $mine>"
    assert result.stdout.splitlines()[1].startswith("/x y/bin:")


def test_missing_conda_is_reported(make_experiment: MakeExperiment, tmp_path: Path) -> None:
    settings = resolve_settings(make_experiment(runner=Runner(conda="x")), Host("h"))
    result = subprocess.run(
        ["/bin/bash", "-c", settings.setup],
        env={"PATH": str(tmp_path), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    if not Path("/opt/conda").exists():
        assert result.returncode == 1
        assert "no conda on this host" in result.stderr


def test_paths_inside_the_project_move_with_it() -> None:
    assert rebase_path(PROJECT / "flagscale/x.py", Path("/opt/fs")) == Path(
        "/opt/fs/flagscale/x.py"
    )
    assert rebase_path(Path("/data/x.py"), Path("/opt/fs")) == Path("/data/x.py")
    assert rebase_path(PROJECT / "x.py", PROJECT) == PROJECT / "x.py"
