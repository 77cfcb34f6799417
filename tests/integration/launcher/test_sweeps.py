"""Sweeps by the command line: real runs, a directory each, one table."""

from __future__ import annotations

import json
import signal
import time
from typing import Any

import pytest
from support.launch_lab import Lab, until

from flagscale.launcher.state import load_state

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
def swept(lab: Lab) -> Lab:
    lab.configure(PROGRAM, light=True, runner={"nproc_per_node": 1, "stop_grace": 3})
    return lab


def rows(lab: Lab, action: str, *words: str) -> tuple[int, list[dict[str, Any]], str]:
    """What an action says of a sweep: the exit code, a record a run, and what stderr has."""
    done = lab.do(action, "-m", "json=true", *words)
    return done.returncode, json.loads(done.stdout or "[]"), done.stderr


def test_a_sweep_from_its_plan_to_its_table(swept: Lab) -> None:
    seeds = "+train.model.seed=1,2,3"
    _, planned, _ = rows(swept, "dryrun", seeds)
    assert not swept.exp_dir.exists()
    assert [(one["world_size"], one["values"]) for one in planned] == [
        (1, {"train.model.seed": n}) for n in "123"
    ]
    code, ran, told = rows(swept, "run", seeds, "--jobs", "2")
    # That of the worst, which kept none of the others from being tried.
    assert code == 5, told
    assert [(one["state"], one["loss"], one["tokens_per_second"]) for one in ran] == [
        ("completed", 0.25, 1000),
        ("completed", 0.5, 2000),
        ("failed", 0.75, 3000),
    ]
    assert "exit code 5" in ran[2]["trouble"]
    assert [one["exp_dir"] for one in ran] == [f"{swept.exp_dir}/seed={n}" for n in "123"]
    assert [one["exp_dir"] for one in ran] == [one["exp_dir"] for one in planned]
    assert "[3/3] seed=3: starts in" in told
    assert told.count("judges the arguments") == 1
    # Found again by the same words, as far as it was started.
    code, asked, _ = rows(swept, "query", "+train.model.seed=3,4")
    assert (code, [one["state"] for one in asked]) == (0, ["failed", "not started"])
    assert asked[0]["run_id"] == ran[2]["run_id"]
    shown = swept.do("query", "-m", seeds)
    (line,) = (line for line in shown.stdout.splitlines() if line.split()[:1] == ["2"])
    expected = ["2", "completed", "3", "0.5000", "2,000", ran[1]["run_id"]]
    assert line.split()[:6] == expected, shown.stdout


def test_nothing_starts_where_one_is_wrong(swept: Lab) -> None:
    for words, said in (
        (("experiment.runner.nproc_per_node=1,0",), "from 1 to 65536, found 0 (with nproc"),
        (("action=logs", "+train.model.seed=1,2"), "with -m there are run, dryrun, query, stop"),
        (("follow=true", "+train.model.seed=1,2"), "follow: is of one run; with -m there is json"),
    ):
        done = swept.do("run", "-m", *words)
        assert done.returncode == 2
        assert said in done.stderr
    done = swept.do("run", "--jobs", "2")
    assert (done.returncode, "give -m, too" in done.stderr) == (2, True)
    assert not swept.exp_dir.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_what_was_started(swept: Lab, number: int) -> None:
    launcher = swept.start("run", "-m", "--jobs", "2", "+train.model.seed=101,102,103")
    states = [swept.exp_dir / f"seed={n}" / "logs" / "state.json" for n in (101, 102)]
    until(lambda: all(path.exists() for path in states))
    launcher.send_signal(number)
    out, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 128 + number, out
    assert out.count(" stopped ") == 2
    assert " not started " in out
    for path in states:
        state = load_state(path)
        assert state is not None
        assert [host.exit_record().get("left") for host in state.hosts] in ([[]], [None])
    assert not (swept.exp_dir / "seed=103").exists()


def test_those_that_are_slow_to_end_end_at_once(swept: Lab) -> None:
    """And who does not wait for that is told which live on."""
    deaf = PROGRAM.replace("import os,", "import signal, os,").replace(
        "seed = int", "signal.signal(signal.SIGTERM, lambda *_: time.sleep(60))\nseed = int"
    )
    swept.configure(deaf, light=True, runner={"nproc_per_node": 1, "stop_grace": 4})
    seeds = "+train.model.seed=301,302,303"
    launcher = swept.start("run", "-m", "--jobs", "3", seeds)
    until(lambda: [one["step"] for one in rows(swept, "query", seeds)[1]] == [3] * 3)
    launcher.send_signal(signal.SIGINT)
    time.sleep(1)
    launcher.send_signal(signal.SIGINT)
    out, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 130, out
    (line,) = (line for line in out.splitlines() if "these may live on: " in line)
    ids = {one["run_id"] for one in rows(swept, "query", seeds)[1]}
    assert set(line.partition("on: ")[2].partition(";")[0].split(", ")) == ids
    began = time.monotonic()
    code, stopped, told = rows(swept, "stop", seeds)
    assert (code, [one["state"] for one in stopped]) == (0, ["stopped"] * 3), told
    assert time.monotonic() - began < 3 * 4


def test_a_sweep_in_the_background_of_another_is_stopped_by_its_words(swept: Lab) -> None:
    seeds = "+train.model.seed=201,202"
    launcher = swept.start("run", "-m", "--jobs", "2", seeds)
    until(lambda: [one["state"] for one in rows(swept, "query", seeds)[1]] == ["running"] * 2)
    code, stopped, _ = rows(swept, "stop", seeds)
    assert (code, [one["state"] for one in stopped]) == (0, ["stopped", "stopped"])
    out, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 143, out
