"""Tests of sweeps on the command line: real runs with one directory each, and one table."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Sequence
from typing import Any

import pytest
from support.launch_lab import Lab
from support.waiting import PATIENCE_SECONDS, wait_for

from flagscale.launcher.state import RunState, load_state
from flagscale.launcher.sweep_runs import find_sweep

pytestmark = pytest.mark.integration

PROGRAM = """\
import os, sys, time
from flagscale.status import StatusWriter
seed = int(sys.argv[sys.argv.index("--seed") + 1])
status = StatusWriter.from_environment(int(os.environ["RANK"]))
for event in ("started", "joined", "ready"):
    status.write(event)
status.write("progress", step=3, train_steps=3, loss=seed / 4, tokens_per_second=1000 * seed)
if seed > 100:
    time.sleep(600)
sys.exit(5 if seed == 3 else 0)
"""


@pytest.fixture
def sweep_lab(lab: Lab) -> Lab:
    lab.configure(PROGRAM, light=True, runner={"nproc_per_node": 1, "stop_grace": 3})
    return lab


def run_sweep(lab: Lab, action: str, *words: str) -> tuple[int, list[dict[str, Any]], str]:
    """Run an action of a sweep; return the exit code, one record per run, and stderr."""
    result = lab.run_action(action, "-m", "json=true", *words)
    return result.returncode, json.loads(result.stdout or "[]"), result.stderr


def read_states(lab: Lab, seeds: Sequence[int]) -> list[RunState]:
    """Return the states of the runs of a sweep."""
    states = [load_state(lab.exp_dir / f"seed={n}" / "logs" / "state.json") for n in seeds]
    return [state for state in states if state is not None]


def test_a_sweep_from_its_plan_to_its_table(sweep_lab: Lab) -> None:
    seeds = "+train.model.seed=1,2,3"
    _, plan_output, _ = run_sweep(sweep_lab, "dryrun", seeds)
    assert not sweep_lab.exp_dir.exists()
    assert [(run["world_size"], run["values"]) for run in plan_output] == [
        (1, {"train.model.seed": n}) for n in "123"
    ]
    code, run_output, messages = run_sweep(sweep_lab, "run", seeds, "--jobs", "2")
    # The exit code is that of the worst run, which did not prevent the others from starting.
    assert code == 5, messages
    assert [(run["state"], run["loss"], run["tokens_per_second"]) for run in run_output] == [
        ("completed", 0.25, 1000),
        ("completed", 0.5, 2000),
        ("failed", 0.75, 3000),
    ]
    assert "exit code 5" in run_output[2]["trouble"]
    assert [run["exp_dir"] for run in run_output] == [
        f"{sweep_lab.exp_dir}/seed={n}" for n in "123"
    ]
    assert [run["exp_dir"] for run in run_output] == [run["exp_dir"] for run in plan_output]
    assert "[3/3] seed=3: starts in" in messages
    assert messages.count("checks the arguments") == 1
    # The same overrides find the runs that were started.
    code, query_output, _ = run_sweep(sweep_lab, "query", "+train.model.seed=3,4")
    assert (code, [run["state"] for run in query_output]) == (0, ["failed", "not started"])
    assert query_output[0]["run_id"] == run_output[2]["run_id"]
    result = sweep_lab.run_action("query", "-m", seeds)
    assert "* the best of the completed runs by training loss (0.2500): seed=1" in result.stdout
    (line,) = (line for line in result.stdout.splitlines() if line.split()[:1] == ["2"])
    expected = ["2", "completed", "3", "0.5000", "2,000", run_output[1]["run_id"]]
    assert line.split()[:6] == expected, result.stdout
    # The sweep's directory names the same runs.
    sweep = find_sweep(str(sweep_lab.exp_dir))
    assert sweep is not None
    sweep.query()
    assert [run.to_json() | {"best": run is sweep.runs[0]} for run in sweep.runs] == run_output


def test_no_run_starts_when_one_of_the_sweep_is_wrong(sweep_lab: Lab) -> None:
    for overrides, message in (
        (("experiment.runner.nproc_per_node=1,0",), "from 1 to 65536, found 0 (with nproc"),
        (("action=logs", "+train.model.seed=1,2"), "with -m there are run, dryrun, query, stop"),
        (
            ("follow=true", "+train.model.seed=1,2"),
            "follow: is of one run; with -m there are json and csv",
        ),
    ):
        result = sweep_lab.run_action("run", "-m", *overrides)
        assert result.returncode == 2
        assert message in result.stderr
    result = sweep_lab.run_action("run", "--jobs", "2")
    assert (result.returncode, "--jobs needs -m" in result.stderr) == (2, True)
    assert not sweep_lab.exp_dir.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_the_started_runs(sweep_lab: Lab, number: int) -> None:
    launcher = sweep_lab.start("run", "-m", "--jobs", "2", "+train.model.seed=101,102,103")
    states = [sweep_lab.exp_dir / f"seed={n}" / "logs" / "state.json" for n in (101, 102)]
    wait_for(lambda: all(path.exists() for path in states))
    launcher.send_signal(number)
    out, _ = launcher.communicate(timeout=PATIENCE_SECONDS)
    assert launcher.returncode == 128 + number, out
    assert out.count(" stopped ") == 2
    assert " not started " in out
    for path in states:
        state = load_state(path)
        assert state is not None
        assert [host.exit_record().get("left") for host in state.hosts] in ([[]], [None])
    assert not (sweep_lab.exp_dir / "seed=103").exists()


def test_slow_runs_are_stopped_in_parallel(sweep_lab: Lab) -> None:
    """A second signal reports the runs that are still alive."""
    ignoring_term = PROGRAM.replace("import os,", "import signal, os,").replace(
        "seed = int", "signal.signal(signal.SIGTERM, ignore)\nseed = int"
    )
    ignoring_term = f"def ignore(*_):\n    print('ignored', flush=True)\n{ignoring_term}"
    sweep_lab.configure(ignoring_term, light=True, runner={"nproc_per_node": 1, "stop_grace": 10})
    seeds = "+train.model.seed=301,302,303"
    launcher = sweep_lab.start("run", "-m", "--jobs", "3", seeds)
    wait_for(lambda: [run["step"] for run in run_sweep(sweep_lab, "query", seeds)[1]] == [3] * 3)
    launcher.send_signal(signal.SIGINT)
    outputs = [state.hosts[0].output for state in read_states(sweep_lab, (301, 302, 303))]
    wait_for(lambda: all("ignored" in output.read_text() for output in outputs))
    launcher.send_signal(signal.SIGINT)
    out, _ = launcher.communicate(timeout=PATIENCE_SECONDS)
    assert launcher.returncode == 130, out
    (line,) = (line for line in out.splitlines() if "these may live on: " in line)
    ids = {run["run_id"] for run in run_sweep(sweep_lab, "query", seeds)[1]}
    assert set(line.partition("on: ")[2].partition(";")[0].split(", ")) == ids
    start_time = time.monotonic()
    code, stop_output, messages = run_sweep(sweep_lab, "stop", seeds)
    assert (code, [run["state"] for run in stop_output]) == (0, ["stopped"] * 3), messages
    # Each is killed after its grace period and five seconds.
    assert time.monotonic() - start_time < 3 * 10


def test_sweep_is_stopped_by_its_own_overrides(sweep_lab: Lab) -> None:
    seeds = "+train.model.seed=201,202"
    launcher = sweep_lab.start("run", "-m", "--jobs", "2", seeds)
    wait_for(
        lambda: [run["state"] for run in run_sweep(sweep_lab, "query", seeds)[1]] == ["running"] * 2
    )
    code, stop_output, _ = run_sweep(sweep_lab, "stop", seeds)
    assert (code, [run["state"] for run in stop_output]) == (0, ["stopped", "stopped"])
    out, _ = launcher.communicate(timeout=PATIENCE_SECONDS)
    assert launcher.returncode == 143, out
