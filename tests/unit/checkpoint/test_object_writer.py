"""Checkpoints in object storage: whole or not there, whenever a writer is interrupted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flagscale.checkpoints import (
    MANIFEST_FILE,
    PARTIAL_MARK,
    REQUIRED_FILES,
    StoredCheckpoints,
    describe_latest,
    hash_file,
    open_checkpoints,
)
from flagscale.errors import CheckpointError
from flagscale.object_storage import ObjectStore, StorageAddress
from flagscale.train.checkpoint.object_writer import StoredCheckpointWriter
from flagscale.train.checkpoint.store import EXTRA_BEST_KEY, format_manifest

pytest.importorskip("fsspec")


class InterruptionError(Exception):
    """The writer was killed."""


class InterruptedStore(ObjectStore):
    """Client that is killed before one of its changes, counted from 1."""

    def __init__(self, address: StorageAddress) -> None:
        super().__init__(address)
        self.changes_left: int | None = None

    def _count(self) -> None:
        if self.changes_left is not None:
            self.changes_left -= 1
            if self.changes_left < 0:
                raise InterruptionError

    def write(self, address: StorageAddress, content: bytes) -> None:
        self._count()
        super().write(address, content)

    def upload(self, path: Path, address: StorageAddress) -> None:
        self._count()
        super().upload(path, address)

    def delete(self, addresses: Any) -> None:
        for address in addresses:
            self._count()
            super().delete([address])


class Lab:
    """Writer of checkpoints with two tensor files."""

    def __init__(self, root: Path) -> None:
        self.address = StorageAddress.parse(f"file://{root / 'store'}")
        self.store = InterruptedStore(self.address)
        self.writer = StoredCheckpointWriter(self.address, self.store)
        self.directory = root / "staged"
        self.directory.mkdir()

    def save(self, iteration: int, *, keep_count: int | None = None, **entries: Any) -> None:
        """Save as ranks do."""
        files = {name: f"{name} of {iteration}" for name in (*REQUIRED_FILES, "a.distcp", "b")}
        for name, text in files.items():
            (self.directory / name).write_text(text)
        digests = {name: hash_file(self.directory / name) for name in REQUIRED_FILES}
        sizes = {name: len(text) for name, text in files.items()}
        manifest = format_manifest({"iteration": iteration, **entries}, sizes, digests)
        self.writer.begin(iteration)
        self.writer.upload(iteration, self.directory, files)
        self.writer.publish(iteration, manifest)
        if keep_count:
            self.writer.remove(self.writer.list_superseded(iteration, keep_count))

    def latest(self) -> int | None:
        latest = open_checkpoints(str(self.address)).find_latest()
        return None if latest is None else latest.iteration

    def names(self) -> set[str]:
        return {name.partition("/")[0] for name in self.store.list_sizes(self.address)}


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


def count_changes(lab: Lab, action: Callable[[], None]) -> int:
    lab.store.changes_left = 1000
    action()
    changes = 1000 - lab.store.changes_left
    lab.store.changes_left = None
    return changes


SAVES: dict[str, tuple[tuple[int, ...], int, set[int | None]]] = {
    "first": ((), 1, {None, 1}),
    "next": ((1, 2), 3, {2, 3}),
    "again": ((1, 2), 2, {1, 2}),
    # The tracker file says that the run went back, before the new checkpoint is complete.
    "gone-back": ((1, 3), 2, {1, 2, 3}),
}


@pytest.mark.parametrize("case", SAVES)
def test_interrupted_saves(case: str, tmp_path: Path) -> None:
    earlier, iteration, possible = SAVES[case]

    def build(name: str) -> Lab:
        (tmp_path / name).mkdir()
        lab = Lab(tmp_path / name)
        for number in earlier:
            lab.save(number)
        return lab

    probe = build("probe")
    changes = count_changes(probe, lambda: probe.save(iteration, keep_count=1))
    seen = []
    for count in range(changes):
        lab = build(str(count))
        lab.store.changes_left = count
        with pytest.raises(InterruptionError):
            lab.save(iteration, keep_count=1)
        lab.store.changes_left = None
        latest = lab.latest()
        assert latest in possible
        seen.append(latest)
        # The next save deletes what is left.
        lab.save(9, keep_count=1)
        assert lab.latest() == 9
        partial = [name for name in lab.store.list_sizes(lab.address) if PARTIAL_MARK in name]
        assert partial == []
    if case in ("first", "next"):
        assert seen[0] != seen[-1]


def test_retention_and_best(lab: Lab) -> None:
    for iteration in (1, 2, 3):
        lab.save(iteration, **{EXTRA_BEST_KEY: iteration == 2})
        if iteration == 2:
            assert lab.writer.mark_best(2) == []
    assert [path.name for path in lab.writer.list_superseded(3, 1)] == ["iter_0000001"]
    assert open_checkpoints(f"{lab.address}/best").find_latest().iteration == 2  # type: ignore[union-attr]
    assert open_checkpoints(f"{lab.address}/iter_0000001").find_latest().iteration == 1  # type: ignore[union-attr]
    assert [path.name for path in lab.writer.mark_best(3)] == ["iter_0000002"]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        pytest.param("a.distcp", b"", "a.distcp has 0 bytes, expected 13", id="cut"),
        pytest.param("common.pt", b"COMMON.pt of 2", "its SHA-256 differs", id="changed"),
        pytest.param(MANIFEST_FILE, b"{}", "manifest.json cannot be read", id="manifest"),
        pytest.param(MANIFEST_FILE, None, "manifest.json is missing: it was not", id="no-manifest"),
        pytest.param("b", None, "b is missing", id="missing"),
    ],
)
def test_damaged_checkpoints_are_skipped(
    lab: Lab, name: str, content: bytes | None, reason: str
) -> None:
    lab.save(1)
    lab.save(2)
    path = lab.writer.path(2) / name
    if content is None:
        lab.store.delete([path])
    else:
        lab.store.write(path, content)
    latest = describe_latest(str(lab.address))
    assert latest["path"] == f"{lab.address}/iter_0000001"
    assert latest["iteration"] == 1
    [skipped] = latest["skipped"]
    assert reason in skipped


def test_an_incomplete_upload_is_not_published(lab: Lab) -> None:
    lab.save(1)
    lab.writer.begin(2)
    manifest = format_manifest({"iteration": 2}, {"a.distcp": 5}, {})
    with pytest.raises(CheckpointError, match=r"a\.distcp is missing"):
        lab.writer.publish(2, manifest)
    assert lab.latest() == 1
    assert isinstance(open_checkpoints(str(lab.address)), StoredCheckpoints)
