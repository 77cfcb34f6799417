"""Test with sixty-four hosts at once.

``lab`` (support/ssh_lab.py) has an experiment on the hosts of the test bed ``lab.bed`` (tests/bed),
which are namespaces of this machine, each with a real sshd.
"""

from __future__ import annotations

import pytest
from support.ssh_lab import SshLab
from support.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.integration]


@pytest.mark.bed(hosts=64)
def test_sixty_four_hosts(lab: SshLab) -> None:
    lab.configure(runner={"start_timeout": 120})
    result = lab.run_action("run")
    assert result.returncode == 0, result.stderr
    assert "64 rank(s) joined" in result.stdout
    query_output = lab.run_action("query").stdout
    assert "h[00-63]" in query_output
    # One host's script and all its descendants are killed: the rest of the job is ended.
    victim = lab.bed["h17"]
    for process in lab.run_processes(victim):
        victim.run(["kill", "-KILL", str(process.inner_pid)], check=False)
    record = wait_for(lambda: (r := lab.query())["state"] not in ("running", "starting") and r)
    assert "h17" in str(record)
    stop_result = lab.run_action("stop")
    assert stop_result.returncode == 0, stop_result.stderr
    assert lab.remaining_processes() == {}
