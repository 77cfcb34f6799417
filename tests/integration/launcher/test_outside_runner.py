"""Tests of a runner and a connection type from installed packages, through the command line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.launch_lab import PROJECT, Lab
from support.waiting import wait_for

from flagscale.free_port import free_port

pytestmark = pytest.mark.integration

OUTSIDE = Path(__file__).resolve().parents[2] / "outside"

REPORTING = """
import os, time
from flagscale.status import StatusWriter

rank = int(os.environ["RANK"])
status = StatusWriter.from_environment(rank)
print("hello from", rank, "in", os.environ.get("BOX", "a cell"), flush=True)
for event in ("started", "joined", "ready"):
    status.write(event)
time.sleep(600)
"""

# Rank 0 ends at once on SIGTERM, rank 1 two seconds later, as if it saved a checkpoint. Each writes
# the number of signals that it got.
SAVING = """
import os, signal, sys, time
from pathlib import Path
from flagscale.status import StatusWriter

rank = int(os.environ["RANK"])
status = StatusWriter.from_environment(rank)
signal_times = []
signal.signal(signal.SIGTERM, lambda *_: signal_times.append(time.monotonic()))
for event in ("started", "joined", "ready"):
    status.write(event)
while not signal_times or time.monotonic() < signal_times[0] + 2 * rank:
    time.sleep(0.05)
Path(sys.argv[0]).with_name(f"signals_{rank}").write_text(str(len(signal_times)))
"""


def install(lab: Lab, module: str, group: str, entry: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a module of ``tests/outside`` as pip does, in a directory of its own on PYTHONPATH.

    Args:
        module: name of the module and of its package.
        group: entry-point group.
        entry: entry point, ``name = module:attribute``.

    Returns:
        The directory.
    """
    site = lab.root / "site"
    dist_info = site / f"{module}-1.0.dist-info"
    dist_info.mkdir(parents=True)
    shutil.copy(OUTSIDE / f"{module}.py", site)
    (dist_info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (dist_info / "entry_points.txt").write_text(f"[{group}]\n{entry}\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), str(PROJECT)]))
    return site


@pytest.fixture
def queue(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A queue with its worker, for the runner of an installed package."""
    install(lab, "queued", "flagscale.runners", "mine = queued:QueueRunner", monkeypatch)
    directory = lab.root / "queue"
    directory.mkdir()
    worker = subprocess.Popen([sys.executable, "-m", "queued", str(directory)])
    wait_for((directory / "worker").exists)
    yield directory
    worker.terminate()
    worker.wait()


def flagscale(lab: Lab, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the console script in a directory that contains nothing of the run."""
    other_directory = lab.root / "elsewhere"
    other_directory.mkdir(exist_ok=True)
    argv = [sys.executable, "-m", "flagscale.cli", *words]
    return subprocess.run(
        argv,
        cwd=other_directory,
        env=lab.environment(),
        capture_output=True,
        text=True,
        check=False,
    )


def test_all_actions_with_a_runner_from_outside(lab: Lab, queue: Path) -> None:
    runner = {"type": "mine", "mine": {"queue": str(queue)}, "nnodes": 2, "nproc_per_node": 1}
    lab.configure(REPORTING, light=True, runner={**runner, "master_port": free_port()})

    result = json.loads(lab.run_action("dryrun", "json=true").stdout)
    assert result["runner"] == {"type": "mine", "handle": {"queue": str(queue)}}
    assert [host["name"] for host in result["hosts"]] == ["cell-0", "cell-1"]
    check_result = lab.run_action("check")
    assert check_result.returncode == 0, check_result.stderr
    assert "waits for jobs" in check_result.stdout

    start_result = lab.run_action("run")
    assert start_result.returncode == 0, start_result.stdout + start_result.stderr
    state = lab.state()
    jobs = [f"{state.run_id}.0", f"{state.run_id}.1"]
    assert (state.runner.type, state.runner.handle["jobs"]) == ("mine", jobs)
    assert "2 rank(s) joined in" in start_result.stdout
    second_result = lab.run_action("run")
    assert (second_result.returncode, "is alive" in second_result.stderr) == (1, True)

    query_record = json.loads(lab.run_action("query", "json=true").stdout)
    assert (query_record["state"], query_record["joined"]) == ("running", 2)
    assert {"cell-0: hello from 0 in a cell", "cell-1: hello from 1 in a cell"} <= set(
        lab.run_action("logs").stdout.splitlines()
    )
    listed_runs = json.loads(flagscale(lab, "runs", "--json").stdout)
    mine = next(row for row in listed_runs if row["run_id"] == state.run_id)
    assert (mine["state"], mine["hosts"]) == ("running", ["cell-0", "cell-1"])

    stop_result = flagscale(lab, "stop", state.run_id)
    assert stop_result.returncode == 0, stop_result.stderr
    assert f"run {state.run_id} of lab stopped" in stop_result.stdout
    assert lab.run_processes() == []
    assert json.loads(lab.run_action("query", "json=true").stdout)["state"] == "stopped"
    assert "nothing to stop" in lab.run_action("stop").stdout


def test_hosts_of_one_machine_end_their_own_ranks_alone(lab: Lab, queue: Path) -> None:
    runner = {"type": "mine", "mine": {"queue": str(queue)}, "nnodes": 2, "nproc_per_node": 1}
    runner |= {"master_port": free_port(), "stop_grace": 20}
    lab.configure(SAVING, light=True, runner=runner)
    start_result = lab.run_action("run")
    assert start_result.returncode == 0, start_result.stdout + start_result.stderr
    assert lab.run_action("stop").returncode == 0
    assert lab.run_processes() == []
    assert [(lab.root / f"signals_{rank}").read_text() for rank in (0, 1)] == ["1", "1"]


def test_errors_of_an_installed_runner_are_configuration_errors(lab: Lab, queue: Path) -> None:
    lab.configure(REPORTING, runner={"type": "mine"})
    rejected = lab.run_action("dryrun")
    assert rejected.returncode == 2
    assert "experiment.runner.mine.queue: is required" in rejected.stderr
    typo = lab.run_action("dryrun", "experiment.runner.type=mien")
    assert "expected one of local, ssh, cloud, env, slurm, mine, found 'mien'" in typo.stderr
    unused = lab.run_action(
        "dryrun", "experiment.runner.type=ssh", "+experiment.runner.mine.queue=x"
    )
    assert unused.returncode == 2
    assert "experiment.runner.mine: unknown key" in unused.stderr


def test_installed_connection_type(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """All actions on the host use it, and none uses SSH."""
    group, entry = "flagscale.executors", "box = through:BoxConnectionFactory"
    site = install(lab, "through", group, entry, monkeypatch)
    (lab.root / "hosts").write_text("b1 slots=2 via=box\n", encoding="utf-8")
    lab.configure(REPORTING, light=True, runner={"hostfile": "hosts"})
    assert lab.run_action("check").returncode == 0
    start_result = lab.run_action("run")
    assert start_result.returncode == 0, start_result.stdout + start_result.stderr
    assert lab.state().runner.handle == {"hosts": [{"via": "box"}]}
    assert "b1: hello from 1 in b1" in lab.run_action("logs").stdout.splitlines()
    # The connection type writes a line per use, with the name of the host.
    lines_before_stop = (site / "journal").read_text(encoding="utf-8").splitlines()
    assert lab.run_action("stop").returncode == 0
    assert lab.run_processes() == []
    journal_lines = (site / "journal").read_text(encoding="utf-8").splitlines()
    assert set(journal_lines) == {"b1"}
    assert len(journal_lines) > len(lines_before_stop) > 0


def test_unknown_connection_type_is_a_configuration_error(lab: Lab) -> None:
    (lab.root / "hosts").write_text("h0 slots=1\nh1 slots=1 via=box\n", encoding="utf-8")
    lab.configure(REPORTING, runner={"hostfile": "hosts"})
    result = lab.run_action("dryrun")
    assert result.returncode == 2
    text = "hosts:2: via=box: no way to reach a host is called 'box'; known: local, netns, ssh"
    assert text in result.stderr
