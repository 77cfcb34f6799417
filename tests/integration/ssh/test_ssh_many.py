"""Test with sixty-four hosts at once."""

from __future__ import annotations

import pytest
from support.launch_lab import until
from support.ssh_lab import SshLab

pytestmark = [pytest.mark.slow, pytest.mark.integration]


@pytest.mark.bed(hosts=64)
def test_sixty_four_hosts(lab: SshLab) -> None:
    lab.configure(runner={"start_timeout": 120})
    result = lab.do("run")
    assert result.returncode == 0, result.stderr
    assert "64 rank(s) joined" in result.stdout
    shown = lab.do("query").stdout
    assert "h[00-63]" in shown
    # One host's script and all its descendants are killed: the rest of the job is ended.
    victim = lab.bed["h17"]
    for process in lab.members(victim):
        victim.run(["kill", "-KILL", str(process.inner_pid)], check=False)
    record = until(lambda: (r := lab.query())["state"] not in ("running", "starting") and r, 60)
    assert "h17" in str(record)
    stopped = lab.do("stop")
    assert stopped.returncode == 0, stopped.stderr
    assert lab.orphans() == {}
