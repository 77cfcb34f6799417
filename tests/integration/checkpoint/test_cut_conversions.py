"""Conversions that are cut: what stays, and what the same command makes of it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.foreign_models import save
from support.full_disk import fill, small_disk

from flagscale.checkpoint_metadata import read_metadata
from flagscale.errors import CheckpointError
from flagscale.train.checkpoint import checksums
from flagscale.train.checkpoint.formats import convert, distributed_writing, huggingface
from flagscale.train.checkpoint.formats.base import format_of
from flagscale.train.checkpoint.formats.parts import RECORD, Origin, resumable

pytestmark = [pytest.mark.torch, pytest.mark.integration]

SMALL = 20_000
"""Bytes of a file here, so that a tiny model has several."""
WORDS = {
    "huggingface": ["--to", "huggingface"],
    "torch_dist": ["--to", "torch_dist"],
    "megatron_dist": ["--to", "megatron_dist"],
    "torch": ["--to", "torch", "--pipeline-model-parallel-size", "2"],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "llama"
    save("llama", path)
    return path


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface, "_SHARD", SMALL)
    monkeypatch.setattr(distributed_writing, "_FILE", SMALL)


def cut(
    source: Path, target: Path, words: list[str], fraction: float, how: Callable[[], Any]
) -> int:
    """Convert in a process in which ``how`` is called at ``fraction`` of the way; its status."""
    if (child := os.fork()) == 0:

        def counted(_report: object, total: int) -> Callable[[int], None]:
            done = [0, 0]

            def add(size: int) -> None:
                done[0] += size
                if done[0] > total * fraction and not done[1]:
                    done[1] = 1
                    how()

            return add

        convert._counted = counted
        code = convert.main([str(source), str(target), *words])
        sys.stderr.flush()
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def contents(path: Path) -> dict[str, bytes]:
    """The files of a conversion by name, but for the manifest, which says times."""
    files = {item.relative_to(path).as_posix(): item for item in path.rglob("*") if item.is_file()}
    return {name: item.read_bytes() for name, item in files.items() if "manifest" not in name}


def marks(root: Path, names: list[str]) -> dict[str, tuple[int, int]]:
    """What tells whether files were written again."""
    return {name: ((root / name).stat().st_ino, (root / name).stat().st_mtime_ns) for name in names}


@pytest.mark.parametrize("fraction", [0.3, 0.45, 0.75], ids=["early", "late", "when compared"])
@pytest.mark.parametrize("to", WORDS)
def test_what_was_killed_goes_on_from_its_finished_files(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], to: str, fraction: float
) -> None:
    """Nothing looks whole in between; in the end there is what an uncut conversion makes."""
    target, uncut = tmp_path / "a" / "out", tmp_path / "b" / "out"
    assert cut(model, target, WORDS[to], fraction, die) == -signal.SIGKILL
    with pytest.raises(CheckpointError):
        format_of(target)
    (record,) = (tmp_path / "a").rglob(RECORD)
    names = list(json.loads(record.read_text())["parts"])
    finished = marks(record.parent, names)
    assert convert.main([str(model), str(target), *WORDS[to]]) == 0
    told = f"an earlier conversion has finished: {len(names)}; going on from them"
    assert told in capsys.readouterr().err
    final = target / "iter_0000000" if to == "torch_dist" else target
    assert marks(final, names) == finished
    assert convert.main([str(model), str(uncut), *WORDS[to]]) == 0
    assert contents(target) == contents(uncut)
    assert [*tmp_path.rglob(RECORD), *tmp_path.rglob("*.partial")] == []


def test_a_full_disk_keeps_what_is_finished(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with small_disk(tmp_path, "2m") as disk:
        target = disk / "out"
        assert cut(model, target, [], 0.3, lambda: fill(disk)) == 1
        told = capfd.readouterr().err
        assert "No space left on device" in told
        assert "; the same command goes on from them" in told
        assert list(disk.rglob("__*.distcp"))
        with pytest.raises(CheckpointError):
            format_of(target)
        (disk / "filler").unlink()
        assert convert.main([str(model), str(target)]) == 0
        assert "going on from them" in capfd.readouterr().err
        assert format_of(target).read(target).size == format_of(model).read(model).size


def _touched(model: Path, _partial: Path) -> list[str]:
    """Other weights, of the same size and the same time."""
    file = next(model.glob("*.safetensors"))
    stat, content = file.stat(), bytearray(file.read_bytes())
    content[-2:] = b"\x00\x00"
    file.write_bytes(content)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    return []


def _damaged(_model: Path, partial: Path) -> list[str]:
    file = min(partial.rglob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return []


CHANGES: dict[str, tuple[Callable[[Path, Path], list[str]], str]] = {
    "source": (_touched, "its source is not what an earlier conversion to this place began with"),
    "options": (lambda *_: ["--dtype", "bf16"], "what was asked for is not what an earlier"),
    "restart": (lambda *_: ["--restart"], ""),
    "damage": (_damaged, "__0_0.distcp is not what was written: it is made again"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_only_what_is_the_same_goes_on(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    for item in model.iterdir():
        (source / item.name).write_bytes(item.read_bytes())
    assert cut(source, target, [], 0.4, die) == -signal.SIGKILL
    (partial,) = tmp_path.rglob("*.partial")
    change, told = CHANGES[case]
    words = change(source, partial)
    assert convert.main([str(source), str(target), *words]) == 0
    said = capsys.readouterr().err
    assert told in said
    assert ("going on" in said) == (case == "damage")
    found, wanted = format_of(target).read(target), format_of(source).read(source)
    dtype = torch.bfloat16 if case == "options" else torch.float32
    convert.verify(wanted.cast(dtype), found, report=lambda _size: None)


RECORDS = {
    "cut": "{",
    "no object": "[]",
    "outside": json.dumps({"parts": {"../in/config.json": {"spans": [[0, 9, 1]], "about": 1}}}),
    "no entry": json.dumps({"parts": {"__0_0.distcp": 1}}),
    "no spans": json.dumps({"parts": {"__0_0.distcp": {"spans": [[0, 9, 1], [9]], "about": 1}}}),
}


@pytest.mark.parametrize("case", RECORDS)
def test_a_record_that_is_none_is_not_believed(model: Path, tmp_path: Path, case: str) -> None:
    source, partial = tmp_path / "in", tmp_path / "out" / ".iter_0000000.partial"
    shutil.copytree(model, source)
    partial.mkdir(parents=True)
    (partial / RECORD).write_text(RECORDS[case])
    (partial / "__0_0.distcp").write_text("something")
    assert convert.main([str(source), str(tmp_path / "out")]) == 0
    assert sorted(contents(source)) == sorted(contents(model))


def test_two_do_not_write_to_one_place(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with resumable(tmp_path / ".out.partial", Origin({}, print)):
        assert convert.main([str(model), str(tmp_path / "out"), "--to", "huggingface"]) == 1
        assert "is being written by another process" in capsys.readouterr().err


def test_a_stop_by_the_user_keeps_what_is_finished(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    assert cut(model, tmp_path / "out", [], 0.4, interrupt) == 130
    assert "the same command goes on from them" in capfd.readouterr().err
    assert convert.main([str(model), str(tmp_path / "out")]) == 0


def test_one_bit_of_what_was_converted_is_found(model: Path, tmp_path: Path) -> None:
    """By what ``verify_checkpoint`` compares."""
    assert convert.main([str(model), str(tmp_path / "out")]) == 0
    (path,) = (tmp_path / "out").glob("iter_*")
    storage = read_metadata(path).storage_data.items()
    checksums.verify(path, storage, 0, 1)
    _damaged(model, path)
    with pytest.raises(CheckpointError, match="is not as it was written"):
        checksums.verify(path, storage, 0, 1)
