"""Runs over SSH from their start to their end."""

from __future__ import annotations

import pytest
from ssh_lab import SshLab

pytestmark = pytest.mark.integration


def test_run_query_logs_stop(lab: SshLab) -> None:
    lab.configure()
    done = lab.do("run")
    print(done.stdout, done.stderr)
    assert done.returncode == 0, done.stderr
    assert "2 rank(s) joined" in done.stdout
    shown = lab.do("query")
    assert shown.returncode == 0
    assert "h[00-01]" in shown.stdout
    assert "running" in shown.stdout
    lines = lab.do("logs").stdout.splitlines()
    assert [sum(f"rank {rank} works" in line for line in lines) for rank in (0, 1)] == [1, 1]
    again = lab.do("run")
    assert again.returncode == 2
    assert "is alive there" in again.stderr
    stopped = lab.do("stop")
    assert stopped.returncode == 0, stopped.stderr
    assert "stopped in" in stopped.stdout
    assert lab.orphans() == {}
    assert lab.query()["state"] == "stopped"
    assert "ended already" in lab.do("stop").stdout
