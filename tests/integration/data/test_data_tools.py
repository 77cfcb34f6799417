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


def run_tool(name: str, *options: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "data" / f"{name}.py"), *map(str, options)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.slow
@pytest.mark.torch
def test_quickstart_is_reused_and_repaired(tmp_path: Path) -> None:
    first_run = run_tool("quickstart", "--output", "q s", cwd=tmp_path)
    assert first_run.returncode == 0, first_run.stderr
    assert "next: python run.py" in first_run.stdout
    output = tmp_path / "q s"
    files = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    summary = validate_dataset(str(output / "stdlib_text_document"))
    assert 8000 < summary.find_token_range()[1] < 8192
    second_run = run_tool("quickstart", "--output", "q s", cwd=tmp_path)
    assert second_run.returncode == 0
    assert "already exists" in second_run.stdout
    assert {path: path.read_bytes() for path in files} == files

    # Damage is noticed and mended, with the very same content.
    tokens_file = output / "stdlib_text_document.bin"
    tokens_file.write_bytes(tokens_file.read_bytes()[:-2])
    repair_run = run_tool("quickstart", "--output", "q s", cwd=tmp_path)
    assert "created in" in repair_run.stdout
    assert {path: path.read_bytes() for path in files} == files
    assert not list(output.glob("*partial*"))


def test_the_corpus_is_sorted_and_without_tests() -> None:
    names = [path.as_posix() for path in list_sources()]
    assert any(name.endswith("/json/decoder.py") for name in names)
    assert not any("/test/" in name or "site-packages" in name for name in names)
    parts = [path.parts for path in list_sources()]
    assert len(set(parts)) == len(parts)


@pytest.mark.torch
def test_tokenizer_is_trained_and_text_is_preprocessed(tmp_path: Path) -> None:
    source = tmp_path / "my $corpus.jsonl"
    texts = [f"the number {i} is not {i + 1}, 'quoted' \"twice\"\n" * 3 for i in range(50)]
    source.write_text("".join(json.dumps({"body": text}) + "\n" for text in texts))
    training = run_tool(
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
    assert training.returncode == 0, training.stderr
    preprocessing = run_tool(
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
    assert preprocessing.returncode == 0, preprocessing.stderr
    assert "50 documents" in preprocessing.stdout
    assert "100 %" in preprocessing.stderr
    assert "Warning" not in preprocessing.stderr
    assert validate_dataset(str(tmp_path / "out" / "a_body_document")).document_count == 50
    second_run = run_tool(
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
    assert (second_run.returncode, "exists already" in second_run.stderr) == (1, True)


@pytest.mark.parametrize(
    ("name", "options", "message"),
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
def test_errors_are_reported_without_a_traceback(
    tmp_path: Path, name: str, options: list[str], message: str
) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text\n')
    result = run_tool(name, *options, cwd=tmp_path)
    assert result.returncode == 1
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["bad.jsonl"]
