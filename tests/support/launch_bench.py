"""Plans whose ranks the bare interpreter starts: for tests of scripts, agent and runner on this
machine, which do not depend on torchrun and start in a fraction of its time."""

from __future__ import annotations

import json
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

from flagscale.config.schema import Commands, Environments, Experiment, Runner, Task, Train
from flagscale.files import read_json, write_atomic
from flagscale.hosts import processes
from flagscale.hosts.hostfile import Host
from flagscale.launcher.planning.assignment import assign_ranks
from flagscale.launcher.planning.model import LaunchPlan, Machine, RunnerHandle
from flagscale.launcher.planning.plan import plan
from flagscale.launcher.planning.script import render
from flagscale.launcher.runners.base import Texts
from flagscale.launcher.runners.hosts import HostRunner
from flagscale.launcher.state import RunState, keep_plan, load_state, new_run_id
from support.launch_lab import PROJECT, until

SLEEP = """
    import time
    print("ready", flush=True)
    time.sleep(600)
"""


class Bench:
    """Makes plans whose torchrun is the bare interpreter, and clears up after them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.runner = HostRunner()
        self.plans: list[LaunchPlan] = []

    def plan(self, program: str, **changes: Any) -> LaunchPlan:
        entrypoint = self.root / "program.py"
        entrypoint.write_text(textwrap.dedent(program), encoding="utf-8")
        given: dict[str, Any] = {
            "name": "bench",
            "exp_dir": self.root / "exp",
            "task": Task(entrypoint=entrypoint, external=True),
            "runner": Runner(stop_grace=1.0),
            "envs": Environments(),
            "cmds": Commands(),
            "train": Train(),
            "config_file": self.root / "x.yaml",
        }
        experiment = Experiment(**{**given, **changes})
        machine = Machine(sys.executable, PROJECT, self.root, 2, {})
        made = plan(
            experiment,
            assign_ranks(experiment, [Host("localhost")], [machine]),
            run_id=new_run_id(),
            master_port=1,
            runner=RunnerHandle("local"),
        )
        host = replace(made.hosts[0], starter=(sys.executable, "-u"))
        self.plans.append(replace(made, hosts=(host,)))
        return self.plans[-1]

    def run(self, program: str, **changes: Any) -> int:
        """Run a program to its end; the script's code."""
        return self.runner.wait(self.submit(self.plan(program, **changes)))

    def submit(self, plan: LaunchPlan) -> RunState:
        return self.runner.submit(plan, Texts("config: 1\n", "[]\n"))

    @staticmethod
    def write(plan: LaunchPlan) -> None:
        """Write a plan's script, for those who run it by hand."""
        keep_plan(plan, "config: 1\n", "[]\n")
        write_atomic(plan.hosts[0].script, render(plan, plan.hosts[0]), mode=0o700)

    def start(self, program: str, ready: str = "ready", **changes: Any) -> RunState:
        """Start a program and wait for it to print ``ready``."""
        state = self.submit(self.plan(program, **changes))
        until(lambda: ready in self.output)
        return state

    def runner_state(self) -> RunState:
        """The state as it is on disk."""
        state = load_state(self.plans[-1].layout.state)
        assert state is not None
        return state

    @property
    def output(self) -> str:
        return self.plans[-1].hosts[0].output.read_text(encoding="utf-8")

    def exit_record(self) -> dict[str, Any]:
        path = self.plans[-1].hosts[0].run_dir / "exit.json"
        return dict(json.loads(path.read_text(encoding="utf-8")))

    def agent(self, state: RunState) -> processes.Process:
        path = state.hosts[0].run_dir / "agent.json"
        record = until(lambda: read_json(path))
        return processes.Process(record["pid"], record["start_ticks"])
