"""Tests of the directories that training reads from and writes to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.arguments import train_arguments

from flagscale.config.schema import Experiment, Runner, Task
from flagscale.hosts.facts import NOT_A_DIRECTORY, NOT_WRITABLE, HostFacts, PathState
from flagscale.hosts.hostfile import Host
from flagscale.hosts.python_environment import PythonEnvironment
from flagscale.launcher.layout import Layout
from flagscale.launcher.planning.model import LaunchPlan
from flagscale.launcher.planning.per_host import resolve_all_settings, resolve_settings
from flagscale.launcher.preflight.checks import Check
from flagscale.launcher.preflight.directories import (
    HostPaths,
    check_output_paths,
    collect_host_paths,
)
from flagscale.launcher.preflight.host_probe import HostReplies
from flagscale.launcher.preflight.hosts import check_hosts
from flagscale.launcher.runners.hosts import HostRunner

OWN = "/data/runs/tiny"
ROOM = PathState("/", user="trainer", free_bytes=1 << 40)
DENIED = PathState("/mnt", NOT_WRITABLE, "trainer")

MakeExperiment = Callable[..., Experiment]


@pytest.fixture
def make_own_experiment(make_experiment: MakeExperiment) -> MakeExperiment:
    """Return an experiment of this project's own program with these arguments."""

    def make(*, exp_dir: Path = Path(OWN), **arguments: Any) -> Experiment:
        return make_experiment(
            task=Task(entrypoint=Path("/opt/program.py")),
            train=train_arguments(system={"checkpoint": arguments}),
            runner=Runner(nproc_per_node=1),
            exp_dir=exp_dir,
        )

    return make


def paths_of(experiment: Experiment, *, is_first: bool = True) -> HostPaths:
    layout = Layout(experiment.exp_dir)
    return collect_host_paths(
        experiment,
        layout,
        resolve_settings(experiment, Host("h0", 1)),
        is_first=is_first,
    )


@pytest.mark.parametrize(
    ("arguments", "is_first", "written"),
    [
        pytest.param({}, True, {}, id="below-the-experiment"),
        pytest.param(
            {"save": "/a/b"}, True, {"save": "/a/b", "data_cache_path": "/a/data_cache"}, id="save"
        ),
        pytest.param({"save": "/a/b"}, False, {"save": "/a/b"}, id="other-host"),
        pytest.param({"save": "s3://bucket/a"}, True, {}, id="object-storage"),
        pytest.param(
            {"save": "s3://bucket/a", "save_staging_dir": "/nvme/staging"},
            True,
            {"save_staging_dir": "/nvme/staging"},
            id="staging",
        ),
        pytest.param(
            {"save": "/a/b", "path_to_cache": "/c"},
            True,
            {"save": "/a/b", "data_cache_path": "/c"},
            id="cache",
        ),
        pytest.param(
            {"save": None, "tensorboard_dir": "/t/b"},
            True,
            {"tensorboard_dir": "/t/b", "data_cache_path": "/t/data_cache"},
            id="board",
        ),
        pytest.param({"tensorboard_dir": "s3://b"}, True, {}, id="object-storage"),
    ],
)
def test_output_directories(
    make_own_experiment: MakeExperiment,
    arguments: dict[str, Any],
    is_first: bool,
    written: dict[str, str],
) -> None:
    assert paths_of(make_own_experiment(**arguments), is_first=is_first).output_paths == written


def test_directories_of_an_external_program_are_not_checked(
    make_experiment: MakeExperiment,
) -> None:
    external = make_experiment(
        train=train_arguments(system={"save": "/a", "load": "/b", "finetune": True})
    )
    assert list(check_output_paths(paths_of(external), {})) == []


@pytest.mark.parametrize(
    ("name", "state", "ok", "expected"),
    [
        pytest.param("save", ROOM, True, "1,048,576 MiB free", id="room"),
        pytest.param("save", DENIED, False, "/mnt is not writable for user trainer", id="rights"),
        pytest.param(
            "save", PathState("/f", NOT_A_DIRECTORY), False, "/f is not a directory", id="file"
        ),
        pytest.param("save", PathState("/", free_bytes=1000), False, "0 MiB free", id="full"),
        pytest.param("save", None, False, "did not report its state", id="not-reported"),
        pytest.param("data_cache_path", DENIED, False, "/mnt is not writable", id="no-cache"),
        pytest.param(
            "data_cache_path", PathState("/mnt/x", NOT_WRITABLE), True, "not cached", id="read-only"
        ),
    ],
)
def test_unwritable_directories(
    name: str, state: PathState | None, ok: bool, expected: str
) -> None:
    states = {} if state is None else {"/mnt/x": state}
    (check,) = check_output_paths(HostPaths(output_paths={name: "/mnt/x"}), states)
    assert check.ok is ok
    assert expected in check.found
    assert ok or state is None or name in check.hint


def test_this_machine_is_looked_at(make_own_experiment: MakeExperiment, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    configured = make_own_experiment(exp_dir=tmp_path / "exp", save=str(tmp_path / "file" / "x"))
    with HostRunner().prepare(configured, checking=True) as ready:
        checks = {check.name: check for check in ready.checks}
    assert checks["exp_dir"].ok
    assert not checks["save"].ok
    assert checks["save"].found == f"{tmp_path / 'file'} is not a directory"


def test_every_host_is_looked_at(
    make_own_experiment: MakeExperiment, make_plan: Callable[..., LaunchPlan]
) -> None:
    hosts = (Host("n1", 1), Host("n2", 1), Host("n3", 1))
    configured = make_own_experiment(
        save="/mnt/x", load="/l", num_layers=1, hidden_size=8, num_attention_heads=1,
        seq_length=8, lr=0.1, train_iters=5,
    )  # fmt: skip
    fields = {"path": "/l/iter_0000004", "iteration": 4, "content": {}, "skipped": []}
    python = PythonEnvironment("3.11", "/python", module_replies={"load": fields})
    writable_states = {"/mnt/x": ROOM, "/mnt/data_cache": ROOM}
    denied = {"/mnt/x": DENIED}
    checkpoints = ("iter_0000003", "iter_0000004")
    replies = HostReplies(
        hosts,
        resolve_all_settings(configured, hosts),
        required_paths=({},) * 3,
        facts={
            0: HostFacts(
                1,
                {},
                "eth0",
                "b",
                0.0,
                output_paths=writable_states,
                checkpoints=checkpoints,
                python=python,
            ),
            1: HostFacts(
                1, {}, "eth0", "b", 0.0, output_paths=writable_states, checkpoints=checkpoints
            ),
            2: HostFacts(
                1, {}, "eth0", "b", 0.0, output_paths=denied, checkpoints=("iter_0000003",)
            ),
        },
    )
    plan = make_plan(hosts=hosts, runner=Runner(nproc_per_node=1))
    names = ("save", "data_cache_path", "load")
    rows: list[Check] = [
        check for check in check_hosts(configured, plan, replies) if check.name in names
    ]
    assert [(check.name, check.hosts, check.ok, check.warning) for check in rows] == [
        ("save", "n[1-2]", True, False),
        ("save", "n3", False, False),
        ("data_cache_path", "n1", True, False),
        ("load", "n[1-2]", True, False),
        ("load", "n3", False, False),
    ]
    assert rows[0].found == "/mnt/x: more than 2 GiB free"
    assert rows[-1].found == "/l/iter_0000004 does not exist on this host"
