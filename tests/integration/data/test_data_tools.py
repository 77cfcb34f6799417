"""The commands of tools/data, started as users do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flagscale.train.data.indexed_dataset import validate_dataset
from flagscale.train.data.quickstart import list_sources

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[3]


def tool(name: str, *words: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "data" / f"{name}.py"), *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.slow
@pytest.mark.torch
def test_quickstart_twice(tmp_path: Path) -> None:
    first = tool("quickstart", "--output", "q s", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert "next: python run.py" in first.stdout
    output = tmp_path / "q s"
    files = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    summary = validate_dataset(str(output / "stdlib_text_document"))
    assert 8000 < summary.find_largest_token() < 8192
    again = tool("quickstart", "--output", "q s", cwd=tmp_path)
    assert again.returncode == 0
    assert "already exists" in again.stdout
    assert {path: path.read_bytes() for path in files} == files

    # Damage is noticed and mended, with the very same content.
    binary = output / "stdlib_text_document.bin"
    binary.write_bytes(binary.read_bytes()[:-2])
    mended = tool("quickstart", "--output", "q s", cwd=tmp_path)
    assert "created in" in mended.stdout
    assert {path: path.read_bytes() for path in files} == files
    assert not list(output.glob("*partial*"))


def test_the_corpus_is_sorted_and_without_tests() -> None:
    names = [path.as_posix() for path in list_sources()]
    assert any(name.endswith("/json/decoder.py") for name in names)
    assert not any("/test/" in name or "site-packages" in name for name in names)
    parts = [path.parts for path in list_sources()]
    assert len(set(parts)) == len(parts)


@pytest.mark.torch
def test_text_to_tokenizer_to_data(tmp_path: Path) -> None:
    source = tmp_path / "my $corpus.jsonl"
    texts = [f"the number {i} is not {i + 1}, 'quoted' \"twice\"\n" * 3 for i in range(50)]
    source.write_text("".join(json.dumps({"body": text}) + "\n" for text in texts))
    trained = tool(
        "train_tokenizer",
        "--input",
        source,
        "--json-key",
        "body",
        "--vocab-size",
        300,
        "--output",
        "tok en",
        cwd=tmp_path,
    )
    assert trained.returncode == 0, trained.stderr
    dataset = tool(
        "preprocess",
        "--input",
        "*.jsonl",
        "--json-keys",
        "body",
        "--output-prefix",
        "out/a",
        "--tokenizer-path",
        "tok en",
        "--append-eod",
        "--workers",
        2,
        cwd=tmp_path,
    )
    assert dataset.returncode == 0, dataset.stderr
    assert "50 documents" in dataset.stdout
    assert "100 %" in dataset.stderr
    assert "Warning" not in dataset.stderr
    assert validate_dataset(str(tmp_path / "out" / "a_body_document")).documents == 50
    again = tool(
        "preprocess",
        "--input",
        source,
        "--json-keys",
        "body",
        "--output-prefix",
        "out/a",
        "--tokenizer-path",
        "tok en",
        cwd=tmp_path,
    )
    assert (again.returncode, "exists already" in again.stderr) == (1, True)


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("preprocess", ["--input", "none.txt", "--output-prefix", "x"], "no such input file"),
        (
            "preprocess",
            [
                "--input",
                "bad.jsonl",
                "--output-prefix",
                "x",
                "--tokenizer-type",
                "ByteLevelTokenizer",
            ],
            "bad.jsonl:2: not JSON",
        ),
        (
            "preprocess",
            ["--input", "bad.jsonl", "--output-prefix", "x", "--tokenizer-type", "ByteTokenizer"],
            "did you mean ByteLevelTokenizer",
        ),
        (
            "train_tokenizer",
            ["--input", "bad.jsonl", "--output", "t", "--vocab-size", "300"],
            "bad.jsonl:2: not JSON",
        ),
    ],
    ids=["no-input", "corrupt", "tokenizer", "train-corrupt"],
)
def test_errors_are_one_message(tmp_path: Path, name: str, words: list[str], message: str) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text\n')
    result = tool(name, *words, cwd=tmp_path)
    assert result.returncode == 1
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["bad.jsonl"]
