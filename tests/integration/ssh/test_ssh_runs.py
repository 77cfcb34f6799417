"""Tests of runs over SSH from start to end.

The fixture ``lab`` (support/ssh_lab.py) has an experiment of two ranks, one on each of the hosts
h00 and h01. The hosts are network namespaces with an sshd, and form the test bed ``lab.bed``. The
default program joins, prints ``rank N works``, and runs until SIGTERM. Action ``run`` returns once
all ranks have joined, and ``test`` once the run has ended.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time

import pytest
from support.launch_lab import remove_directory
from support.needs import open_terminal
from support.ssh_lab import SshLab, find_bystanders, start_bystanders
from support.waiting import PATIENCE_SECONDS
from support.warm_programs import run_command_line

pytestmark = pytest.mark.integration


class Screen:
    """A command in its own terminal, and everything that it has displayed."""

    def __init__(self, lab: SshLab, action: str, *words: str) -> None:
        self._master, slave = open_terminal()
        self._process = subprocess.Popen(
            lab.command(f"action={action}", *words),
            cwd=lab.root,
            env=lab.bed.environment(COLUMNS="160", LINES="40", TERM="xterm"),
            stdin=slave,
            stdout=slave,
            stderr=slave,
        )
        os.close(slave)
        lab.started.append(self._process)
        self.shown = ""

    def _read(self, seconds: float) -> bool:
        """Read output for this long; return True while the terminal is open."""
        if select.select([self._master], [], [], seconds)[0]:
            try:
                self.shown += os.read(self._master, 1 << 16).decode(errors="replace")
            except OSError:
                return False
        return True

    def wait_for(self, *texts: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not all(text in self.shown for text in texts):
            assert time.monotonic() < deadline, self.shown
            if not self._read(0.5):
                break
        assert all(text in self.shown for text in texts), self.shown

    def wait(self) -> int:
        while self._read(0.5) and self._process.poll() is None:
            pass
        os.close(self._master)
        return self._process.wait(timeout=PATIENCE_SECONDS)


def test_run_query_logs_stop(lab: SshLab) -> None:
    lab.configure()
    result = lab.run_action("run")
    print(result.stdout, result.stderr)
    assert result.returncode == 0, result.stderr
    assert "2 rank(s) joined" in result.stdout
    query_result = lab.run_action("query")
    assert query_result.returncode == 0
    assert "h[00-01]" in query_result.stdout
    assert "running" in query_result.stdout
    lines = lab.run_action("logs").stdout.splitlines()
    assert [sum(f"rank {rank} works" in line for line in lines) for rank in (0, 1)] == [1, 1]
    second_result = lab.run_action("run")
    assert second_result.returncode == 2
    assert f"is alive in {lab.exp_dir} (since" in second_result.stderr
    unchecked = lab.run_action("run", "experiment.runner.preflight=false")
    assert unchecked.returncode == 1
    assert f"is alive on h[00-01] in {lab.exp_dir} (since" in unchecked.stderr
    assert lab.query()["state"] == "running"
    stop_result = lab.run_action("stop")
    assert stop_result.returncode == 0, stop_result.stderr
    assert "stopped in" in stop_result.stdout
    assert lab.remaining_processes() == {}
    assert lab.query()["state"] == "stopped"
    assert "ended already" in lab.run_action("stop").stdout


def test_following_a_run_in_a_terminal(lab: SshLab) -> None:
    lab.configure()
    assert lab.run_action("run").returncode == 0
    screen = Screen(lab, "query", "follow=true")
    # "last line" is the heading of the column with the last line of each host's output.
    screen.wait_for("last line", "works", "running", "h[00-01]")
    assert lab.run_action("stop").returncode == 0
    screen.wait_for("stopped")
    assert screen.wait() == 0
    assert lab.remaining_processes() == {}


def test_following_without_a_terminal_ends_with_the_run(lab: SshLab) -> None:
    cmds = {"after_stop": "sleep 1.5; echo after it all"}
    lab.configure("import sys; sys.exit(7)\n", cmds=cmds)
    result = lab.run_action("test")
    assert result.returncode == 7
    for name in lab.bed.names:
        assert f"{name}: after it all" in result.stdout
    assert "first failure: h0" in result.stderr
    assert "exit code 7" in result.stderr
    followed = lab.run_action("query", "follow=true")
    assert followed.returncode == 1
    assert "failed" in followed.stdout
    assert lab.remaining_processes() == {}


def test_single_remote_host_excludes_a_second_run(lab: SshLab) -> None:
    lab.configure(hostfile="h01 slots=1\n")
    assert lab.run_action("run").returncode == 0
    assert lab.run_processes(lab.bed["h01"])
    assert not lab.run_processes(lab.bed["h00"])
    # A second run in the directory is rejected, even on other hosts.
    lab.configure(hostfile="h00 slots=1\n")
    result = lab.run_action("run")
    assert result.returncode == 1
    assert f"is alive on h01 in {lab.exp_dir} (since" in result.stderr
    assert lab.run_action("stop").returncode == 0
    assert lab.remaining_processes() == {}


def test_a_restart_keeps_the_output_of_the_run_before(lab: SshLab) -> None:
    lab.configure("print('one', flush=True)\n")
    assert lab.run_action("test").returncode == 0
    first_state = lab.state()
    lab.configure("print('two', flush=True)\n")
    assert lab.run_action("test").returncode == 0
    for old, new in zip(first_state.hosts, lab.state().hosts, strict=True):
        assert "one" in (old.run_dir / "output").read_text()
        assert "two" in new.output.read_text()
        assert "one" not in new.output.read_text()


def test_run_with_a_removed_directory_is_stopped_by_its_id(
    lab: SshLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(lab.root / "state"))
    lab.configure()
    assert lab.run_action("run").returncode == 0
    state = lab.state()
    alive = start_bystanders(lab.bed)
    remove_directory(lab.exp_dir)
    assert [bool(lab.run_processes(host, state.run_id)) for host in lab.bed.hosts] == [True, True]
    rejected = lab.run_action("run")
    assert rejected.returncode == 1
    assert f"run {state.run_id} of lab is alive on h[00-01] in {lab.exp_dir}" in rejected.stderr

    command = [sys.executable, "-m", "flagscale.cli", "stop", state.run_id]
    result = run_command_line(
        command, environment=lab.bed.environment(), cwd=lab.bed.directory, timeout=90
    )
    assert result.returncode == 0, result.stderr
    assert f"run {state.run_id} of lab stopped in" in result.stdout
    assert not any(lab.run_processes(host, state.run_id) for host in lab.bed.hosts)
    assert find_bystanders(lab.bed) == alive


def test_command_on_hosts_of_different_sizes(lab: SshLab) -> None:
    command = [
        "bash",
        "-c",
        'echo "$RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE at $MASTER_ADDR"',
    ]
    task = {"type": "command", "command": command}
    lab.configure(hostfile="h00 slots=1\nh01 slots=8\n", task=task, runner={"nproc_per_node": 2})
    result = lab.run_action("test")
    assert result.returncode == 0, result.stderr
    expected = ("h00:0: 0/3 0/1 at h00", "h01:1: 1/3 0/2 at h00", "h01:2: 2/3 1/2 at h00")
    assert set(expected) <= set(result.stdout.splitlines())
    # Without nproc_per_node, the hostfile gives the number of ranks: one per host. The plan names
    # both hosts in one expression, and contains their script once, because it is the same except
    # for a few lines.
    lab.configure(task=task, runner={"nproc_per_node": None})
    plan_text = lab.run_action("dryrun").stdout
    assert "# lab: 2 rank(s) on 2 host(s)" in plan_text
    assert "# 2 hosts h[00-01]: 1 rank(s) each, one script except for" in plan_text
    # Finished ranks wait for the others, and a failed one ends them.
    command[-1] = "((RANK)) || exit 0; sleep 1; exit 5"
    lab.configure(task=task, runner={"nproc_per_node": None})
    result = lab.run_action("test")
    assert result.returncode == 5, result.stdout
    assert "first failure: h01: rank 1 ended with exit code 5" in result.stderr
    assert lab.remaining_processes() == {}


def test_program_without_yaml_on_two_hosts(lab: SshLab) -> None:
    def flagscale(*words: str) -> str:
        result = run_command_line(
            [sys.executable, "-m", "flagscale.cli", *words],
            environment=lab.bed.environment(COLUMNS="200"),
            cwd=lab.root,
            timeout=90,
        )
        assert result.returncode == 0, result.stderr
        return result.stdout + result.stderr

    (lab.root / "show.py").write_text(
        "import os, sys; print(os.environ['RANK'], os.environ['WORLD_SIZE'], *sys.argv[1:])\n"
    )
    ssh = f"experiment.runner.ssh_config={lab.bed.ssh_config}"
    output = flagscale("test", "--hosts", "h00,h01", "--nproc", "2", ssh, "show.py", "-m", "${x}")
    assert "note: scripts and logs are in ./outputs_show" in output
    for host, rank in (("h00", 0), ("h00", 1), ("h01", 2), ("h01", 3)):
        assert f"{host}:{rank}: {rank} 4 -m ${{x}}" in output
    assert "completed" in flagscale("query", "outputs_show")
    assert "h01:3: 3 4 -m ${x}" in flagscale("logs", "./outputs_show", "--rank", "3")


def test_ranks_run_the_copy_of_the_program(lab: SshLab) -> None:
    lab.configure(runner={"snapshot": True})
    result = lab.run_action("run")
    assert result.returncode == 0, result.stderr
    copies = sorted(path.name for path in (lab.exp_dir / "logs" / "code").iterdir())
    assert [name.rpartition("-")[0] for name in copies] == ["flagscale", lab.root.name]
    for host in lab.bed.hosts:
        assert host.find(f"/logs/code/{copies[1]}/program.py")
    assert lab.run_action("stop").returncode == 0
    assert lab.remaining_processes() == {}
