"""Accounts on the hosts that are not root's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from bed.host import Host
from launch_lab import until
from ssh_lab import SshLab

pytestmark = [
    pytest.mark.integration,
    pytest.mark.bed(hosts=2, root="private", shared=[], users=["trainer"]),
]
USER = "trainer"
HOSTFILE = f"h[00-01] slots=1 user={USER}\n"


def open_python(host: Host) -> None:
    """Let everybody on a host run its Python, wherever that is installed."""
    for program in {Path(sys.executable), Path(sys.executable).resolve()}:
        host.run(["chmod", "a+x", *program.parents])


def owner(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_uid, status.st_mode & 0o777


def test_an_ordinary_user_runs_queries_and_stops(lab: SshLab) -> None:
    lab.configure(hostfile=HOSTFILE, runner={"no_shared_fs": True})
    lab.install()
    for host in lab.bed.hosts:
        open_python(host)
        host.run(["chown", "-R", USER, lab.root])
    uid = int(lab.bed[0].run(["id", "-u", USER]).stdout)
    done = lab.do("run")
    assert done.returncode == 0, done.stderr
    for host in lab.bed.hosts:
        members = lab.members(host)
        assert len(members) > 1
        assert {Path(f"/proc/{member.pid}").stat().st_uid for member in members} == {uid}
        (kept,) = host.path(f"/home/{USER}/.cache/flagscale/hosts").iterdir()
        assert owner(kept) == (uid, 0o600)
        assert owner(kept.parent) == (uid, 0o700)
    until(lambda: (lab.query()["step"] or 0) > 1)
    assert any("rank 1 works" in line for line in lab.do("logs").stdout.splitlines())
    # This one finds what the first preflight has left.
    again = lab.do("run")
    assert again.returncode == 2
    assert "is alive there" in again.stderr
    stopped = lab.do("stop")
    assert stopped.returncode == 0, stopped.stderr
    assert lab.orphans() == {}


def test_a_directory_that_the_user_may_not_write_is_refused(lab: SshLab) -> None:
    lab.configure(hostfile=HOSTFILE, runner={"no_shared_fs": True})
    lab.install()
    for host in lab.bed.hosts:
        open_python(host)
    lab.bed["h00"].run(["chown", "-R", USER, lab.root])
    done = lab.do("run")
    assert done.returncode == 2
    assert f"exp_dir (h01): {lab.root} is not writable for user {USER}" in done.stderr
    assert "(h00" not in done.stderr
    unchecked = lab.do("run", "experiment.runner.preflight=false")
    assert unchecked.returncode == 3
    assert "h01: the script could not be started" in unchecked.stderr
    assert "Permission denied" in unchecked.stderr
    assert lab.orphans() == {}
