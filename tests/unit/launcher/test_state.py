from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.launch_lab import script_process, with_process

from flagscale.errors import RunStateError
from flagscale.files import make_private_directory, read_json, write_atomic, write_json
from flagscale.hosts.processes import Process
from flagscale.launcher.layout import Layout, host_label
from flagscale.launcher.planning.model import LaunchPlan
from flagscale.launcher.state import (
    load_state,
    load_states,
    make_state,
    new_run_id,
    reload_state,
    save_plan,
)

MakePlan = Callable[..., LaunchPlan]


def test_state_round_trip(make_plan: MakePlan, tmp_path: Path) -> None:
    state = with_process(make_state(make_plan(exp_dir=tmp_path / "ü x")), Process(7, 8), "boot")
    path = tmp_path / "state.json"
    state.save(path)
    assert load_state(path) == state
    assert script_process(state) == Process(7, 8)


def test_state_follows_a_renamed_directory(make_plan: MakePlan, tmp_path: Path) -> None:
    old, new = tmp_path / "a run", tmp_path / "kept" / "renamed"
    state = make_state(make_plan(exp_dir=old))
    make_private_directory(Layout(old).logs)
    state.save(Layout(old).state)
    assert load_state(Layout(old).state) == state
    new.parent.mkdir()
    old.rename(new)
    loaded = load_state(Layout(new).state)
    assert loaded is not None
    assert loaded.exp_dir == new
    assert loaded.hosts[0].output == new / state.hosts[0].output.relative_to(old)
    assert loaded.hosts[0].run_dir.is_relative_to(new)
    # Another file in its place is not read as the state.
    old.mkdir()
    assert load_state(Layout(new).state) == state


def test_output_of_an_earlier_run_is_where_a_later_start_has_moved_it(
    make_plan: MakePlan, tmp_path: Path
) -> None:
    layout = Layout(tmp_path / "exp")
    earlier, later = (
        make_state(replace(make_plan(exp_dir=layout.exp_dir), run_id=run_id))
        for run_id in ("first", "second")
    )
    (host,) = earlier.hosts
    later = replace(later, hosts=(replace(host, run_dir=tmp_path / "later"),))
    make_private_directory(host.run_dir)
    host.output.write_text("of the first run")
    host.set_output_aside()
    later.save(layout.state)
    make_private_directory(layout.run_files("first").directory)
    earlier.save(layout.run_files("first").state)
    later.hosts[0].output.write_text("of the second run")
    assert reload_state(earlier).hosts[0].output.read_text() == "of the first run"
    assert reload_state(later).hosts[0].output.read_text() == "of the second run"


def test_each_run_of_a_directory_keeps_its_files(make_plan: MakePlan, tmp_path: Path) -> None:
    layout = Layout(tmp_path / "exp")
    states = []
    for run_id in ("first", "second"):
        plan = replace(make_plan(exp_dir=layout.exp_dir), run_id=run_id)
        save_plan(plan, f"config of {run_id}", f"overrides of {run_id}", f"launch of {run_id}")
        states.append(make_state(plan))
        states[-1].save(layout.state)
    for run_id in ("first", "second"):
        files = layout.run_files(run_id)
        texts = [path.read_text() for path in (files.config, files.overrides, files.launch)]
        assert texts == [f"{name} of {run_id}" for name in ("config", "overrides", "launch")]
        assert (read_json(files.plan) or {})["run_id"] == run_id
    assert layout.config.read_text() == "config of second"
    assert load_states(layout) == states
    # A stop that was recorded before the next start is part of the state.
    assert reload_state(replace(states[0], stop_requested=1.0)) == states[0]
    for path in (layout.runs, layout.run_files("first").directory):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


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
    run_ids = {new_run_id() for _ in range(100)}
    assert len(run_ids) == 100
    assert all("/" not in run_id and run_id.isascii() for run_id in run_ids)


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


def test_log_dir_contains_the_run_directories(tmp_path: Path) -> None:
    layout = Layout(tmp_path, tmp_path / "elsewhere")
    assert layout.run_dir(0, "h", "r") == tmp_path / "elsewhere" / "host_0_h" / "r"
    assert layout.script(0, "h") == tmp_path / "logs/scripts/host_0_h_run.sh"


def test_files_are_private_and_complete(tmp_path: Path) -> None:
    directory = tmp_path / "a" / "b"
    make_private_directory(directory)
    make_private_directory(directory)
    for created in (directory, directory.parent):
        assert stat.S_IMODE(created.stat().st_mode) == 0o700
    path = directory / "file.json"
    write_json(path, {"ü": 1})
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_json(path) == {"ü": 1}
    with pytest.raises(UnicodeEncodeError):
        write_atomic(path, "\ud800")
    assert read_json(path) == {"ü": 1}
    assert os.listdir(directory) == ["file.json"]  # noqa: PTH208


@pytest.mark.root  # who else may give files away
def test_files_replaced_by_root_keep_their_owner(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_json(path, {})
    os.chown(path, 65534, 100)
    write_json(path, {"ended": 1})
    status = path.stat()
    assert (status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)) == (65534, 100, 0o600)
    write_json(tmp_path / "new.json", {})
    assert (tmp_path / "new.json").stat().st_uid == 0
