"""A package of somebody else's: a runner whose hosts are the cells of a queue on this machine.

Tests install it under the name ``mine``. Jobs are files in the directory that the YAML gives as
``experiment.runner.mine.queue``; a worker, ``python -m queued DIRECTORY``, runs each and writes
down its exit code. What is here is all that a scheduler needs of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from flagscale.config.schema import Experiment
from flagscale.errors import ConfigError, Problem, RunStateError
from flagscale.files import read_json, write_atomic, write_json
from flagscale.hosts import processes
from flagscale.hosts.hostfile import Host
from flagscale.hosts.processes import Swept
from flagscale.launcher import snapshot
from flagscale.launcher.plan_builder import unprobed_plan
from flagscale.launcher.planning.model import HostPlan, LaunchPlan, RunnerHandle
from flagscale.launcher.planning.script import render
from flagscale.launcher.preflight.checks import Check
from flagscale.launcher.runners.base import Prepared, Texts
from flagscale.launcher.snapshot import Seen, Snapshot
from flagscale.launcher.state import (
    RunState,
    alive_message,
    keep_plan,
    load_state,
    start_lock,
    state_of,
)
from flagscale.launcher.stop_result import Stopped, record_stop

WORKER = "worker"


class QueueRunner:
    def plan(self, experiment: Experiment) -> LaunchPlan:
        settings = experiment.runner.settings
        if "queue" not in settings:
            raise ConfigError(Problem("experiment.runner.mine.queue", "is required"))
        count = experiment.runner.nnodes or 1
        cells = [Host(f"cell-{n}", addr=f"127.0.0.{n + 1}") for n in range(count)]
        return unprobed_plan(experiment, cells, RunnerHandle("mine", settings), here=False)

    @contextmanager
    def prepare(
        self, experiment: Experiment, *, checking: bool, fresh: bool = False
    ) -> Iterator[Prepared]:
        made = self.plan(experiment)
        there = Path(made.runner.handle["queue"], WORKER).exists()
        checks = [Check("worker", there, "waits for jobs" if there else "there is none")]
        yield Prepared(made, checks if checking else [])

    def submit(self, plan: LaunchPlan, texts: Texts, *, foreground: bool) -> RunState:
        with start_lock(plan.layout):
            previous = load_state(plan.layout.state)
            if previous is not None and not self.ended(previous):
                message, hint = alive_message(previous)
                raise RunStateError(message, hint=hint)
            keep_plan(plan, texts.config, texts.overrides)
            jobs = [f"{plan.run_id}.{host.node_rank}" for host in plan.hosts]
            runner = RunnerHandle("mine", {**plan.runner.handle, "jobs": jobs})
            state = replace(state_of(plan), runner=runner)
            state.save(plan.layout.state)
            for host, job in zip(plan.hosts, _jobs(state), strict=True):
                write_atomic(host.script, render(plan, host), mode=0o700)
                write_json(job, _job(plan, host))
        return state

    def await_hosts(self, state: RunState) -> RunState:
        return state

    def query(self, state: RunState, *, with_lines: bool = False) -> Snapshot:
        seen = {n: Seen("" if _code(job) is not None else "script") for n, job in _each(state)}
        return snapshot.take(state, seen, with_lines=with_lines)

    def bring_output(self, state: RunState) -> None:
        pass

    def ended(self, state: RunState, *, any_host: bool = False) -> bool:
        gone = [_code(job) is not None for job in _jobs(state)]
        return any(gone) if any_host else all(gone)

    def rank_count(self, state: RunState) -> int:
        return len(processes.ranks(processes.members(state.run_id)))

    def wait(self, state: RunState) -> int:
        while not self.ended(state):
            time.sleep(processes.POLL_SECONDS)
        return max(_code(job) or 0 for job in _jobs(state))

    def stop(self, state: RunState) -> Stopped:
        living = {state.hosts[n].name: job for n, job in _each(state) if _code(job) is None}
        if not living:
            return Stopped()
        unrecorded = record_stop(replace(state, stop_requested=round(time.time(), 3)))
        for job in living.values():
            job.with_suffix(".cancel").touch()
        self.wait(state)
        return Stopped({name: Swept() for name in living}, unrecorded=unrecorded)

    def close(self) -> None:
        pass


def _job(plan: LaunchPlan, host: HostPlan) -> dict[str, Any]:
    secrets = {value.name: value.value for value in host.environment if value.secret}
    return {
        "script": str(host.script),
        "output": str(host.output),
        "run_dir": str(host.run_dir),
        "environment": {**secrets, "FLAGSCALE_RUN_ID": plan.run_id},
    }


def _jobs(state: RunState) -> list[Path]:
    handle = state.runner.handle
    return [Path(handle["queue"], f"{job}.job") for job in handle["jobs"]]


def _each(state: RunState) -> Iterator[tuple[int, Path]]:
    return enumerate(_jobs(state))


def _code(job: Path) -> int | None:
    """The exit code of a job; None while it waits or runs."""
    record = read_json(job.with_suffix(".exit"))
    return None if record is None else int(record["code"])


def work(queue: Path) -> None:
    """Run the jobs of a queue, until this process is ended."""
    running: dict[Path, subprocess.Popen[bytes]] = {}
    (queue / WORKER).touch()
    while True:
        for job in queue.glob("*.job"):
            if job not in running:
                running[job] = _begin(read_json(job) or {})
            child = running[job]
            cancel, ended = job.with_suffix(".cancel"), job.with_suffix(".exit")
            if cancel.exists() and child.poll() is None:
                child.terminate()
                cancel.unlink()
            if child.poll() is not None and not ended.exists():
                write_json(ended, {"code": child.returncode})
        time.sleep(processes.POLL_SECONDS)


def _begin(job: dict[str, Any]) -> subprocess.Popen[bytes]:
    Path(job["run_dir"]).mkdir(parents=True, exist_ok=True)
    with Path(job["output"]).open("ab") as output:
        return subprocess.Popen(
            ["bash", job["script"]],
            env={**os.environ, **job["environment"]},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


if __name__ == "__main__":
    work(Path(sys.argv[1]))
