"""Experiments and machines for planning tests, independent of the machine that the tests run on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.arguments import train_arguments

from flagscale.config.schema import Commands, Environments, Experiment, Runner, Task
from flagscale.hosts.hostfile import Host
from flagscale.launcher.planning.assignment import assign_ranks
from flagscale.launcher.planning.model import LaunchPlan, Machine, RunnerHandle
from flagscale.launcher.planning.plan import plan

MakePlan = Callable[..., LaunchPlan]


@pytest.fixture
def machine() -> Machine:
    return Machine(
        python="/opt/venv/bin/python",
        project=Path("/opt/flagscale"),
        workdir=Path("/home/user/work"),
        cpus=8,
        devices={},
    )


@pytest.fixture
def make_experiment() -> Callable[..., Experiment]:
    """Return a function that creates an experiment with these fields changed."""

    def make(**changes: Any) -> Experiment:
        fields: dict[str, Any] = {
            "name": "tiny llama",
            "exp_dir": Path("/data/runs/tiny"),
            "task": Task(entrypoint=Path("/opt/program.py"), external=True),
            "runner": Runner(nproc_per_node=2),
            "envs": Environments(),
            "cmds": Commands(),
            "train": train_arguments(),
            "config_file": Path("/home/user/conf/train.yaml"),
        }
        return Experiment(**{**fields, **changes})

    return make


@pytest.fixture
def make_plan(make_experiment: Callable[..., Experiment], machine: Machine) -> MakePlan:
    """Return a function that plans an experiment on ``hosts``; other arguments are fields of the
    experiment.
    """

    def make(*, hosts: tuple[Host, ...] = (Host("localhost"),), **changes: Any) -> LaunchPlan:
        host_machine = changes.pop("machine", machine)
        secret = changes.pop("run_secret", "s3cr3t" * 8)
        experiment = make_experiment(**changes)
        return plan(
            experiment,
            assign_ranks(experiment, hosts, [host_machine] * len(hosts)),
            run_id="20250102-030405-abcdef",
            master_port=29500,
            runner=RunnerHandle("local"),
            run_secret=secret,
        )

    return make
