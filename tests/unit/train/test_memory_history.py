"""Memory snapshots: when which rank writes one, and where."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flagscale.accelerators.base import Accelerator
from flagscale.config.arguments.spec.command_line import parse_arguments
from flagscale.train.memory_history import MemoryHistory

pytestmark = pytest.mark.torch


class RecordingAccelerator(Accelerator):
    """Device that records allocations, as CUDA does."""

    def record_memory_history(self) -> bool:
        return True

    def dump_memory_history(self, path: Path) -> None:
        path.write_bytes(b"snapshot")


def make_history(options: str, rank: int = 0, accelerator: Any = None) -> MemoryHistory:
    device: Any = SimpleNamespace(accelerator=accelerator or RecordingAccelerator())
    return MemoryHistory(parse_arguments(options.split()), rank, device)


@pytest.mark.parametrize(
    ("options", "rank", "written"),
    [
        ("--memory-snapshot-path {}/a/mine.bin", 0, ["a/mine_rank0_step3.bin"]),
        ("--memory-snapshot-path {}/mine", 0, ["mine_rank0_step3.pickle"]),
        ("--profile-dir {}/traces --tensorboard-dir {}/b", 0, ["traces/memory_rank0_step3.pickle"]),
        ("--tensorboard-dir {}/b", 0, ["b/memory_rank0_step3.pickle"]),
        ("--profile-dir {}", 1, []),
        ("--profile-dir {} --profile-ranks 1 2", 2, ["memory_rank2_step3.pickle"]),
    ],
)
def test_snapshot_after_a_step(options: str, rank: int, written: list[str], tmp_path: Path) -> None:
    common = "--record-memory-history --memory-snapshot-step 3"
    history = make_history(f"{common} {options.replace('{}', str(tmp_path))}", rank)
    assert not history.lacks_support
    for step in range(1, 6):
        history.after_step(step)
    paths = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [str(path.relative_to(tmp_path)) for path in paths] == written
    assert [path.stat().st_mode & 0o777 for path in paths] == [0o600] * len(written)


def test_rank_out_of_memory_writes_a_snapshot(tmp_path: Path) -> None:
    """Whatever ``profile_ranks`` are, and without a step."""
    history = make_history(f"--record-memory-history --profile-dir {tmp_path}", rank=5)
    lines: list[str] = []
    history.log = lines.append
    history.after_step(1)
    path = history.dump("out_of_memory")
    assert path == tmp_path / "memory_rank5_out_of_memory.pickle"
    assert path.read_bytes() == b"snapshot"
    assert lines == [f"memory snapshot of rank 5: {path}"]


def test_snapshot_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    history = make_history(f"--record-memory-history --profile-dir {tmp_path}/file/below")
    lines: list[str] = []
    history.log = lines.append
    assert history.dump("out_of_memory") is None
    assert lines[0].startswith(f"memory snapshot: {tmp_path}/file/below/memory_rank0_out_of_memory")


@pytest.mark.parametrize(
    ("options", "accelerator", "lacks_support"),
    [
        ("", RecordingAccelerator(), False),
        ("--record-memory-history", Accelerator(), True),
    ],
    ids=["not-requested", "not-supported"],
)
def test_nothing_is_written_without_recording(
    *, options: str, accelerator: Accelerator, lacks_support: bool, tmp_path: Path
) -> None:
    history = make_history(f"{options} --profile-dir {tmp_path}", accelerator=accelerator)
    assert history.lacks_support == lacks_support
    assert history.dump("out_of_memory") is None
    assert list(tmp_path.iterdir()) == []
