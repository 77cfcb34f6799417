"""What an experiment says of one host."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flagscale.config.schema import PROJECT, Commands, Experiment, Runner, Specific, Train
from flagscale.hosts.hostfile import Host
from flagscale.launcher.planning.per_host import merge, rebased, settings

MakeExperiment = Callable[..., Experiment]


@pytest.mark.parametrize(
    ("base", "layers", "expected"),
    [
        pytest.param({"m": {"a": 1}}, [{"a": 2}], {"m": {"a": 2}}, id="in-its-section"),
        pytest.param({"m": {"a": 1}}, [{"x": {"a": 2}}], {"m": {"a": 2}}, id="other-section"),
        pytest.param({"m": {"a": 1}}, [{"a": 2}, {"a": 3}], {"m": {"a": 3}}, id="last-wins"),
        pytest.param({"m": {"a-b": 1}}, [{"a_b": 2}], {"m": {"a-b": 2}}, id="dashes"),
        pytest.param({"m": {"a": 1}}, [{"a": None}], {"m": {"a": None}}, id="taken-away"),
        pytest.param({"m": {}}, [{"b": [1]}], {"m": {}, "specific": {"b": [1]}}, id="added"),
        pytest.param(
            {"m": {"no_bias_gelu_fusion": True}},
            [{"bias_activation_fusion": True}],
            {"m": {}, "specific": {"bias_activation_fusion": True}},
            id="another-spelling",
        ),
    ],
)
def test_merge(base: dict[str, Any], layers: list[dict[str, Any]], expected: Any) -> None:
    before = repr(base)
    made, origins = merge(base, [(f"layer{n}", layer) for n, layer in enumerate(layers)])
    assert made == expected
    assert repr(base) == before
    assert len(origins) == sum(1 for layer in layers for _ in layer)


def test_node_wins_over_type_and_nothing_leaks(make_experiment: MakeExperiment) -> None:
    experiment = make_experiment(
        runner=Runner(python="/common/bin/python"),
        cmds=Commands("common", "after"),
        train=Train(model={"size": 1}),
        by_type={
            "A": Specific(build_dir=Path("/a"), conda="for a", arguments={"size": 2, "more": 1})
        },
        by_host={"h1": Specific(before_start="own", python="python3", arguments={"size": 3})},
    )
    first, second, third = (
        settings(experiment, host) for host in (Host("h0", 1, "A"), Host("h1", 1, "A"), Host("h2"))
    )
    assert (first.build_dir, first.before_start, first.sections["model"]) == (
        Path("/a"),
        "common",
        {"size": 2},
    )
    assert (second.before_start, second.after_stop, second.python) == ("own", "after", "python3")
    assert second.sections["model"] == {"size": 3}
    assert second.sections["specific"] == {"more": 1}
    assert (third.conda, third.origins, third.sections["model"]) == (None, (), {"size": 1})
    assert ("node_specific.h1.cmds.before_start", "own") in second.origins
    assert ("device_type_specific.A.conda", "for a") in second.origins


def test_environments_are_activated(make_experiment: MakeExperiment, tmp_path: Path) -> None:
    """A conda in name only, whose every step is seen, stands in for a gigabyte of the real one."""
    conda = tmp_path / "bin" / "conda"
    conda.parent.mkdir()
    conda.write_text("#!/bin/sh\necho 'conda() { echo \"conda $1 <$2>\"; }'\n")
    conda.chmod(0o755)
    own = settings(
        make_experiment(runner=Runner(conda="it's $mine", python="/x y/bin/python")), Host("h")
    )
    done = subprocess.run(
        ["bash", "-euc", f'PATH={conda.parent}:$PATH\n{own.setup}echo "$PATH"'],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[0] == "conda activate <it's $mine>"
    assert done.stdout.splitlines()[1].startswith("/x y/bin:")


def test_a_missing_conda_is_told(make_experiment: MakeExperiment, tmp_path: Path) -> None:
    own = settings(make_experiment(runner=Runner(conda="x")), Host("h"))
    done = subprocess.run(
        ["/bin/bash", "-c", own.setup],
        env={"PATH": str(tmp_path), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    if not Path("/opt/conda").exists():
        assert done.returncode == 1
        assert "no conda on this host" in done.stderr


def test_paths_inside_the_project_move_with_it() -> None:
    assert rebased(PROJECT / "flagscale/x.py", Path("/opt/fs")) == Path("/opt/fs/flagscale/x.py")
    assert rebased(Path("/data/x.py"), Path("/opt/fs")) == Path("/data/x.py")
    assert rebased(PROJECT / "x.py", PROJECT) == PROJECT / "x.py"
