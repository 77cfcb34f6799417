"""Checkpoint directories: selection, retention, and leftovers of a killed run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flagscale.checkpoints import (
    MANIFEST_FILE,
    REQUIRED_FILES,
    TRACKER_FILE,
    check_complete,
    describe_latest,
)
from flagscale.errors import CheckpointError
from flagscale.train.checkpoint.store import EXTRA_BEST_KEY, CheckpointStore


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "it's a $directory")


def save(
    store: CheckpointStore, *iterations: int, entries: Mapping[str, object] | None = None
) -> None:
    for iteration in iterations:
        directory = store.begin(iteration)
        for name in REQUIRED_FILES:
            (directory / name).write_bytes(b"small " + name.encode())
        (directory / "a.distcp").write_bytes(b"x" * 100)
        (directory / "sub").mkdir()
        (directory / "sub" / "b").write_bytes(b"y")
        store.publish(iteration, {"layout": {"world": 2}, **(entries or {})})


def flip_bit(path: Path, position: int = 3) -> None:
    """Flip one bit; the size stays the same."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def replace_text(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def list_checkpoints(store: CheckpointStore) -> list[str]:
    return sorted(path.name for path in store.root.iterdir())


def read_tracker(store: CheckpointStore) -> str:
    return (store.root / TRACKER_FILE).read_text()


def test_a_published_checkpoint_is_found(store: CheckpointStore) -> None:
    save(store, 5, 10)
    checkpoint = store.find_latest()
    assert checkpoint is not None
    assert (checkpoint.path.name, checkpoint.iteration, checkpoint.skipped) == (
        "iter_0000010",
        10,
        (),
    )
    assert checkpoint.content["layout"] == {"world": 2}
    assert read_tracker(store) == "10\n"
    assert list_checkpoints(store) == ["iter_0000005", "iter_0000010", TRACKER_FILE]


def test_an_empty_directory_has_no_checkpoint(store: CheckpointStore) -> None:
    assert store.find_latest() is None
    store.root.mkdir()
    (store.root / "wandb").mkdir()
    (store.root / "iter_12").mkdir()  # not a name that is written here
    assert store.find_latest() is None


def test_an_incomplete_checkpoint_is_not_found(store: CheckpointStore) -> None:
    save(store, 1)
    (store.begin(2) / "a.distcp").write_bytes(b"x")
    checkpoint = store.find_latest()
    assert checkpoint is not None
    assert (checkpoint.iteration, checkpoint.skipped) == (1, ())
    store.abandon(2)
    assert list_checkpoints(store) == ["iter_0000001", TRACKER_FILE]


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        pytest.param(lambda p: os.truncate(p / "a.distcp", 99),
                     "a.distcp has 99 bytes, expected 100", id="cut"),
        pytest.param(lambda p: os.truncate(p / "a.distcp", 101), "has 101 bytes", id="grown"),
        pytest.param(lambda p: (p / "sub" / "b").unlink(), "sub/b is missing", id="missing"),
        pytest.param(lambda p: (p / MANIFEST_FILE).write_text("{}"), "manifest.json cannot be read",
                     id="empty-manifest"),
        pytest.param(lambda p: os.truncate(p / MANIFEST_FILE, 30), "manifest.json cannot be read",
                     id="cut-manifest"),
        pytest.param(lambda p: (p / MANIFEST_FILE).unlink() or (p / "metadata.json").unlink(),
                     "metadata.json is missing", id="no-manifest"),
        *(pytest.param(lambda p, name=name: flip_bit(p / name),
                       f"{name} is not as it was written: its SHA-256 differs", id=f"flip-{name}")
          for name in REQUIRED_FILES),
        pytest.param(lambda p: replace_text(p / MANIFEST_FILE, '"world": 2', '"world": 3'),
                     "manifest.json is not as it was written", id="other-manifest"),
    ],
)  # fmt: skip
def test_damaged_checkpoints_are_skipped(store: CheckpointStore, edit: object, reason: str) -> None:
    save(store, 1, 2)
    edit(store.path(2))  # type: ignore[operator]
    checkpoint = store.find_latest()
    assert checkpoint is not None
    assert checkpoint.iteration == 1
    [skipped] = checkpoint.skipped
    assert skipped.startswith("iter_0000002: ")
    assert reason in skipped


def test_only_damaged_checkpoints_are_an_error(store: CheckpointStore) -> None:
    save(store, 1, 2)
    for iteration in (1, 2):
        (store.path(iteration) / "a.distcp").unlink()
    with pytest.raises(CheckpointError) as raised:
        store.find_latest()
    assert "holds no whole checkpoint" in str(raised.value)
    assert "iter_0000001: a.distcp is missing" in str(raised.value)


@pytest.mark.parametrize(
    ("text", "iteration", "skip_reason"),
    [
        pytest.param("2\n", 2, "iter_0000003: newer than", id="back"),
        pytest.param("9\n", 3, "iter_0000009: missing, although", id="not-there"),
        pytest.param("soon", 3, "holds 'soon', expected an iteration", id="words"),
        pytest.param("", 3, "holds '', expected an iteration", id="empty"),
        pytest.param(None, 3, None, id="none"),
    ],
)
def test_the_tracker_file_selects_the_checkpoint(
    store: CheckpointStore, text: str | None, iteration: int, skip_reason: str | None
) -> None:
    save(store, 1, 2, 3)
    path = store.root / TRACKER_FILE
    path.unlink() if text is None else path.write_text(text)
    checkpoint = store.find_latest()
    assert checkpoint is not None
    assert checkpoint.iteration == iteration
    assert [skip_reason in item for item in checkpoint.skipped] == ([True] if skip_reason else [])  # type: ignore[operator]


def test_an_iteration_that_is_saved_again_replaces_the_old_one(store: CheckpointStore) -> None:
    save(store, 1)
    (store.path(1) / "old").touch()
    save(store, 1)
    assert not (store.path(1) / "old").exists()
    assert list_checkpoints(store) == ["iter_0000001", TRACKER_FILE]


def test_leftovers_of_a_killed_run_are_deleted(store: CheckpointStore) -> None:
    save(store, 1, 2)
    (store.root / ".iter_0000003.partial" / "sub").mkdir(parents=True)
    (store.root / ".iter_0000004.removed").mkdir()
    store.path(2).rename(store.root / ".iter_0000002.replaced")  # between the two renames
    (store.root / ".iter_0000009.partial.txt").touch()  # not ours
    save(store, 3)
    assert list_checkpoints(store) == [
        ".iter_0000009.partial.txt", *(f"iter_000000{i}" for i in (1, 2, 3)), TRACKER_FILE,
    ]  # fmt: skip


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    iterations=st.lists(st.integers(1, 30), min_size=1, max_size=8, unique=True),
    damaged_iterations=st.sets(st.integers(1, 30)),
    keep_count=st.integers(1, 4),
    newest=st.integers(1, 30),
)
def test_the_newest_complete_checkpoints_are_kept(
    tmp_path_factory: pytest.TempPathFactory,
    iterations: list[int],
    damaged_iterations: set[int],
    keep_count: int,
    newest: int,
) -> None:
    store = CheckpointStore(tmp_path_factory.mktemp("keep"))
    save(store, *{*iterations, newest})
    for iteration in damaged_iterations - {newest}:
        if store.path(iteration).exists():
            (store.path(iteration) / "a.distcp").unlink()
    store.remove(store.list_superseded(newest, keep_count))
    remaining = set(store.iterations())
    complete_iterations = {i for i in remaining if i not in damaged_iterations or i == newest}
    assert newest in remaining
    assert {i for i in iterations if i > newest} <= remaining  # training went back: not touched
    older = sorted((i for i in {*iterations} - damaged_iterations if i < newest), reverse=True)
    assert {i for i in complete_iterations if i < newest} == set(older[: keep_count - 1])
    assert not list(store.root.glob(".iter_*"))


def test_damaged_checkpoints_are_superseded_too(store: CheckpointStore) -> None:
    save(store, 1, 2, 3)
    (store.path(1) / "a.distcp").unlink()
    assert store.list_superseded(3, 1) == [store.path(2), store.path(1)]
    assert store.list_superseded(3, 5) == []


def test_the_manifest_lists_every_file(store: CheckpointStore) -> None:
    save(store, 7)
    manifest = json.loads((store.path(7) / MANIFEST_FILE).read_text())
    sizes = {name: len(name) + 6 for name in REQUIRED_FILES}
    assert manifest["files"] == {"a.distcp": 100, "sub/b": 1, **sizes}
    assert check_complete(store.path(7)) == {"version": 1, "iteration": 7, "layout": {"world": 2}}


def test_a_manifest_without_checksums_is_accepted(store: CheckpointStore) -> None:
    save(store, 7)
    path = store.path(7) / MANIFEST_FILE
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in manifest.items() if k not in ("seal", "digests")}))
    flip_bit(store.path(7) / "common.pt")
    assert check_complete(store.path(7))["layout"] == {"world": 2}


def test_latest_checkpoint_is_described_in_json_without_torch(store: CheckpointStore) -> None:
    assert describe_latest(str(store.root)) == {}
    save(store, 1, 2)
    flip_bit(store.path(2) / "common.pt")
    command = [sys.executable, "-X", "importtime", "-m", "flagscale.checkpoints", str(store.root)]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    assert not re.search(r"\| +torch\b", process.stderr)
    assert json.loads(process.stdout) == {
        "path": str(store.path(1)),
        "iteration": 1,
        "content": {"version": 1, "iteration": 1, "layout": {"world": 2}},
        "skipped": ["iter_0000002: common.pt is not as it was written: its SHA-256 differs"],
    }
    flip_bit(store.path(1) / "common.pt")
    description = describe_latest(str(store.root))
    assert description["refused"].startswith(
        f"{store.root}: holds no whole checkpoint:\n  iter_0000002:"
    )
    assert "remove the damaged directories" in description["hint"]


@pytest.mark.parametrize(
    ("bests", "keep_last", "remaining"),
    [
        pytest.param({2: False}, 1, [2, 5], id="best-is-kept"),
        pytest.param({4: False}, 2, [4, 5], id="best-counts-among-the-newest"),
        pytest.param({2: False, 4: False}, 1, [4, 5], id="former-best-is-an-ordinary-one"),
        pytest.param({2: True, 4: False}, None, [1, 3, 4, 5], id="extra-best-is-replaced"),
        pytest.param({2: False, 4: False}, None, [1, 2, 3, 4, 5], id="nothing-else-is-deleted"),
    ],
)
def test_retention_keeps_the_best_checkpoint(
    store: CheckpointStore, bests: dict[int, bool], keep_last: int | None, remaining: list[int]
) -> None:
    for iteration in range(1, 6):
        save(store, iteration, entries={EXTRA_BEST_KEY: bests.get(iteration, False)})
        superseded = store.mark_best(iteration) if iteration in bests else []
        if keep_last:
            superseded += store.list_superseded(iteration, keep_last)
        store.remove(superseded)
    assert sorted(store.iterations()) == remaining
    assert store.best_iteration() == max(bests)


def test_a_checkpoint_is_loaded_by_name(store: CheckpointStore) -> None:
    save(store, 1, 2, 3)
    assert store.best_iteration() is None
    store.mark_best(2)
    for name in ("best", "iter_0000002"):
        description = describe_latest(str(store.root / name))
        assert description["path"] == str(store.root.resolve() / "iter_0000002")
        assert description["iteration"] == 2
    (store.root / "iter_0000002" / "a.distcp").write_bytes(b"")
    assert "a.distcp has 0 bytes" in describe_latest(str(store.root / "best"))["refused"]
    store.remove([store.path(2)])
    assert store.best_iteration() is None
    assert describe_latest(str(store.root / "best")) == {}
