"""Tests of hosts that share no file system with this machine.

``lab`` (support/ssh_lab.py) has an experiment on the hosts of the test bed ``lab.bed`` (tests/bed),
which are namespaces of this machine, each with a real sshd.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from bed.lab import Bed
from support.launch_lab import PROJECT
from support.ssh_lab import SshLab, ssh_lab
from support.waiting import PATIENCE_SECONDS, wait_for

from flagscale.launcher.layout import HOST_RECORD_FILE

pytestmark = [
    pytest.mark.integration,
    pytest.mark.bed(hosts=2, root="private", shared=[]),
]


def test_files_are_written_on_the_hosts_and_fetched(lab: SshLab) -> None:
    lab.configure(runner={"no_shared_fs": True}, envs={"PRIVATE_TOKEN": "s3cr3t"})
    lab.copy_program()
    result = lab.run_action("run")
    assert result.returncode == 0, result.stderr
    state = lab.state()
    for host, bed_host in zip(state.hosts, lab.bed.hosts, strict=True):
        scripts = bed_host.local_path(host.script.parent)
        assert {p.name for p in scripts.iterdir()} == {
            *("config.yaml", "overrides.yaml", "plan.json"),
            host.script.name,
        }
        assert bed_host.local_path(host.script).read_text() == host.script.read_text()
        everything = bed_host.run(["grep", "-rl", "s3cr3t", str(lab.root)], check=False)
        assert everything.stdout == ""
        rank = bed_host.find(str(lab.root / "program.py"))[-1]
        assert rank.environment()["PRIVATE_TOKEN"] == "s3cr3t"
    wait_for(lambda: (lab.query()["step"] or 0) > 1)
    lines = lab.run_action("logs").stdout.splitlines()
    # Twice: data that was fetched before is not fetched or printed again.
    lines = lab.run_action("logs", "rank=1").stdout.splitlines()
    assert [line for line in lines if "works" in line] == ["h01:1: rank 1 works"]
    records = [host.run_dir / "status" / HOST_RECORD_FILE for host in state.hosts]
    wait_for(lambda: lab.query() and all(b'"code"' in _read(record) for record in records))
    living = write_page(lab)
    assert "lab may have gone on since" in living
    assert living.count(">running<") == 3, "the run and both hosts"
    assert lab.run_action("stop").returncode == 0
    assert lab.remaining_processes() == {}
    assert lab.query()["state"] == "stopped"
    assert "s3cr3t" not in living
    assert 'role="img"' in write_page(lab), "a run that was stopped has its curves"


def _read(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def test_hosts_run_the_copy_of_the_code(lab: SshLab) -> None:
    command = ["python", "-c", "import flagscale; print(flagscale.__file__)"]
    task = {"type": "command", "command": command, "entrypoint": None}
    runner = {"no_shared_fs": True, "snapshot": True, "nproc_per_node": 1}
    lab.configure(task=task, runner=runner)
    result = lab.run_action("test")
    assert result.returncode == 0, result.stderr
    assert "python is not part of the copy" in result.stderr
    (copy,) = (lab.exp_dir / "logs" / "code").iterdir()
    lines = {line for line in result.stdout.splitlines() if "__init__.py" in line}
    assert lines == {f"h0{n}:{n}: {copy}/flagscale/__init__.py" for n in (0, 1)}
    for host in lab.bed.hosts:
        assert (host.local_path(copy) / "flagscale" / "launcher" / "agent.py").is_file()


def test_hosts_filter_their_output(lab: SshLab) -> None:
    """A long log does not travel: only the lines that were asked for do."""
    program = (
        "import os, sys, time\n"
        "rank = os.environ['RANK']\n"
        "label = f'h0{rank}:{rank}:'\n"
        "for n in range(20000):\n    print(label, 'line', n, 'x' * 60)\n"
        "print(label, 'WARNING: hot', flush=True)\n"
        f"while not os.path.exists({str(lab.root / 'go')!r}):\n    time.sleep(0.1)\n"
        "if rank == '1':\n    raise ValueError('bad luck')\n"
        "time.sleep(60)\n"
    )
    lab.configure(program, runner={"no_shared_fs": True, "wait_for": "none"})
    lab.copy_program()
    assert lab.run_action("run").returncode == 0
    state = lab.state()

    def filtered(*words: str) -> list[str]:
        return lab.run_action("logs", *words).stdout.splitlines()

    wait_for(lambda: len(filtered("level=warning")) == 2)
    assert filtered("grep=line (7|19999) ", "host=h01") == [
        f"h01:1: line {number} {'x' * 60}" for number in (7, 19999)
    ]
    assert filtered("rank=0", "lines=1") == ["h00:0: WARNING: hot"]
    assert len(filtered("since=1h", "grep=line 5 ")) == 2
    local_sizes = [host.output.stat().st_size for host in state.hosts if host.output.exists()]
    assert sum(local_sizes) < 100_000
    following = lab.start("logs", "follow=true", "level=error", "grep=bad luck")
    for host in lab.bed.hosts:
        host.run(["touch", str(lab.root / "go")])
    output, _ = following.communicate(timeout=PATIENCE_SECONDS)
    assert output.count("ValueError: bad luck") == 1
    assert all(line.startswith("h01: ") for line in output.splitlines()[:3])


def write_page(lab: SshLab) -> str:
    """Return the report page of the lab's run, as the command writes it."""
    argv = [sys.executable, "-m", "flagscale.cli", "report", lab.exp_dir, "--output", "page.html"]
    environment = lab.bed.environment(PYTHONPATH=str(PROJECT))
    subprocess.run(argv, cwd=lab.root, env=environment, check=True, timeout=PATIENCE_SECONDS)
    return (lab.root / "page.html").read_text(encoding="utf-8")


def test_failure_is_reported_with_its_traceback(lab: SshLab) -> None:
    program = "import os, sys\nif os.environ['RANK'] == '1':\n    raise ValueError('bad luck')\n"
    lab.configure(program + "import time\ntime.sleep(60)\n", runner={"no_shared_fs": True})
    lab.copy_program()
    result = lab.run_action("run")
    assert result.returncode == 1
    assert "h01" in result.stderr
    assert "bad luck" in result.stderr
    wait_for(lambda: not lab.remaining_processes())
    second_record = lab.query()
    assert second_record["state"] == "failed"


def test_the_foreground_streams_and_ctrl_c_stops_all(lab: SshLab) -> None:
    lab.configure(runner={"no_shared_fs": True})
    lab.copy_program()
    launcher = lab.start("test")
    assert launcher.stdout is not None
    streamed: set[str] = set()
    while len(streamed) < 2:
        line = launcher.stdout.readline()
        assert line, "the launcher ended"
        if "works" in line:
            streamed.add(line.partition(": ")[0])
    assert streamed == {"h00:0", "h01:1"}
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=PATIENCE_SECONDS)
    assert launcher.returncode == 130
    assert lab.remaining_processes() == {}


def test_code_that_differs_is_refused_or_copied(bed: Bed, tmp_path: Path) -> None:
    with ssh_lab(bed, tmp_path / "lab") as lab:
        build_directory = "/opt/fs of us"
        lab.configure(runner={"no_shared_fs": True, "build_dir": build_directory})
        lab.copy_program()
        rejected = lab.run_action("run")
        assert rejected.returncode == 2
        assert "code (h[00-01]): there is no flagscale" in rejected.stderr
        lab.configure(runner={"no_shared_fs": True, "build_dir": build_directory, "sync": "code"})
        lab.copy_program()
        assert lab.run_action("run").returncode == 0
        assert lab.run_action("stop").returncode == 0
        # An edited, a new and a missing file on one host are detected and repaired.
        package = bed["h01"].local_path(build_directory) / "flagscale"
        (package / "status.py").write_text("raise SystemExit(9)\n")
        (package / "stale.py").write_text("")
        (package / "errors.py").unlink()
        lab.configure(runner={"no_shared_fs": True, "build_dir": build_directory})
        lab.copy_program()
        checks = json.loads(lab.run_action("check", "json=true").stdout)
        checks_by_host = {check["hosts"]: check for check in checks if check["name"] == "code"}
        assert checks_by_host["h00"]["ok"]
        assert not checks_by_host["h01"]["ok"]
        lab.configure(runner={"no_shared_fs": True, "build_dir": build_directory, "sync": "code"})
        lab.copy_program()
        result = lab.run_action("run")
        assert result.returncode == 0, result.stderr
        assert not (package / "stale.py").exists()
        assert lab.run_action("stop").returncode == 0
        assert lab.remaining_processes() == {}
