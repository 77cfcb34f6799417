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
from support.launch_lab import PROJECT, Lab, free_port, until

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

# Rank 0 ends at once on a signal, rank 1 saves first.
SAVING = """
import os, signal, sys, time
from pathlib import Path
from flagscale.status import StatusWriter

rank = int(os.environ["RANK"])
status = StatusWriter.from_environment(rank)
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(time.monotonic()))
for event in ("started", "joined", "ready"):
    status.write(event)
while not told or time.monotonic() < told[0] + 2 * rank:
    time.sleep(0.05)
Path(sys.argv[0]).with_name(f"told_{rank}").write_text(str(len(told)))
"""


def install(lab: Lab, module: str, group: str, entry: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a package like pip in its own directory, and return that directory."""
    site = lab.root / "site"
    about = site / f"{module}-1.0.dist-info"
    about.mkdir(parents=True)
    shutil.copy(OUTSIDE / f"{module}.py", site)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[{group}]\n{entry}\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), str(PROJECT)]))
    return site


@pytest.fixture
def queue(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A queue with its worker, for the runner of an installed package."""
    install(lab, "queued", "flagscale.runners", "mine = queued:QueueRunner", monkeypatch)
    directory = lab.root / "queue"
    directory.mkdir()
    worker = subprocess.Popen([sys.executable, "-m", "queued", str(directory)])
    until((directory / "worker").exists)
    yield directory
    worker.terminate()
    worker.wait()


def flagscale(lab: Lab, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the console script in a directory that contains nothing of the run."""
    elsewhere = lab.root / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    argv = [sys.executable, "-m", "flagscale.cli", *words]
    return subprocess.run(
        argv, cwd=elsewhere, env=lab.environment(), capture_output=True, text=True, check=False
    )


def test_every_verb_with_a_runner_from_outside(lab: Lab, queue: Path) -> None:
    runner = {"type": "mine", "mine": {"queue": str(queue)}, "nnodes": 2, "nproc_per_node": 1}
    lab.configure(REPORTING, light=True, runner={**runner, "master_port": free_port()})

    result = json.loads(lab.do("dryrun", "json=true").stdout)
    assert result["runner"] == {"type": "mine", "handle": {"queue": str(queue)}}
    assert [host["name"] for host in result["hosts"]] == ["cell-0", "cell-1"]
    checked = lab.do("check")
    assert (checked.returncode, "waits for jobs" in checked.stdout) == (0, True), checked.stderr

    started = lab.do("run")
    assert started.returncode == 0, started.stdout + started.stderr
    state = lab.state()
    jobs = [f"{state.run_id}.0", f"{state.run_id}.1"]
    assert (state.runner.type, state.runner.handle["jobs"]) == ("mine", jobs)
    assert "2 rank(s) joined in" in started.stdout
    again = lab.do("run")
    assert (again.returncode, "is alive" in again.stderr) == (1, True)

    now = json.loads(lab.do("query", "json=true").stdout)
    assert (now["state"], now["joined"]) == ("running", 2)
    assert {"cell-0: hello from 0 in a cell", "cell-1: hello from 1 in a cell"} <= set(
        lab.do("logs").stdout.splitlines()
    )
    listed = json.loads(flagscale(lab, "runs", "--json").stdout)
    mine = next(row for row in listed if row["run_id"] == state.run_id)
    assert (mine["state"], mine["hosts"]) == ("running", ["cell-0", "cell-1"])

    stopped = flagscale(lab, "stop", state.run_id)
    assert stopped.returncode == 0, stopped.stderr
    assert f"run {state.run_id} of lab stopped" in stopped.stdout
    assert lab.members() == []
    assert json.loads(lab.do("query", "json=true").stdout)["state"] == "stopped"
    assert "nothing to stop" in lab.do("stop").stdout


def test_hosts_of_one_machine_end_their_own_ranks_alone(lab: Lab, queue: Path) -> None:
    runner = {"type": "mine", "mine": {"queue": str(queue)}, "nnodes": 2, "nproc_per_node": 1}
    runner |= {"master_port": free_port(), "stop_grace": 20}
    lab.configure(SAVING, light=True, runner=runner)
    started = lab.do("run")
    assert started.returncode == 0, started.stdout + started.stderr
    assert lab.do("stop").returncode == 0
    assert lab.members() == []
    assert [(lab.root / f"told_{rank}").read_text() for rank in (0, 1)] == ["1", "1"]


def test_errors_of_an_installed_runner_are_configuration_errors(lab: Lab, queue: Path) -> None:
    lab.configure(REPORTING, runner={"type": "mine"})
    refused = lab.do("dryrun")
    assert refused.returncode == 2
    assert "experiment.runner.mine.queue: is required" in refused.stderr
    typo = lab.do("dryrun", "experiment.runner.type=mien")
    assert "expected one of local, ssh, slurm, mine, found 'mien'" in typo.stderr
    unused = lab.do("dryrun", "experiment.runner.type=ssh", "+experiment.runner.mine.queue=x")
    assert unused.returncode == 2
    assert "experiment.runner.mine: unknown key" in unused.stderr


def test_installed_connection_type(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """All actions on the host use it, and none uses SSH."""
    group, entry = "flagscale.executors", "box = through:BoxOpener"
    site = install(lab, "through", group, entry, monkeypatch)
    (lab.root / "hosts").write_text("b1 slots=2 via=box\n", encoding="utf-8")
    lab.configure(REPORTING, light=True, runner={"hostfile": "hosts"})
    assert lab.do("check").returncode == 0
    started = lab.do("run")
    assert started.returncode == 0, started.stdout + started.stderr
    assert lab.state().runner.handle == {"hosts": [{"via": "box"}]}
    assert "b1: hello from 1 in b1" in lab.do("logs").stdout.splitlines()
    output = (site / "journal").read_text(encoding="utf-8").splitlines()
    assert lab.do("stop").returncode == 0
    assert lab.members() == []
    after = (site / "journal").read_text(encoding="utf-8").splitlines()
    assert set(after) == {"b1"}
    assert len(after) > len(output) > 0


def test_a_way_to_reach_hosts_that_nothing_brings(lab: Lab) -> None:
    (lab.root / "hosts").write_text("h0 slots=1\nh1 slots=1 via=box\n", encoding="utf-8")
    lab.configure(REPORTING, runner={"hostfile": "hosts"})
    refused = lab.do("dryrun")
    assert refused.returncode == 2
    text = "hosts:2: via=box: no way to reach a host is called 'box'; known: local, netns, ssh"
    assert text in refused.stderr
