"""Tests that planning checks the communication backend and reports the line that sets it."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.arguments import train_arguments

from flagscale.config.schema import Commands, Environments, Experiment, Runner, Task
from flagscale.launcher.planning.support import check_backend


def _experiment(name: str, *, external: bool = False) -> Experiment:
    return Experiment(
        name="x",
        exp_dir=Path("/x"),
        task=Task(entrypoint=Path("/x.py"), external=external),
        runner=Runner(),
        envs=Environments(),
        cmds=Commands(),
        train=train_arguments(
            system={"distributed_backend": name},
            locations={"train.system.distributed_backend": "/x.yaml:7"},
        ),
        config_file=Path("/x.yaml"),
    )


@pytest.mark.parametrize("name", ["auto", "nccl", "gloo", "fsccl", "cpu:gloo,cuda:nccl"])
def test_known_backend_is_accepted(name: str) -> None:
    assert check_backend(_experiment(name)) == []


def test_unknown_backend_is_rejected() -> None:
    (problem,) = check_backend(_experiment("ncll"))
    assert problem.key == "train.system.distributed_backend"
    assert problem.where == "/x.yaml:7"
    assert "did you mean 'nccl'" in problem.message


def test_backend_of_an_external_program_is_not_checked() -> None:
    assert check_backend(_experiment("hccl", external=True)) == []
