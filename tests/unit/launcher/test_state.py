from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from support.launch_lab import script_of, with_process

from flagscale.errors import RunStateError
from flagscale.files import make_private_directory, read_json, write_atomic, write_json
from flagscale.hosts.processes import Process
from flagscale.launcher.layout import Layout, host_label
from flagscale.launcher.planning.model import LaunchPlan
from flagscale.launcher.state import load_state, new_run_id, state_of

MakePlan = Callable[..., LaunchPlan]


def test_a_state_is_read_as_it_was_written(make_plan: MakePlan, tmp_path: Path) -> None:
    state = with_process(state_of(make_plan(exp_dir=tmp_path / "ü x")), Process(7, 8), "boot")
    path = tmp_path / "state.json"
    state.save(path)
    assert load_state(path) == state
    assert script_of(state) == Process(7, 8)


def test_a_directory_that_has_another_name_now(make_plan: MakePlan, tmp_path: Path) -> None:
    old, new = tmp_path / "a run", tmp_path / "kept" / "renamed"
    state = state_of(make_plan(exp_dir=old))
    make_private_directory(Layout(old).logs)
    state.save(Layout(old).state)
    assert load_state(Layout(old).state) == state
    new.parent.mkdir()
    old.rename(new)
    found = load_state(Layout(new).state)
    assert found is not None
    assert found.exp_dir == new
    assert found.hosts[0].output == new / state.hosts[0].output.relative_to(old)
    assert found.hosts[0].run_dir.is_relative_to(new)
    # What has been put in its place is not taken for it.
    old.mkdir()
    assert load_state(Layout(new).state) == state


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is damaged"),
        ("[]", "is damaged"),
        ("{}", "another version"),
        ('{"hosts": [{"surprise": 1}]}', "another version"),
    ],
)
def test_a_bad_state_file(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "state.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(RunStateError, match=message):
        load_state(path)


def test_no_state(tmp_path: Path) -> None:
    assert load_state(tmp_path / "state.json") is None


def test_run_ids_differ_and_are_file_names() -> None:
    found = {new_run_id() for _ in range(100)}
    assert len(found) == 100
    assert all("/" not in run_id and run_id.isascii() for run_id in found)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost", "host_3_localhost"),
        ("fe80::1", "host_3_fe80__1"),
        ("../../etc", "host_3_.._.._etc"),
        ("x" * 300, "host_3_" + "x" * 100),
    ],
)
def test_host_labels(host: str, expected: str) -> None:
    assert host_label(3, host) == expected


def test_log_dir_takes_the_runs_directories(tmp_path: Path) -> None:
    layout = Layout(tmp_path, tmp_path / "elsewhere")
    assert layout.run_dir(0, "h", "r") == tmp_path / "elsewhere" / "host_0_h" / "r"
    assert layout.script(0, "h") == tmp_path / "logs/scripts/host_0_h_run.sh"


def test_files_are_private_and_whole(tmp_path: Path) -> None:
    directory = tmp_path / "a" / "b"
    make_private_directory(directory)
    make_private_directory(directory)
    for made in (directory, directory.parent):
        assert stat.S_IMODE(made.stat().st_mode) == 0o700
    path = directory / "file.json"
    write_json(path, {"ü": 1})
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_json(path) == {"ü": 1}
    with pytest.raises(UnicodeEncodeError):
        write_atomic(path, "\ud800")
    assert read_json(path) == {"ü": 1}
    assert os.listdir(directory) == ["file.json"]  # noqa: PTH208


@pytest.mark.root  # who else may give files away
def test_what_root_replaces_stays_its_owners(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_json(path, {})
    os.chown(path, 65534, 100)
    write_json(path, {"ended": 1})
    found = path.stat()
    assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (65534, 100, 0o600)
    write_json(tmp_path / "new.json", {})
    assert (tmp_path / "new.json").stat().st_uid == 0
