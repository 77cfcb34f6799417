"""Tests of ``action=auto_tune``: searches whose trials are runs of this machine.

Most use a torchrun that needs no torch, whose ranks report steps of a known duration.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.launch_lab import LIGHT_TORCHRUN, Lab
from support.training_lab import LLAMA, PROGRAM
from support.waiting import wait_for

from flagscale.hosts import processes
from flagscale.launcher.layout import STATUS_DIRECTORY, Layout
from flagscale.launcher.state import load_state
from flagscale.status import list_status_files, read_events

pytestmark = pytest.mark.integration

RANK = """\
import json, os, sys, time
from flagscale.status import BETWEEN_TRIALS, TRIALS_VARIABLE, StatusWriter

status = StatusWriter.from_environment(int(os.environ["RANK"]))

def train(arguments, is_first):
    def number(flag):
        return int(arguments[arguments.index(flag) + 1]) if flag in arguments else 1
    micro, tensor = number("--micro-batch-size"), number("--tensor-model-parallel-size")
    status.write("ready")
    if micro >= 4 or os.path.exists("weary") and not is_first:
        message = "CUDA out of memory. Tried to allocate 1 GiB"
        status.write("failed", kind="OutOfMemoryError", message=message, traceback="")
        sys.exit(1)
    if os.path.exists("broken"):
        status.write("failed", kind="ValueError", message="no such data", traceback="")
        sys.exit(1)
    seconds = (0.04 if micro == 1 else 0.03) * (1 if tensor == 1 else 2)
    if os.path.exists("later-is-slower") and os.environ["RANK"] == "0":
        seen = f"seen-{micro}-{tensor}"
        seconds *= 1.5 if os.path.exists(seen) else 1.0
        open(seen, "a").close()
    for step in range(1, number("--exit-interval") + 1):
        time.sleep(60 if os.path.exists("slow") else 0.02)
        if os.environ["RANK"] == "0":
            status.write(
                "progress", step=step, train_steps=100, loss=1.0, step_seconds=seconds
            )
    return step

def await_order(trials):
    if os.environ["RANK"] == "0":  # real ranks wait when all have finished
        status.write_progress(trials, BETWEEN_TRIALS)
    path = f"{os.environ[TRIALS_VARIABLE]}/{trials + 1}.json"
    while not os.path.exists(path):
        time.sleep(0.02)
    if os.environ["RANK"] == "0":
        status.write_progress(0, "starting")
    return json.load(open(path))["arguments"]

for event in ("started", "joined"):
    status.write(event)
step, trials = train(sys.argv, True), 1
while TRIALS_VARIABLE in os.environ and (arguments := await_order(trials)):
    step, trials = train(arguments, False), trials + 1
status.write("finished", step=step, reason="exit-interval")
"""


SMALL = "experiment.auto_tuner.space.micro_batch_size=[1,2]"
"""Micro-batches with which no rank runs out of memory."""


@pytest.fixture
def tuning_lab(lab: Lab) -> Lab:
    package = lab.root / "light" / "torch" / "distributed"
    package.mkdir(parents=True)
    for directory in (package, package.parent):
        (directory / "__init__.py").touch()
    rank = lab.root / "rank.py"
    rank.write_text(RANK, encoding="utf-8")
    # The ranks run this file in place of the training program, with its arguments.
    text = LIGHT_TORCHRUN.replace("logs = Path(", f"command[0] = {str(rank)!r}\nlogs = Path(", 1)
    (package / "run.py").write_text(text, encoding="utf-8")
    configure(lab, envs={"PYTHONPATH": str(package.parents[1])})
    return lab


def configure(lab: Lab, **experiment: Any) -> None:
    model = {**LLAMA["model"], "global_batch_size": 8}
    lab.configure(
        "",
        task={"entrypoint": str(PROGRAM)},
        train={**LLAMA, "system": {**LLAMA["system"], "device": "cpu"}, "model": model},
        auto_tuner={
            "space": {"context_parallel_size": [1], "pipeline_model_parallel_size": [1]},
            "control": {"train_iters": 4, "interval": 0.1},
        },
        **experiment,
    )


def tune(lab: Lab, *words: str) -> dict[str, Any]:
    result = lab.run_action("auto_tune", "json=true", *words, timeout=300)
    assert result.returncode == 0, result.stderr
    answer: dict[str, Any] = json.loads(result.stdout)
    return {**answer, "stderr": result.stderr}


def trials_of(lab: Lab) -> list[dict[str, Any]]:
    path = lab.exp_dir / "auto_tuner" / "trials.json"
    if not path.exists():
        return []
    trials: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["trials"]
    return trials


def test_search_from_its_trials_to_a_yaml_that_runs(tuning_lab: Lab) -> None:
    answer = tune(tuning_lab)
    assert answer["best"].startswith("tp1 pp1 mbs2")
    assert "train.model.micro_batch_size=2" in answer["overrides"]
    states = {row["name"]: row for row in answer["trials"]}
    failed = [row for row in states.values() if row["state"] == "failed"]
    # Micro-batches of 4 prove that those of 8 do not fit either.
    assert failed
    assert all(
        "out of memory" in row["why"] and row["layout"]["micro_batch_size"] == 4
        for row in failed
        if row["layout"]["tensor_model_parallel_size"] == 1
    )
    assert all("seconds" not in row for row in failed)
    best = Path(answer["yaml"])
    config = yaml.safe_load(best.read_text(encoding="utf-8"))
    assert config["experiment"]["exp_dir"] == str(tuning_lab.exp_dir)
    assert (best.parent / "history.csv").read_text(encoding="utf-8").count("\n") == 1 + len(states)
    # Another call answers from the records, and with other data begins again.
    count = len(trials_of(tuning_lab))
    again = tune(tuning_lab)
    assert (again["best"], len(trials_of(tuning_lab))) == (answer["best"], count)
    changed = tune(
        tuning_lab,
        "train.model.hidden_size=64",
        "experiment.auto_tuner.space.micro_batch_size=[2]",
        "experiment.auto_tuner.control.max_trials=1",
    )
    assert "of another model" in changed["stderr"]
    assert len(trials_of(tuning_lab)) == 1


def test_a_repeat_is_whole_even_if_it_is_slower(tuning_lab: Lab) -> None:
    (tuning_lab.root / "later-is-slower").touch()
    tune(tuning_lab, SMALL, "experiment.auto_tuner.control.max_trials=8")
    by_layout: dict[str, list[str]] = {}
    for trial in trials_of(tuning_lab):
        by_layout.setdefault(str(trial["setting"]), []).append(trial["state"])
    repeated = [states for states in by_layout.values() if len(states) > 1]
    assert repeated
    assert all(states == ["measured", "measured"] for states in repeated), by_layout


def test_failure_in_processes_of_another_layout_is_tested_in_new_ones(tuning_lab: Lab) -> None:
    (tuning_lab.root / "weary").touch()
    answer = tune(tuning_lab, SMALL, "experiment.auto_tuner.algo.name=grid")
    assert "again in new processes" in answer["stderr"]
    assert {trial["state"] for trial in trials_of(tuning_lab)} == {"measured"}
    assert {trial["run"] for trial in trials_of(tuning_lab)} == {0}


def test_killed_search_leaves_no_trial_and_goes_on(tuning_lab: Lab) -> None:
    (tuning_lab.root / "slow").touch()
    search = tuning_lab.start("auto_tune", SMALL)
    trial_state = tuning_lab.exp_dir / "auto_tuner" / "trial_001"
    state = wait_for(lambda: load_state(Layout(trial_state).state))
    wait_for(lambda: processes.find_ranks(processes.find_run_processes(state.run_id)))
    assert [trial["state"] for trial in trials_of(tuning_lab)] == ["running"]
    second = tuning_lab.run_action("auto_tune", SMALL)
    assert "another auto_tune is searching" in second.stderr
    search.send_signal(signal.SIGKILL)
    search.wait()
    wait_for(lambda: not processes.find_run_processes(state.run_id))
    (tuning_lab.root / "slow").unlink()
    answer = tune(tuning_lab, SMALL, "experiment.auto_tuner.control.max_trials=3")
    assert [trial["state"] for trial in trials_of(tuning_lab)].count("running") == 0
    assert "3 trials" in answer["reason"]


KILLS = 12


def live_trials(lab: Lab) -> list[str]:
    """Return the runs of trials of which any process is alive."""
    states = (load_state(Layout(path).state) for path in lab.exp_dir.glob("auto_tuner/trial_*"))
    runs = [state.run_id for state in states if state is not None]
    return [run for run in runs if processes.find_run_processes(run)]


@pytest.mark.slow
def test_kills_at_any_moment_leave_no_trial_and_lose_none(tuning_lab: Lab) -> None:
    delays = random.Random(36)
    words = (SMALL, "experiment.auto_tuner.algo.name=grid")
    finished, moments = 0, 0
    for number in range(KILLS):
        # The parent is a shell, as in a terminal or a script; killing it does not end the search.
        command = [*tuning_lab.command("action=auto_tune", *words)]
        shell = subprocess.Popen(
            ["bash", "-c", '"$@" & echo $!; wait', "bash", *command],
            cwd=tuning_lab.root, env=tuning_lab.environment(),
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        assert shell.stdout is not None
        search = int(shell.stdout.readline())
        time.sleep(delays.uniform(0.2, 5.0))
        moments += bool(live_trials(tuning_lab))
        for pid in (shell.pid, search) if number % 2 else (search, shell.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shell.wait()
        shell.stdout.close()
        wait_for(lambda: not live_trials(tuning_lab), seconds=30)
        ended = sum(trial["state"] == "measured" for trial in trials_of(tuning_lab))
        assert ended >= finished
        finished = ended
    assert moments
    answer = tune(tuning_lab, *words)
    assert [t["failure"] for t in trials_of(tuning_lab) if t["state"] != "measured"] == []
    assert all(row["seconds"] > 0 for row in answer["trials"])


@pytest.mark.slow
def test_interrupted_search_ends_its_trial(tuning_lab: Lab) -> None:
    (tuning_lab.root / "slow").touch()
    search = tuning_lab.start("auto_tune", SMALL)
    trial_state = tuning_lab.exp_dir / "auto_tuner" / "trial_001"
    state = wait_for(lambda: load_state(Layout(trial_state).state))
    wait_for(lambda: processes.find_ranks(processes.find_run_processes(state.run_id)))
    search.send_signal(signal.SIGTERM)
    assert search.wait(60) == 128 + signal.SIGTERM
    assert processes.find_run_processes(state.run_id) == []
    assert trials_of(tuning_lab) == []


def test_failure_of_all_trials_is_reported_once(tuning_lab: Lab) -> None:
    (tuning_lab.root / "broken").touch()
    result = tuning_lab.run_action("auto_tune", SMALL)
    assert result.returncode == 1
    assert "no such data" in result.stderr
    assert "failed in the same way" in result.stderr
    assert [trial["state"] for trial in trials_of(tuning_lab)] == ["failed"] * 2


LIMITS = "experiment.auto_tuner.control.max_trials=2", "experiment.auto_tuner.algo.name=grid"


def losses_of_trials(lab: Lab, directory: str) -> list[list[float]]:
    """Return the losses of each trial that the processes of one directory have run."""
    state = load_state(Layout(lab.exp_dir / "auto_tuner" / directory).state)
    assert state is not None
    trials: list[list[float]] = []
    for event in read_events(next(list_status_files(state.hosts[0].run_dir / STATUS_DIRECTORY)))[0]:
        if event.event == "ready":
            trials.append([])
        elif event.event == "progress":
            trials[-1].append(event.get("loss"))
    return trials


@pytest.mark.torch
def test_layouts_with_the_same_groups_train_in_the_same_processes(lab: Lab) -> None:
    configure(lab)
    fixed = (
        "++experiment.auto_tuner.space.tensor_model_parallel_size=[2]",
        "++experiment.auto_tuner.space.sequence_parallel=[true]",
        "++experiment.auto_tuner.space.optimizer_cpu_offload=[false]",
        "nproc_per_node=2",
    )
    answer = tune(lab, *fixed, *LIMITS, "++experiment.auto_tuner.space.micro_batch_size=[4,8]")
    assert [row["state"] for row in answer["trials"]] == ["measured", "measured"], answer
    assert [trial["run"] for trial in trials_of(lab)] == [0, 1]
    assert not (lab.exp_dir / "checkpoints").exists()
    together = losses_of_trials(lab, "trial_001")
    sizes = [trial["setting"]["micro_batch_size"] for trial in trials_of(lab)]
    # In processes of its own, the second trial computes the same.
    lab.exp_dir = lab.exp_dir.with_name("alone")
    only = f"++experiment.auto_tuner.space.micro_batch_size=[{sizes[1]}]"
    tune(lab, *fixed, *LIMITS, only, f"experiment.exp_dir={lab.exp_dir}")
    assert len(together) == 2
    assert losses_of_trials(lab, "trial_001")[0] == together[1]
