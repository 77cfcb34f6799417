"""Tests of whole jobs under torchrun, through the command line; each starts one at most.

Where the test is about the launcher and its agent, a torchrun without torch starts the ranks.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any

import pytest
from support.launch_lab import Lab, rank_processes, wait_for_line
from support.waiting import PATIENCE_SECONDS, wait_for

from flagscale.hosts import processes

pytestmark = pytest.mark.integration

# A program that reports its status. TOY_PLAN contains the behavior of each rank.
REPORTING = """
import os, sys, time, traceback
from flagscale.status import StatusWriter

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
plan = os.environ.get("TOY_PLAN", "sleep,sleep").split(",")[rank]
status = StatusWriter.from_environment(rank)
status.write("started", rank=rank, pid=os.getpid(), world_size=world)
print("hello from", rank, flush=True)
if plan == "raise":
    try:
        raise ValueError("bad data in shard 7")
    except ValueError as error:
        status.write("failed", kind="ValueError", message=str(error),
                     traceback=traceback.format_exc())
        raise
if plan == "hang":
    time.sleep(600)
status.write("joined", backend="gloo", seconds=0.1)
for step in range(1, 4):
    status.write("progress", step=step, train_steps=3, loss=1 / step, tokens_per_second=1000 * step)
if plan == "sleep":
    time.sleep(600)
status.write("finished", step=3, reason="completed")
"""

SILENT = """
import os, sys, time
rank = int(os.environ["RANK"])
print("silent", rank, flush=True)
if os.environ.get("TOY_FAIL") == str(rank):
    sys.exit(3)
time.sleep(float(os.environ.get("TOY_SECONDS", "600")))
"""

JOINING = """
import os, time
from flagscale.status import StatusWriter
StatusWriter.from_environment(int(os.environ["RANK"])).write("joined", backend="none")
time.sleep(600)
"""

SAVING = """
import signal, subprocess, sys, time
helper = subprocess.Popen(["sleep", "600"])
def save(*_):
    time.sleep(0.5)
    print("saved, helper", "dead" if helper.poll() is not None else "alive", flush=True)
    helper.terminate()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(600)
"""

GLOO = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
print("joined", flush=True)
while True:
    dist.all_reduce(torch.ones(1000))
"""

FOREIGN = """
import subprocess, sys
told = '''
import flagscale, megatron.core, megatron.training
print(flagscale.WHOSE, megatron.core.WHOSE, megatron.training.WHOSE, sep=", ", flush=True)
'''
exec(told)
subprocess.run([sys.executable, "-c", told], cwd="/", check=True)  # as a loader of its own would be
"""


def query(lab: Lab) -> dict[str, Any]:
    result = lab.run_action("query", "json=true")
    assert result.returncode == 0, result.stderr
    return dict(json.loads(result.stdout))


def test_a_run_from_start_to_stop(lab: Lab) -> None:
    lab.configure(REPORTING)
    start_result = lab.run_action("run")
    assert start_result.returncode == 0, start_result.stderr
    state = lab.state()
    assert f"run {state.run_id} of lab: 2 rank(s) joined" in start_result.stdout
    assert state.hosts[0].script.name in start_result.stdout

    # The launcher waits until the ranks have joined, and the steps follow.
    snapshot = wait_for(lambda: (record := query(lab))["step"] == 3 and record)
    assert (snapshot["state"], snapshot["joined"], snapshot["step"], snapshot["train_steps"]) == (
        "running",
        2,
        3,
        3,
    )
    assert snapshot["tokens_per_second"] == 3000
    assert "running" in lab.run_action("query").stdout

    second_result = lab.run_action("run")
    assert second_result.returncode == 1
    assert state.run_id in second_result.stderr

    wait_for(lambda: lab.output().count("hello from") == 2)  # torchrun copies it a moment later
    assert "localhost:1: hello from 1" in lab.run_action("logs").stdout
    assert lab.run_action("logs", "rank=1").stdout == "localhost:1: hello from 1\n"
    assert len(lab.run_action("logs", "lines=1").stdout.splitlines()) == 1
    wrong_result = lab.run_action("logs", "rank=2")
    assert wrong_result.returncode == 2
    assert "ranks 0 to 1" in wrong_result.stderr

    follower = lab.start("logs", "follow=true")
    watcher = lab.start("query", "follow=true")
    stop_result = lab.run_action("stop")
    assert stop_result.returncode == 0, stop_result.stderr
    assert lab.run_processes() == []
    assert "stopped in" in stop_result.stdout
    assert "nothing to stop" in lab.run_action("stop").stdout
    assert "hello from 0" in follower.communicate(timeout=PATIENCE_SECONDS)[0]
    assert follower.returncode == 0
    assert "stopped" in watcher.communicate(timeout=PATIENCE_SECONDS)[0]
    assert watcher.returncode == 0
    snapshot = query(lab)
    assert (snapshot["state"], snapshot["exit_code"], snapshot["failure"]) == ("stopped", 143, None)
    for name in ("plan.json", "config.yaml", "overrides.yaml"):
        assert (lab.layout.scripts / name).is_file()


def test_stop_signals_ranks_but_not_their_helpers(lab: Lab) -> None:
    """A rank's data loaders must not get the signal: the rank needs them to finish its step."""
    lab.configure(SAVING, light=True, runner={"stop_grace": 20})
    assert lab.run_action("run").returncode == 0
    wait_for(lambda: lab.output().count("ready") == 2)
    assert lab.run_action("stop").returncode == 0
    assert lab.run_processes() == []
    assert lab.output().count("saved, helper alive") == 2
    snapshot = query(lab)
    assert (snapshot["state"], snapshot["exit_code"]) == ("stopped", 0)


def test_failure_at_the_start_is_reported_at_once(lab: Lab) -> None:
    lab.configure(REPORTING, envs={"TOY_PLAN": "hang,raise"})
    result = lab.run_action("run")
    assert result.returncode == 1
    assert (
        "localhost: rank 1 failed: ValueError: bad data in shard 7 (exit code 1)" in result.stderr
    )
    assert "Traceback (most recent call last)" in result.stderr
    assert "stderr.log" in result.stderr
    lab.wait_until_ended()
    snapshot = query(lab)
    assert snapshot["state"] == "failed"
    assert (snapshot["failure"]["rank"], snapshot["failure"]["exit_code"]) == (1, 1)


def test_a_silent_program_that_fails_at_the_start(lab: Lab) -> None:
    lab.configure(SILENT, envs={"TOY_FAIL": "1"})
    result = lab.run_action("run")
    assert result.returncode == 1
    assert "localhost: rank 1 ended with exit code 3" in result.stderr
    lab.wait_until_ended()


def test_ranks_that_do_not_join_in_time(lab: Lab) -> None:
    lab.configure(
        REPORTING,
        light=True,
        envs={"TOY_PLAN": "sleep,hang"},
        runner={"start_timeout": 12, "stop_grace": 1},
    )
    result = lab.run_action("run")
    assert result.returncode == 1
    assert "not every rank joined within 12 s; missing: 1" in result.stderr
    assert "start_timeout" in result.stderr
    assert lab.run_processes() == []


def test_the_foreground_shows_lines_and_returns_the_jobs_code(lab: Lab) -> None:
    lab.configure(SILENT, envs={"TOY_FAIL": "0"})
    result = lab.run_action("test")
    assert result.returncode == 1
    assert "localhost:0: silent 0\n" in result.stdout
    assert "localhost: flagscale: run" in result.stdout
    assert query(lab)["failure"]["exit_code"] == 3


def test_the_foreground_ends_well(lab: Lab) -> None:
    lab.configure(REPORTING, envs={"TOY_PLAN": "end,end"}, runner={"foreground": True})
    result = lab.run_action("run")
    assert result.returncode == 0, result.stdout
    snapshot = query(lab)
    assert (snapshot["state"], snapshot["exit_code"], snapshot["step"]) == ("completed", 0, 3)


def test_other_checkout_uses_its_own_packages(lab: Lab) -> None:
    """The agent uses this project's packages, although both have a package and working directory of
    that name.
    """
    theirs = {
        "flagscale/__init__.py": "WHOSE = 'their flagscale'",
        "flagscale/train/train_gpt.py": FOREIGN,
        "third_party/Megatron-LM/megatron/core/__init__.py": "WHOSE = 'their core'",
        "third_party/Megatron-LM/megatron/training/__init__.py": "WHOSE = 'their training'",
    }
    for name, text in theirs.items():
        (lab.root / name).parent.mkdir(parents=True, exist_ok=True)
        (lab.root / name).write_text(text, encoding="utf-8")
    record_file = lab.root / "told"
    lab.configure(
        "",
        light=True,
        task={"entrypoint": "flagscale/train/train_gpt.py"},
        runner={
            "notify": {"command": f"cat >'{record_file}'", "on": ["finished"]},
            "nproc_per_node": 1,
        },
    )
    result = lab.run_action("test")
    assert result.returncode == 0, result.stdout + result.stderr
    assert lab.output().count("their flagscale, their core, their training") == 2
    assert json.loads(record_file.read_text(encoding="utf-8"))["event"] == "finished"


def test_interrupt_of_a_start_says_that_the_run_is_stopped(lab: Lab) -> None:
    """Its ranks take no step, so the launcher waits for the first one."""
    lab.configure(JOINING, light=False, runner={"wait_for": "step"})
    launcher = lab.start("run")
    wait_for_line(launcher, "waiting for the first step")
    launcher.send_signal(signal.SIGINT)
    output, _ = launcher.communicate(timeout=PATIENCE_SECONDS)
    assert launcher.returncode == 130
    assert "interrupted before it had started: stopping run " in output
    assert "Traceback" not in output
    lab.wait_until_ended()


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_interrupt_in_the_foreground(lab: Lab, number: signal.Signals, code: int) -> None:
    """The run ends with its launcher, even if the launcher is killed."""
    lab.configure(SILENT, light=True)
    launcher = lab.start("test")
    wait_for_line(launcher, "silent")
    launcher.send_signal(number)
    output, errors = launcher.communicate(timeout=PATIENCE_SECONDS)
    assert launcher.returncode == code
    texts = f"{output}{errors or ''}"
    assert "Traceback" not in texts
    assert ("stopping run" in texts) == (number is not signal.SIGKILL)
    if number is signal.SIGKILL:
        lab.wait_until_ended()
    assert lab.run_processes() == []
    assert query(lab)["state"] == "stopped"


def test_foreground_distinguishes_a_stop_from_success(lab: Lab) -> None:
    """Ranks that save and exit with 0 because of a stop elsewhere have not completed the job."""
    lab.configure(SAVING, light=True, runner={"stop_grace": 20})
    launcher = lab.start("test")
    wait_for(lambda: lab.layout.state.exists() and lab.output().count("ready") == 2)
    assert lab.run_action("stop").returncode == 0
    output, _ = launcher.communicate(timeout=PATIENCE_SECONDS)
    assert launcher.returncode == 143
    assert f"run {lab.state().run_id} was stopped" in output


@pytest.mark.parametrize("victim", ["worker", "torchrun", "agent"])
def test_killed_process_of_the_run(lab: Lab, victim: str) -> None:
    """No process is left, before and after a stop; a killed rank is the first failure."""
    lab.configure(SILENT, runner={"stop_grace": 1})
    assert lab.run_action("run").returncode == 0
    state = lab.state()
    worker = rank_processes(state)[1]
    torchrun = processes.parent_pid_of(worker.pid)
    assert torchrun is not None
    agent = processes.parent_pid_of(torchrun)
    assert agent is not None
    pid = {"worker": worker.pid, "torchrun": torchrun, "agent": agent}[victim]
    os.kill(pid, signal.SIGKILL)
    lab.wait_until_ended()
    stop_result = lab.run_action("stop")
    assert stop_result.returncode == 0
    assert lab.run_processes() == []
    snapshot = query(lab)
    assert snapshot["state"] == "failed"
    failure = snapshot["failure"]
    if victim == "worker":
        assert (failure["rank"], failure["exit_code"]) == (1, -9)
        assert "SIGKILL" in failure["reason"]
    else:
        assert failure["rank"] is None
        assert "SIGKILL" in failure["reason"]


def test_stop_after_everything_that_supervises_was_killed(lab: Lab) -> None:
    lab.configure(SILENT, light=True, runner={"stop_grace": 1})
    assert lab.run_action("run").returncode == 0
    state = lab.state()
    ranks = rank_processes(state)
    supervisors = [p for p in processes.find_run_processes(state.run_id) if p not in ranks.values()]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for process in supervisors:
            processes.send_signal(process, number)
    wait_for(lambda: len(lab.run_processes()) == len(ranks))
    assert query(lab)["state"] == "running"
    assert lab.run_action("stop").returncode == 0
    assert lab.run_processes() == []
    assert query(lab)["state"] == "stopped"


@pytest.mark.torch
def test_a_killed_rank_is_named_and_not_the_one_that_lost_its_connection(lab: Lab) -> None:
    lab.configure(GLOO)
    assert lab.run_action("run").returncode == 0
    state = lab.state()
    wait_for(lambda: lab.output().count("joined") == 2)
    os.kill(rank_processes(state)[1].pid, signal.SIGKILL)
    lab.wait_until_ended()
    failure = query(lab)["failure"]
    assert (failure["rank"], failure["exit_code"]) == (1, -9)


def test_stop_does_not_end_another_runs_torchrun(lab: Lab) -> None:
    lab.configure(SILENT)
    arguments = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1"]
    other_torchrun = subprocess.Popen(
        [sys.executable, *arguments, str(lab.root / "program.py")],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert other_torchrun.stdout is not None
        assert "silent 0" in other_torchrun.stdout.readline()
        assert lab.run_action("run").returncode == 0
        assert lab.run_action("stop").returncode == 0
        assert lab.run_processes() == []
        assert other_torchrun.poll() is None
        assert processes.identify_process(other_torchrun.pid) is not None
    finally:
        other_torchrun.terminate()
        other_torchrun.communicate(timeout=PATIENCE_SECONDS)


def test_a_space_in_every_path(spaced_lab: Lab) -> None:
    spaced_lab.configure(REPORTING, envs={"TOY_PLAN": "end,end"})
    result = spaced_lab.run_action("test")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "localhost:0: hello from 0" in result.stdout


def test_launcher_killed_while_waiting(lab: Lab) -> None:
    lab.configure(REPORTING, light=True, envs={"TOY_PLAN": "hang,hang"})
    launcher = lab.start("run")
    # Until a program has reported anything, it counts as one that never reports.
    wait_for(lambda: lab.layout.state.exists() and lab.output().count("hello from") == 2)
    launcher.kill()
    launcher.communicate()
    assert query(lab)["state"] == "starting"
    assert lab.run_action("stop").returncode == 0
    assert lab.run_processes() == []


def test_of_two_launches_at_once_one_is_refused(lab: Lab) -> None:
    lab.configure(REPORTING)
    launchers = [lab.start("run") for _ in range(2)]
    outputs = [launcher.communicate(timeout=PATIENCE_SECONDS)[0] for launcher in launchers]
    assert sorted(launcher.returncode for launcher in launchers) == [0, 1]
    assert any(f"run {lab.state().run_id} of lab is alive" in text for text in outputs)
