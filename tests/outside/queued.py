"""A third-party package with a runner whose hosts are the cells of a queue on this machine.

Tests install it under the name ``mine``. Jobs are files in the directory
``experiment.runner.mine.queue``; a worker, ``python -m queued DIRECTORY``, runs each and records
its exit code. This is everything that a scheduler has to implement.
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
from flagscale.hosts.processes import KilledProcesses
from flagscale.launcher import snapshot
from flagscale.launcher.plan_builder import build_unprobed_plan
from flagscale.launcher.planning.model import HostPlan, LaunchPlan, RunnerHandle
from flagscale.launcher.planning.script import render
from flagscale.launcher.preflight.checks import Check
from flagscale.launcher.runners.base import ConfigTexts, PreparedRun
from flagscale.launcher.snapshot import HostObservation, Snapshot
from flagscale.launcher.state import (
    RunState,
    alive_message,
    load_state,
    make_state,
    save_plan,
    start_lock,
)
from flagscale.launcher.stop_result import StopResult, record_stop

WORKER = "worker"


class QueueRunner:
    """Runner that writes job files and reads the worker's exit files."""

    def plan(self, experiment: Experiment) -> LaunchPlan:
        settings = experiment.runner.settings
        if "queue" not in settings:
            raise ConfigError(Problem("experiment.runner.mine.queue", "is required"))
        count = experiment.runner.nnodes or 1
        cells = [Host(f"cell-{n}", addr=f"127.0.0.{n + 1}") for n in range(count)]
        return build_unprobed_plan(
            experiment, cells, RunnerHandle("mine", settings), is_local=False
        )

    @contextmanager
    def prepare(
        self, experiment: Experiment, *, checking: bool, fresh: bool = False
    ) -> Iterator[PreparedRun]:
        plan = self.plan(experiment)
        has_worker = Path(plan.runner.handle["queue"], WORKER).exists()
        checks = [Check("worker", has_worker, "waits for jobs" if has_worker else "there is none")]
        yield PreparedRun(plan, checks if checking else [])

    def submit(self, plan: LaunchPlan, texts: ConfigTexts, *, foreground: bool) -> RunState:
        with start_lock(plan.layout):
            previous = load_state(plan.layout.state)
            if previous is not None and not self.ended(previous):
                message, hint = alive_message(previous)
                raise RunStateError(message, hint=hint)
            save_plan(plan, **vars(texts))
            jobs = [f"{plan.run_id}.{host.node_rank}" for host in plan.hosts]
            runner = RunnerHandle("mine", {**plan.runner.handle, "jobs": jobs})
            state = replace(make_state(plan), runner=runner)
            state.save(plan.layout.state)
            for host, job in zip(plan.hosts, _job_paths(state), strict=True):
                write_atomic(host.script, render(plan, host), mode=0o700)
                write_json(job, _make_job_record(plan, host))
        return state

    def await_hosts(self, state: RunState) -> RunState:
        return state

    def query(self, state: RunState, *, with_lines: bool = False) -> Snapshot:
        observations = {
            n: HostObservation("" if _exit_code(job) is not None else "script")
            for n, job in _numbered_jobs(state)
        }
        return snapshot.take_snapshot(state, observations, with_lines=with_lines)

    def bring_output(self, state: RunState) -> None:
        pass

    def ended(self, state: RunState, *, any_host: bool = False) -> bool:
        ended_flags = [_exit_code(job) is not None for job in _job_paths(state)]
        return any(ended_flags) if any_host else all(ended_flags)

    def rank_count(self, state: RunState) -> int:
        return len(processes.find_ranks(processes.find_run_processes(state.run_id)))

    def wait(self, state: RunState) -> int:
        while not self.ended(state):
            time.sleep(processes.POLL_SECONDS)
        return max(_exit_code(job) or 0 for job in _job_paths(state))

    def stop(self, state: RunState) -> StopResult:
        active_jobs = {
            state.hosts[n].name: job for n, job in _numbered_jobs(state) if _exit_code(job) is None
        }
        if not active_jobs:
            return StopResult()
        unrecorded = record_stop(replace(state, stop_requested=round(time.time(), 3)))
        for job in active_jobs.values():
            job.with_suffix(".cancel").touch()
        self.wait(state)
        return StopResult({name: KilledProcesses() for name in active_jobs}, unrecorded=unrecorded)

    def close(self) -> None:
        pass


def _make_job_record(plan: LaunchPlan, host: HostPlan) -> dict[str, Any]:
    secrets = {value.name: value.value for value in host.environment if value.secret}
    return {
        "script": str(host.script),
        "output": str(host.output),
        "run_dir": str(host.run_dir),
        "environment": {**secrets, "FLAGSCALE_RUN_ID": plan.run_id},
    }


def _job_paths(state: RunState) -> list[Path]:
    handle = state.runner.handle
    return [Path(handle["queue"], f"{job}.job") for job in handle["jobs"]]


def _numbered_jobs(state: RunState) -> Iterator[tuple[int, Path]]:
    return enumerate(_job_paths(state))


def _exit_code(job: Path) -> int | None:
    """Return the exit code of a job; None while it is pending or running."""
    record = read_json(job.with_suffix(".exit"))
    return None if record is None else int(record["code"])


def work(queue: Path) -> None:
    """Run the jobs of a queue until this process is ended."""
    running: dict[Path, subprocess.Popen[bytes]] = {}
    (queue / WORKER).touch()
    while True:
        for job in queue.glob("*.job"):
            if job not in running:
                running[job] = _start_job(read_json(job) or {})
            child = running[job]
            cancel_file, exit_file = job.with_suffix(".cancel"), job.with_suffix(".exit")
            if cancel_file.exists() and child.poll() is None:
                child.terminate()
                cancel_file.unlink()
            if child.poll() is not None and not exit_file.exists():
                write_json(exit_file, {"code": child.returncode})
        time.sleep(processes.POLL_SECONDS)


def _start_job(job: dict[str, Any]) -> subprocess.Popen[bytes]:
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
