"""Launch plans that start ranks with the Python interpreter instead of torchrun.

They start in a fraction of torchrun's time, for tests of scripts, agent and runner on this machine
that do not depend on torchrun.
"""

from __future__ import annotations

import json
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

from flagscale.config.schema import Commands, Environments, Experiment, Runner, Task
from flagscale.files import read_json, write_atomic
from flagscale.hosts import processes
from flagscale.hosts.hostfile import Host
from flagscale.launcher.planning.assignment import assign_ranks
from flagscale.launcher.planning.model import LaunchPlan, Machine, RunnerHandle
from flagscale.launcher.planning.plan import plan
from flagscale.launcher.planning.script import render
from flagscale.launcher.runners.base import ConfigTexts
from flagscale.launcher.runners.hosts import HostRunner
from flagscale.launcher.state import RunState, load_state, new_run_id, save_plan
from support.arguments import train_arguments
from support.launch_lab import PROJECT
from support.waiting import wait_for

SLEEPING_PROGRAM = """
    import time
    print("ready", flush=True)
    time.sleep(600)
"""
# Configuration and command-line overrides that are stored with a plan. Nothing reads them.
_CONFIG_TEXT, _OVERRIDES_TEXT = "config: 1\n", "[]\n"


class Bench:
    """Test bench: plans and starts programs whose ranks the Python interpreter starts, without
    torchrun.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.runner = HostRunner()
        self.plans: list[LaunchPlan] = []

    def plan(self, program: str, **changes: Any) -> LaunchPlan:
        """Return the plan of a program with two ranks on this machine; ``changes`` are fields of
        the experiment.
        """
        entrypoint = self.root / "program.py"
        entrypoint.write_text(textwrap.dedent(program), encoding="utf-8")
        fields: dict[str, Any] = {
            "name": "bench",
            "exp_dir": self.root / "exp",
            # external: the program may be no part of flagscale, and reports no status.
            "task": Task(entrypoint=entrypoint, external=True),
            "runner": Runner(stop_grace=1.0),
            "envs": Environments(),
            "cmds": Commands(),
            "train": train_arguments(),
            "config_file": self.root / "x.yaml",
        }
        experiment = Experiment(**{**fields, **changes})
        machine = Machine(
            python=sys.executable, project=PROJECT, workdir=self.root, cpus=2, devices={}
        )
        launch_plan = plan(
            experiment,
            assign_ranks(experiment, [Host("localhost")], [machine]),
            run_id=new_run_id(),
            master_port=1,
            runner=RunnerHandle("local"),
        )
        host = replace(launch_plan.hosts[0], starter=(sys.executable, "-u"))
        self.plans.append(replace(launch_plan, hosts=(host,)))
        return self.plans[-1]

    def run(self, program: str, **changes: Any) -> int:
        """Run a program until it ends, and return the exit code of its script."""
        return self.runner.wait(self.submit(self.plan(program, **changes)))

    def submit(self, plan: LaunchPlan) -> RunState:
        """Start a plan."""
        return self.runner.submit(plan, ConfigTexts(_CONFIG_TEXT, _OVERRIDES_TEXT))

    @staticmethod
    def write_script(plan: LaunchPlan) -> None:
        """Write the script of a plan without starting it."""
        save_plan(plan, _CONFIG_TEXT, _OVERRIDES_TEXT)
        write_atomic(plan.hosts[0].script, render(plan, plan.hosts[0]), mode=0o700)

    def start(self, program: str, ready: str = "ready", **changes: Any) -> RunState:
        """Start a program and wait for it to print ``ready``."""
        state = self.submit(self.plan(program, **changes))
        wait_for(lambda: ready in self.output)
        return state

    def stored_state(self) -> RunState:
        """Return the state that is stored on disk."""
        state = load_state(self.plans[-1].layout.state)
        assert state is not None
        return state

    @property
    def output(self) -> str:
        return self.plans[-1].hosts[0].output.read_text(encoding="utf-8")

    def exit_record(self) -> dict[str, Any]:
        path = self.plans[-1].hosts[0].run_dir / "exit.json"
        return dict(json.loads(path.read_text(encoding="utf-8")))

    def agent_process(self, state: RunState) -> processes.Process:
        """Return the process of the run's agent."""
        path = state.hosts[0].run_dir / "agent.json"
        record = wait_for(lambda: read_json(path))
        return processes.Process(record["pid"], record["start_ticks"])
