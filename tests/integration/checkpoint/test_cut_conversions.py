"""Interrupted conversions: the files that stay, and resumption by the same command."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import zipfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from support.foreign_models import save_model
from support.full_disk import fill_disk, small_disk

from flagscale.checkpoint_metadata import read_metadata
from flagscale.errors import CheckpointError
from flagscale.train.checkpoint.formats import convert, huggingface, torch_dist_writer
from flagscale.train.checkpoint.formats.base import detect_format
from flagscale.train.checkpoint.formats.resumable_directory import (
    RECORD_FILE,
    ResumeOptions,
    open_resumable,
)
from flagscale.train.checkpoint.range_reader import DiskFiles
from flagscale.train.checkpoint.tensor_archive import open_tensor

pytestmark = [pytest.mark.torch, pytest.mark.integration]

SMALL_FILE_BYTES = 20_000
"""Maximum bytes of a file in these tests, so that a tiny model has several files."""
CONVERSION_OPTIONS = {
    "huggingface": ["--to", "huggingface"],
    "torch_dist": ["--to", "torch_dist"],
    "megatron_dist": ["--to", "megatron_dist"],
    "torch": ["--to", "torch", "--pipeline-model-parallel-size", "2"],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "llama"
    save_model("llama", path)
    return path


@pytest.fixture(autouse=True)
def limit_file_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface, "_MAX_SHARD_BYTES", SMALL_FILE_BYTES)
    monkeypatch.setattr(torch_dist_writer, "_MAX_FILE_BYTES", SMALL_FILE_BYTES)


def interrupt_conversion(
    source: Path,
    target: Path,
    options: list[str],
    fraction: float,
    interrupt_process: Callable[[], Any],
) -> int:
    """Convert in a child process that calls ``interrupt_process`` at a fraction of the work.

    Returns:
        The child's exit status; negative for a signal.
    """
    if (child := os.fork()) == 0:

        def count_bytes(_set_progress: object, total: int) -> Callable[[int], None]:
            bytes_done = [0, 0]

            def add(size: int) -> None:
                bytes_done[0] += size
                if bytes_done[0] > total * fraction and not bytes_done[1]:
                    bytes_done[1] = 1
                    interrupt_process()

            return add

        convert._accumulate_progress = count_bytes
        code = convert.main([str(source), str(target), *options])
        sys.stderr.flush()
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def read_files(path: Path) -> dict[str, bytes]:
    """Read the files of a conversion by name, without the manifest, which has times."""
    files = {item.relative_to(path).as_posix(): item for item in path.rglob("*") if item.is_file()}
    return {name: item.read_bytes() for name, item in files.items() if "manifest" not in name}


def read_identities(root: Path, names: list[str]) -> dict[str, tuple[int, int]]:
    """Return the identities of files, which change if they are written again."""
    return {name: ((root / name).stat().st_ino, (root / name).stat().st_mtime_ns) for name in names}


@pytest.mark.parametrize("fraction", [0.3, 0.45, 0.75], ids=["early", "late", "when compared"])
@pytest.mark.parametrize("output_format", CONVERSION_OPTIONS)
def test_a_killed_conversion_resumes_from_its_finished_files(
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    output_format: str,
    fraction: float,
) -> None:
    """Nothing looks complete in between; the result equals that of an uninterrupted conversion."""
    target, uninterrupted = tmp_path / "a" / "out", tmp_path / "b" / "out"
    assert (
        interrupt_conversion(
            model, target, CONVERSION_OPTIONS[output_format], fraction, kill_this_process
        )
        == -signal.SIGKILL
    )
    with pytest.raises(CheckpointError):
        detect_format(target)
    (record,) = (tmp_path / "a").rglob(RECORD_FILE)
    names = list(json.loads(record.read_text())["parts"])
    finished_identities = read_identities(record.parent, names)
    assert convert.main([str(model), str(target), *CONVERSION_OPTIONS[output_format]]) == 0
    stderr = f"an earlier conversion has finished: {len(names)}; going on from them"
    assert stderr in capsys.readouterr().err
    final = target / "iter_0000000" if output_format == "torch_dist" else target
    assert read_identities(final, names) == finished_identities
    assert convert.main([str(model), str(uninterrupted), *CONVERSION_OPTIONS[output_format]]) == 0
    assert read_files(target) == read_files(uninterrupted)
    assert [*tmp_path.rglob(RECORD_FILE), *tmp_path.rglob("*.partial")] == []


def test_a_full_disk_keeps_finished_files(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with small_disk(tmp_path, "2m") as disk:
        target = disk / "out"
        assert interrupt_conversion(model, target, [], 0.3, lambda: fill_disk(disk)) == 1
        stderr = capfd.readouterr().err
        assert "No space left on device" in stderr
        assert "; the same command goes on from them" in stderr
        assert list(disk.rglob("__*.distcp"))
        with pytest.raises(CheckpointError):
            detect_format(target)
        (disk / "filler").unlink()
        assert convert.main([str(model), str(target)]) == 0
        assert "going on from them" in capfd.readouterr().err
        assert (
            detect_format(target).read(target).total_bytes
            == detect_format(model).read(model).total_bytes
        )


def _replace_weights(model: Path, _temporary_directory: Path) -> list[str]:
    """Replace the weights by others of the same size and with the same time."""
    file = next(model.glob("*.safetensors"))
    stat, content = file.stat(), bytearray(file.read_bytes())
    content[-2:] = b"\x00\x00"
    file.write_bytes(content)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    return []


def _flip_bit(_model: Path, temporary_directory: Path) -> list[str]:
    file = min(temporary_directory.rglob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return []


CHANGES: dict[str, tuple[Callable[[Path, Path], list[str]], str]] = {
    "source": (
        _replace_weights,
        "its source is not what an earlier conversion to this place began with",
    ),
    "options": (lambda *_: ["--dtype", "bf16"], "what was asked for is not what an earlier"),
    "restart": (lambda *_: ["--restart"], ""),
    "damage": (_flip_bit, "__0_0.distcp is not what was written: it is made again"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_only_an_identical_conversion_is_resumed(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    for item in model.iterdir():
        (source / item.name).write_bytes(item.read_bytes())
    assert interrupt_conversion(source, target, [], 0.4, kill_this_process) == -signal.SIGKILL
    (temporary_directory,) = tmp_path.rglob("*.partial")
    change, message = CHANGES[case]
    options = change(source, temporary_directory)
    assert convert.main([str(source), str(target), *options]) == 0
    stdout = capsys.readouterr().err
    assert message in stdout
    assert ("going on" in stdout) == (case == "damage")
    actual, expected = detect_format(target).read(target), detect_format(source).read(source)
    dtype = torch.bfloat16 if case == "options" else torch.float32
    convert.verify(expected.cast(dtype), actual, report=lambda _size: None)


INVALID_RECORDS = {
    "cut": "{",
    "no object": "[]",
    "outside": json.dumps({"parts": {"../in/config.json": {"spans": [[0, 9, 1]], "about": 1}}}),
    "no entry": json.dumps({"parts": {"__0_0.distcp": 1}}),
    "no spans": json.dumps({"parts": {"__0_0.distcp": {"spans": [[0, 9, 1], [9]], "about": 1}}}),
}


@pytest.mark.parametrize("case", INVALID_RECORDS)
def test_an_invalid_record_is_ignored(model: Path, tmp_path: Path, case: str) -> None:
    source, temporary_directory = tmp_path / "in", tmp_path / "out" / ".iter_0000000.partial"
    shutil.copytree(model, source)
    temporary_directory.mkdir(parents=True)
    (temporary_directory / RECORD_FILE).write_text(INVALID_RECORDS[case])
    (temporary_directory / "__0_0.distcp").write_text("something")
    assert convert.main([str(source), str(tmp_path / "out")]) == 0
    assert sorted(read_files(source)) == sorted(read_files(model))


def test_two_conversions_cannot_write_to_one_directory(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_resumable(tmp_path / ".out.partial", ResumeOptions({}, print)):
        assert convert.main([str(model), str(tmp_path / "out"), "--to", "huggingface"]) == 1
        assert "is being written by another process" in capsys.readouterr().err


def test_an_interrupt_keeps_finished_files(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    assert interrupt_conversion(model, tmp_path / "out", [], 0.4, interrupt) == 130
    assert "the same command goes on from them" in capfd.readouterr().err
    assert convert.main([str(model), str(tmp_path / "out")]) == 0


def test_a_flipped_bit_in_a_converted_checkpoint_is_detected(model: Path, tmp_path: Path) -> None:
    """It is detected by ``verify_checkpoint``."""
    assert convert.main([str(model), str(tmp_path / "out")]) == 0
    (path,) = (tmp_path / "out").glob("iter_*")
    _open_tensors(path)
    _flip_bit(model, path)
    with pytest.raises(zipfile.BadZipFile, match="Bad CRC-32"):
        _open_tensors(path)


def _open_tensors(path: Path) -> None:
    """Open and verify all tensors of a checkpoint."""
    with closing(DiskFiles(path)) as files:
        for location in read_metadata(path).storage_data.values():
            content = memoryview(bytearray(location.length))
            files.read_into(location.relative_path, location.offset, [content])
            open_tensor(content, verify=True)
