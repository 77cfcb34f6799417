"""Tests of starts in directories that cannot be written, or that another user could change.

Without preflight, so that the launcher and the program on the host meet the obstacle themselves.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.full_disk import fill_disk, small_disk
from support.launch_lab import Lab
from support.waiting import wait_for

pytestmark = pytest.mark.integration

NOBODY = 65534
WITHOUT_CHECKS = ("experiment.runner.preflight=false", "experiment.runner.wait_for=none")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")


def configure(lab: Lab) -> None:
    lab.configure(
        "",
        task={"type": "command", "command": ["true"]},
        runner={"nproc_per_node": 1},
    )


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path, "1m") as path:
        yield path


@pytest.mark.parametrize("obstacle", ["full", "read-only"])
@pytest.mark.parametrize("existing", ["nothing", "a-run"])
def test_a_directory_that_cannot_be_written_is_a_configuration_error(
    lab: Lab, disk: Path, obstacle: str, existing: str
) -> None:
    lab = replace(lab, exp_dir=disk / "exp")
    configure(lab)
    if existing == "a-run":
        assert lab.run_action("test", *WITHOUT_CHECKS).returncode == 0
    if obstacle == "full":
        fill_disk(disk)
        expected = "No space left on device\n  hint: make room there, or set another directory\n"
    else:
        remount = ["mount", "-o", "remount,ro", str(disk)]
        # It is refused while the killed process that recorded the host still has its file open.
        wait_for(lambda: subprocess.run(remount, check=False).returncode == 0)
        expected = "Read-only file system\n  hint: set another directory\n"
    result = lab.run_action("run", *WITHOUT_CHECKS)
    assert result.returncode == 2, result.stderr
    assert f"\nerror: experiment.exp_dir: {lab.exp_dir}" in result.stderr
    assert result.stderr.endswith(expected)


def replace_by_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def restore_directory(path: Path) -> None:
    path.unlink()
    path.with_name("elsewhere").rename(path)


@needs_root
@pytest.mark.parametrize(
    ("change", "undo", "problem"),
    [
        pytest.param(
            lambda path: os.chown(path, NOBODY, NOBODY),
            lambda path: os.chown(path, 0, 0),
            "belongs to another user (nobody)",
            id="foreign",
        ),
        pytest.param(
            lambda path: path.chmod(0o777),
            lambda path: path.chmod(0o700),
            "is writable by every user",
            id="world-writable",
        ),
        pytest.param(replace_by_link, restore_directory, "is a symbolic link", id="link"),
    ],
)
def test_a_directory_that_another_user_could_change_is_refused(
    lab: Lab, change: Callable[[Path], None], undo: Callable[[Path], None], problem: str
) -> None:
    configure(lab)
    assert lab.run_action("test").returncode == 0
    run_dir = lab.state().hosts[0].run_dir
    for directory in (lab.layout.logs, lab.layout.scripts, lab.layout.logs / "pids"):
        change(directory)
        result = lab.run_action("run", *WITHOUT_CHECKS)
        assert result.returncode != 0
        assert f"{directory} {problem}" in result.stderr
        undo(directory)
    assert list(run_dir.parent.glob("2*")) == [run_dir]


SHARED_MODES = {
    "everyone": (0o777, False),
    "everyone-but-not-readable": (0o733, False),
    "sticky": (0o1777, True),
    "group": (0o770, True),
    "setgid": (0o2775, True),
}


@pytest.mark.parametrize(("mode", "accepted"), SHARED_MODES.values(), ids=SHARED_MODES)
@pytest.mark.parametrize("is_link", [False, True], ids=["directory", "link"])
def test_directory_in_which_every_user_could_rename_the_logs_is_refused(
    lab: Lab, mode: int, accepted: bool, is_link: bool
) -> None:
    if is_link:
        target = lab.root / "target"
        target.mkdir()
        lab.exp_dir.symlink_to(target)
    else:
        lab.exp_dir.mkdir()
    lab.exp_dir.chmod(mode)
    configure(lab)
    result = lab.run_action("test", *WITHOUT_CHECKS[:1])
    assert (result.returncode == 0) is accepted, result.stderr
    if not accepted:
        assert (
            f"error: {lab.exp_dir} is writable by every user and has no sticky bit: it is not used "
            f"for a run\n  hint: chmod o-w {lab.exp_dir}, or set another experiment.exp_dir\n"
        ) in result.stderr
        assert not lab.layout.scripts.exists()


def test_log_directory_in_which_every_user_could_rename_is_refused_on_the_host(lab: Lab) -> None:
    log_dir = lab.root / "shared_logs"
    log_dir.mkdir()
    lab.configure(
        "",
        task={"type": "command", "command": ["true"]},
        runner={"nproc_per_node": 1, "log_dir": str(log_dir)},
    )
    log_dir.chmod(0o777)
    result = lab.run_action("test", *WITHOUT_CHECKS[:1])
    assert result.returncode == 2
    assert f"{log_dir} is writable by every user and has no sticky bit: chmod o-w it, or" in (
        result.stderr
    )
    log_dir.chmod(0o1777)
    result = lab.run_action("test", *WITHOUT_CHECKS[:1])
    assert result.returncode == 0, result.stderr


@needs_root
def test_details_of_another_user_are_refused_on_the_host(lab: Lab) -> None:
    configure(lab)
    assert lab.run_action("test").returncode == 0
    directory = lab.state().hosts[0].run_dir.parent
    os.chown(directory, NOBODY, NOBODY)
    result = lab.run_action("run", *WITHOUT_CHECKS)
    assert result.returncode == 2
    assert f"{directory} belongs to user nobody" in result.stderr
    assert lab.run_processes() == []


@pytest.mark.parametrize("file", ["script", "output", "plan", "pid_file"])
def test_nothing_is_written_through_a_link(lab: Lab, file: str) -> None:
    configure(lab)
    assert lab.run_action("test").returncode == 0
    host = lab.state().hosts[0]
    path = lab.layout.plan if file == "plan" else Path(getattr(host, file))
    victim = lab.root / "victim"
    victim.write_text("precious\n", encoding="utf-8")
    path.unlink(missing_ok=True)
    path.symlink_to(victim)
    result = lab.run_action("test", *WITHOUT_CHECKS[:1])
    assert victim.read_text(encoding="utf-8") == "precious\n", result.stderr
    assert not path.is_symlink() or "symbolic link" in result.stderr
