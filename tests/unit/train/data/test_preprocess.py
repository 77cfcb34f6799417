"""Preprocessing: the same output for any number of workers, and complete files or none."""

from __future__ import annotations

import json
import os
import resource
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flagscale.errors import DataError
from flagscale.train.data import corpus
from flagscale.train.data.indexed_dataset import validate_dataset
from flagscale.train.data.preprocess import PreprocessJob, PreprocessSummary, preprocess
from flagscale.train.data.tokenizers import TokenizerSpec

pytestmark = pytest.mark.torch  # writing takes megatron.core's builder

BYTES = TokenizerSpec("ByteLevelTokenizer")
TEXTS = ["alpha", "", "b\nc", "ünï \U0001f600", *(f"document {i} $x 'q'" for i in range(50))]


@pytest.fixture
def job(tmp_path: Path) -> PreprocessJob:
    path = tmp_path / "in put.jsonl"
    lines = [json.dumps({"text": text, "title": f"t{i}"}) for i, text in enumerate(TEXTS)]
    path.write_text("\n".join(lines) + "\n")
    return PreprocessJob((path,), str(tmp_path / "out" / "it's"), BYTES)


def tokens(prefix: str) -> list[list[int]]:
    files = validate_dataset(prefix)
    flat = np.fromfile(files.bin, files.dtype)
    return [part.tolist() for part in np.split(flat, np.cumsum(files.map_lengths())[:-1])]


def expected(texts: list[str], *, eod: bool = False) -> list[list[int]]:
    return [[*text.encode(), *([256] if eod else [])] for text in texts if text]


def test_documents_become_sequences(job: PreprocessJob) -> None:
    reports: list[tuple[int, int]] = []
    summary = preprocess(
        replace(job, append_eod=True), lambda result, total: reports.append((result, total))
    )
    prefix = job.output_prefix + "_text_document"
    assert tokens(prefix) == expected(TEXTS, eod=True)
    size = job.inputs[0].stat().st_size
    count = sum(map(len, expected(TEXTS, eod=True)))
    assert summary == PreprocessSummary([prefix], len(TEXTS) - 1, 1, count, size)
    assert reports[-1] == (size, size)


def test_the_output_does_not_depend_on_workers_or_chunks(
    job: PreprocessJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    preprocess(job)
    first = tokens(job.output_prefix + "_text_document")
    monkeypatch.setattr(corpus, "CHUNK_BYTES", 64)
    preprocess(replace(job, workers=3, overwrite=True))
    assert tokens(job.output_prefix + "_text_document") == first


def test_several_keys_and_inputs(job: PreprocessJob, tmp_path: Path) -> None:
    more = tmp_path / "more.jsonl"
    more.write_text('{"text": "last", "title": ""}')
    preprocess(replace(job, inputs=(*job.inputs, more), keys=("title", "text")))
    titles = [f"t{i}" for i in range(len(TEXTS))]
    assert tokens(job.output_prefix + "_title_document") == expected(titles)
    assert tokens(job.output_prefix + "_text_document") == expected([*TEXTS, "last"])


def test_plain_text(job: PreprocessJob, tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text("x = 1\ny = 2\n")
    preprocess(replace(job, inputs=(path,)))
    assert tokens(job.output_prefix + "_text_document") == expected(["x = 1\ny = 2\n"])
    preprocess(replace(job, inputs=(path,), format="lines", overwrite=True))
    assert tokens(job.output_prefix + "_text_document") == expected(["x = 1", "y = 2"])


def list_files(job: PreprocessJob) -> list[str]:
    folder = Path(job.output_prefix).parent
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_existing_output_is_kept(job: PreprocessJob) -> None:
    preprocess(job)
    before = [(p, p.read_bytes()) for p in sorted(Path(job.output_prefix).parent.iterdir())]
    with pytest.raises(DataError, match=r"exists already\n.*--overwrite replaces it"):
        preprocess(job)
    job.inputs[0].write_text('{"text": "new"}\n{"oops": 1}\n')
    with pytest.raises(DataError, match=":2: no key 'text'"):
        preprocess(replace(job, overwrite=True))
    assert [(p, p.read_bytes()) for p, _ in before] == before
    assert len(list_files(job)) == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param("", "the input is empty", id="empty"),
        pytest.param("\n\n", "all 0 documents are empty", id="blank-lines"),
        pytest.param('{"text": ""}\n' * 3, "all 3 documents are empty", id="empty-texts"),
        pytest.param('{"text": "a"}\n{"text', "put.jsonl:2: not JSON", id="corrupt"),
    ],
)
def test_bad_input_leaves_nothing(job: PreprocessJob, content: str, message: str) -> None:
    job.inputs[0].write_text(content)
    with pytest.raises(DataError, match=message):
        preprocess(job)
    assert list_files(job) == []


def test_begin_needs_a_token(job: PreprocessJob) -> None:
    with pytest.raises(DataError, match="no token that begins a document"):
        preprocess(replace(job, prepend_bos=True))


def test_keys_of_plain_text(job: PreprocessJob, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("x")
    with pytest.raises(DataError, match="json keys title need JSON lines"):
        preprocess(replace(job, inputs=(path,), keys=("title",)))


def test_a_folder_that_cannot_be_made(job: PreprocessJob, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="cannot be created"):
        preprocess(replace(job, output_prefix=str(tmp_path / "file" / "x")))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written(job: PreprocessJob, tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(DataError, match="not writable"):
        preprocess(replace(job, output_prefix=str(tmp_path / "locked" / "x")))


def test_a_full_disk_leaves_nothing(job: PreprocessJob) -> None:
    """A limit on the size of files replaces the full disk: writing fails in the same places."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (256, limits[1]))
    try:
        with pytest.raises(DataError, match="cannot be written: File too large"):
            preprocess(job)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list_files(job) == []


def test_int32_for_a_large_vocabulary(job: PreprocessJob, tmp_path: Path) -> None:
    path = tmp_path / "ids.txt"
    path.write_text("70000 1 2")
    big = replace(job, inputs=(path,), tokenizer=TokenizerSpec("NullTokenizer", None, 80_000))
    preprocess(big)
    assert tokens(job.output_prefix + "_text_document") == [[70000, 1, 2]]
    assert validate_dataset(job.output_prefix + "_text_document").dtype == np.int32
