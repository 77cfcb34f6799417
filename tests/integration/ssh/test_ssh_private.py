"""Hosts that share no file system with this machine."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from bed.lab import Bed
from support.launch_lab import PROJECT, until
from support.ssh_lab import SshLab, ssh_lab

pytestmark = [
    pytest.mark.integration,
    pytest.mark.bed(hosts=2, root="private", shared=[]),
]


def test_everything_is_written_there_and_fetched_from_there(lab: SshLab) -> None:
    lab.configure(runner={"no_shared_fs": True}, envs={"PRIVATE_TOKEN": "s3cr3t"})
    lab.install()
    done = lab.do("run")
    assert done.returncode == 0, done.stderr
    state = lab.state()
    for host, there in zip(state.hosts, lab.bed.hosts, strict=True):
        scripts = there.path(host.script.parent)
        assert {p.name for p in scripts.iterdir()} == {
            *("config.yaml", "overrides.yaml", "plan.json"),
            host.script.name,
        }
        assert there.path(host.script).read_text() == host.script.read_text()
        everything = there.run(["grep", "-rl", "s3cr3t", str(lab.root)], check=False)
        assert everything.stdout == ""
        rank = there.find(str(lab.root / "program.py"))[-1]
        assert rank.environment()["PRIVATE_TOKEN"] == "s3cr3t"
    until(lambda: (lab.query()["step"] or 0) > 1)
    lines = lab.do("logs").stdout.splitlines()
    # Twice: what was fetched before is not fetched, or shown, again.
    lines = lab.do("logs", "rank=1").stdout.splitlines()
    assert [line for line in lines if "works" in line] == ["h01:1: rank 1 works"]
    living = page(lab)
    assert "lab may have gone on since" in living
    assert living.count(">running<") == 3, "the run and both hosts"
    assert lab.do("stop").returncode == 0
    assert lab.orphans() == {}
    assert lab.query()["state"] == "stopped"
    assert "s3cr3t" not in living
    assert 'role="img"' in page(lab), "a run that was stopped has its curves"


def page(lab: SshLab) -> str:
    """The page of the lab's run, as the command writes it."""
    words = [sys.executable, "-m", "flagscale.cli", "report", lab.exp_dir, "--output", "page.html"]
    environment = lab.bed.environment(PYTHONPATH=str(PROJECT))
    subprocess.run(words, cwd=lab.root, env=environment, check=True, timeout=60)
    return (lab.root / "page.html").read_text(encoding="utf-8")


def test_a_failure_is_told_with_its_traceback(lab: SshLab) -> None:
    program = "import os, sys\nif os.environ['RANK'] == '1':\n    raise ValueError('bad luck')\n"
    lab.configure(program + "import time\ntime.sleep(60)\n", runner={"no_shared_fs": True})
    lab.install()
    done = lab.do("run")
    assert done.returncode == 1
    assert "h01" in done.stderr
    assert "bad luck" in done.stderr
    until(lambda: not lab.orphans())
    again = lab.query()
    assert again["state"] == "failed"


def test_the_foreground_streams_and_ctrl_c_stops_all(lab: SshLab) -> None:
    lab.configure(runner={"no_shared_fs": True})
    lab.install()
    launcher = lab.start("test")
    assert launcher.stdout is not None
    seen: set[str] = set()
    while len(seen) < 2:
        line = launcher.stdout.readline()
        assert line, "the launcher ended"
        if "works" in line:
            seen.add(line.partition(": ")[0])
    assert seen == {"h00:0", "h01:1"}
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=60)
    assert launcher.returncode == 130
    assert lab.orphans() == {}


def test_code_that_differs_is_refused_or_copied(bed: Bed, tmp_path: Path) -> None:
    with ssh_lab(bed, tmp_path / "lab") as lab:
        elsewhere = "/opt/fs of us"
        lab.configure(runner={"no_shared_fs": True, "build_dir": elsewhere})
        lab.install()
        refused = lab.do("run")
        assert refused.returncode == 2
        assert "code (h[00-01]): there is no flagscale" in refused.stderr
        lab.configure(runner={"no_shared_fs": True, "build_dir": elsewhere, "sync": "code"})
        lab.install()
        assert lab.do("run").returncode == 0
        assert lab.do("stop").returncode == 0
        # An edit, a new file and a lost one on one host are found and put right.
        package = bed["h01"].path(elsewhere) / "flagscale"
        (package / "status.py").write_text("raise SystemExit(9)\n")
        (package / "stale.py").write_text("")
        (package / "errors.py").unlink()
        lab.configure(runner={"no_shared_fs": True, "build_dir": elsewhere})
        lab.install()
        checks = json.loads(lab.do("check", "json=true").stdout)
        found = {check["hosts"]: check for check in checks if check["name"] == "code"}
        assert found["h00"]["ok"]
        assert not found["h01"]["ok"]
        lab.configure(runner={"no_shared_fs": True, "build_dir": elsewhere, "sync": "code"})
        lab.install()
        done = lab.do("run")
        assert done.returncode == 0, done.stderr
        assert not (package / "stale.py").exists()
        assert lab.do("stop").returncode == 0
        assert lab.orphans() == {}
