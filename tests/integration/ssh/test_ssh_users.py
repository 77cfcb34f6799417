"""Tests with accounts on the hosts that are not root's.

``lab`` (support/ssh_lab.py) has an experiment on the hosts of the test bed ``lab.bed`` (tests/bed),
which are namespaces of this machine, each with a real sshd.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from bed.host import Host
from support.launch_lab import PROJECT
from support.ssh_lab import SshLab
from support.waiting import wait_for

from flagscale.train.checkpoint.store import CheckpointStore

pytestmark = [
    pytest.mark.integration,
    pytest.mark.bed(hosts=2, root="private", shared=[], users=["trainer"]),
]
USER = "trainer"
HOSTFILE = f"h[00-01] slots=1 user={USER}\n"


def open_python(host: Host) -> None:
    """Let all users of a host run its Python, wherever it is installed."""
    for program in {Path(sys.executable), Path(sys.executable).resolve()}:
        host.run(["chmod", "a+x", *program.parents])


def owner(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_uid, status.st_mode & 0o777


def test_an_ordinary_user_runs_queries_and_stops(lab: SshLab) -> None:
    lab.configure(hostfile=HOSTFILE, runner={"no_shared_fs": True})
    lab.copy_program()
    for host in lab.bed.hosts:
        open_python(host)
        host.run(["chown", "-R", USER, lab.root])
    uid = int(lab.bed[0].run(["id", "-u", USER]).stdout)
    result = lab.run_action("run")
    assert result.returncode == 0, result.stderr
    for host in lab.bed.hosts:
        members = lab.run_processes(host)
        assert len(members) > 1
        assert {Path(f"/proc/{member.pid}").stat().st_uid for member in members} == {uid}
        (cache_file,) = host.local_path(f"/home/{USER}/.cache/flagscale/hosts").iterdir()
        assert owner(cache_file) == (uid, 0o600)
        assert owner(cache_file.parent) == (uid, 0o700)
    wait_for(lambda: (lab.query()["step"] or 0) > 1)
    assert any("rank 1 works" in line for line in lab.run_action("logs").stdout.splitlines())
    # This preflight uses the cache of the first one.
    second_result = lab.run_action("run")
    assert second_result.returncode == 2
    assert f"is alive in {lab.exp_dir} (since" in second_result.stderr
    stop_result = lab.run_action("stop")
    assert stop_result.returncode == 0, stop_result.stderr
    assert lab.remaining_processes() == {}


def test_checkpoints_are_written_where_the_user_may_write(lab: SshLab) -> None:
    """Each host checks the directories that training uses."""
    model = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 16}
    train = {
        "system": {
            **{"save": str(lab.root / "kept" / "x"), "load": str(lab.root / "base")},
            "finetune": True,
        },
        "model": {**model, "lr": 1.0e-3, "train_iters": 2, "global_batch_size": 2},
        "data": {"mock_data": True, "data_cache_path": str(lab.root / "cache")},
    }
    program = PROJECT / "flagscale" / "train" / "train_gpt.py"
    lab.configure(
        hostfile=HOSTFILE,
        runner={"no_shared_fs": True},
        task={"entrypoint": str(program)},
        top={"train": train},
    )
    for host in lab.bed.hosts:
        open_python(host)
        host.run(["mkdir", "-p", lab.root / "kept"])
        for iteration in (2, 4):
            store = CheckpointStore(host.local_path(f"{lab.root}/base"))
            (store.begin(iteration) / "a").write_bytes(b"x" * 100)
            store.publish(iteration, {})
        host.run(["chown", "-R", USER, lab.root])
    lab.bed["h01"].run(["chown", "root", lab.root / "kept"])
    lab.bed["h00"].run(["truncate", "-s1", lab.root / "base" / "iter_0000004" / "a"])
    lab.bed["h01"].run(["rm", "-r", lab.root / "base" / "iter_0000002"])
    result = lab.run_action("check", "json=true")
    assert result.returncode == 2
    checks = json.loads(result.stdout)
    results = {(check["name"], check["hosts"]): check["found"] for check in checks}
    assert results["save", "h00"].startswith(f"{lab.root / 'kept' / 'x'}: ")
    assert results["save", "h01"] == f"{lab.root / 'kept'} is not writable for user {USER}"
    assert ("data_cache_path", "h00") in results
    assert ("data_cache_path", "h01") not in results
    assert results["load", "h00"] == (
        f"iteration 2 in {lab.root / 'base'}; weights only (finetune); training starts from "
        "step 0; skipped iter_0000004: a has 1 bytes, expected 100"
    )
    assert results["load", "h01"] == f"{lab.root / 'base'}/iter_0000002 does not exist on this host"


def test_a_directory_that_the_user_may_not_write_is_refused(lab: SshLab) -> None:
    lab.configure(hostfile=HOSTFILE, runner={"no_shared_fs": True})
    lab.copy_program()
    for host in lab.bed.hosts:
        open_python(host)
    lab.bed["h00"].run(["chown", "-R", USER, lab.root])
    result = lab.run_action("run")
    assert result.returncode == 2
    assert f"exp_dir (h01): {lab.root} is not writable for user {USER}" in result.stderr
    assert "(h00" not in result.stderr
    unchecked = lab.run_action("run", "experiment.runner.preflight=false")
    assert unchecked.returncode == 2
    assert "h01: the script could not be started" in unchecked.stderr
    assert "Permission denied" in unchecked.stderr
    assert lab.remaining_processes() == {}
