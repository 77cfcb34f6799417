"""The communication backend's name is judged at planning, at the place that gives it."""

from __future__ import annotations

from pathlib import Path

import pytest

from flagscale.config.schema import Commands, Environments, Experiment, Runner, Task, Train
from flagscale.launcher.planning.backends import backend_problems


def _experiment(name: str, *, external: bool = False) -> Experiment:
    return Experiment(
        name="x",
        exp_dir=Path("/x"),
        task=Task(entrypoint=Path("/x.py"), external=external),
        runner=Runner(),
        envs=Environments(),
        cmds=Commands(),
        train=Train(system={"distributed_backend": name}),
        config_file=Path("/x.yaml"),
        sources={"train.system.distributed_backend": "/x.yaml:7"},
    )


@pytest.mark.parametrize("name", ["auto", "nccl", "gloo", "fsccl", "cpu:gloo,cuda:nccl"])
def test_known(name: str) -> None:
    assert backend_problems(_experiment(name)) == []


def test_unknown() -> None:
    (problem,) = backend_problems(_experiment("ncll"))
    assert problem.key == "train.system.distributed_backend"
    assert problem.where == "/x.yaml:7"
    assert "did you mean 'nccl'" in problem.message


def test_a_foreign_program_has_backends_of_its_own() -> None:
    assert backend_problems(_experiment("hccl", external=True)) == []
