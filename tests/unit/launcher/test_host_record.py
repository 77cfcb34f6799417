"""Tests of the record that a host writes of its software, devices and inputs."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from support.waiting import wait_for

from flagscale.launcher.host_record import (
    IMAGE_VARIABLE,
    HostRecorder,
    find_inputs,
    read_host_record,
)
from flagscale.launcher.layout import HOST_RECORD_FILE
from flagscale.module_command import python_arguments


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """Data and a tokenizer's directory, which has weights next to the tokenizer."""
    (tmp_path / "a.bin").write_bytes(b"tokens")
    (tmp_path / "a.idx").write_bytes(b"index")
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer" / "model.safetensors").write_bytes(b"weights")
    return tmp_path


def _command(inputs: Path) -> list[str]:
    return [
        *("torchrun", "--nnodes", "1", "train.py", "--data-path", "0.3", f"{inputs}/a"),
        *("0.7", f"{inputs}/missing", f"--tokenizer-path={inputs}/tokenizer", "--bf16"),
    ]


def _record(directory: Path, command: list[str], node_rank: int = 0) -> None:
    words = (str(directory / HOST_RECORD_FILE), str(node_rank), *command)
    arguments = python_arguments("flagscale.launcher.host_record")
    variables = {"NCCL_DEBUG": "INFO", "OMP_API_KEY": "secret", "TORCHELASTIC_RUN_ID": "x"}
    environment = {**os.environ, IMAGE_VARIABLE: "registry/image:1", **variables}
    subprocess.run([sys.executable, *arguments, *words], check=True, env=environment)


def test_record_of_a_host(inputs: Path) -> None:
    _record(inputs, _command(inputs))
    host, files = read_host_record(inputs)
    assert host is not None
    assert (host.host, host.container) == (os.uname().nodename, "registry/image:1")
    assert host.packages["numpy"] == version("numpy")
    assert {*host.code} >= {"flagscale"}
    assert host.environment["NCCL_DEBUG"] == "INFO"
    assert host.environment.keys().isdisjoint({"OMP_API_KEY", "TORCHELASTIC_RUN_ID", "HOME"})
    assert files.mixtures == {"data_path": ("0.3", f"{inputs}/a", "0.7", f"{inputs}/missing")}
    by_name = {Path(file.path).name: file for file in files.files}
    assert [*by_name] == ["a.bin", "a.idx", "tokenizer"]
    assert (by_name["a.bin"].size, by_name["a.bin"].sha256) == (6, "")
    assert by_name["a.idx"].sha256 == hashlib.sha256(b"index").hexdigest()
    assert by_name["tokenizer"].size == 2, "weights are no part of a tokenizer"
    assert (inputs / HOST_RECORD_FILE).stat().st_mode & 0o077 == 0


def test_digest_of_a_tokenizer_follows_its_files(inputs: Path) -> None:
    digests = set()
    for name, text in (
        ("tokenizer.json", "{}"),
        ("tokenizer.json", "[]"),
        ("tokenizer_config.json", "{}"),
        ("chat_template.jinja", "x"),
    ):
        (inputs / "tokenizer" / name).write_text(text)
        _record(inputs, _command(inputs))
        digests.add(read_host_record(inputs)[1].files[-1].sha256)
    assert len(digests) == 4


def test_other_hosts_report_sizes_only(inputs: Path) -> None:
    digests = set()
    for text in ("index", "other index"):
        (inputs / "a.idx").write_text(text)
        (inputs / HOST_RECORD_FILE).unlink(missing_ok=True)
        _record(inputs, _command(inputs), node_rank=1)
        record = read_host_record(inputs)[1]
        digests.add(record.sizes)
        assert record.files == ()
    assert len(digests) == 2


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        pytest.param(["python", "x.py", "a"], [], id="none"),
        pytest.param(["--data-path", "/d/a"], ["/d/a.bin", "/d/a.idx"], id="one"),
        pytest.param(
            ["--train-data-path", "/d/a", "/d/b.jsonl", "--lr", "1"],
            ["/d/a.bin", "/d/a.idx", "/d/b.jsonl"],
            id="data-and-conversations",
        ),
        pytest.param(["--data-path=/d/a b"], ["/d/a b.bin", "/d/a b.idx"], id="equals"),
        pytest.param(["--data-path"], [], id="without-value"),
        pytest.param(["--data-path", "s3://x/a"], [], id="remote"),
        pytest.param(["--tokenizer-model", "/t/x.model"], ["/t/x.model"], id="other-name"),
        pytest.param(["--chat-template", "/t/x.jinja"], ["/t/x.jinja"], id="template"),
    ],
)
def test_inputs_of_a_command_line(words: list[str], expected: list[str]) -> None:
    assert [*find_inputs(words)[1]] == expected


def test_damaged_records_are_read_as_far_as_possible(tmp_path: Path) -> None:
    assert read_host_record(tmp_path)[0] is None
    lines = [
        json.dumps(
            {"kind": "host", "host": "a", "packages": {"torch": "2"}, "new in a version": 1}
        ),
        "[1]",
        '{"kind": "inputs", "mixtures": 3}',
        '{"kind": "file", "argument": "a", "path": "b", "size": 1, "sha256": ""}',
        '{"kind": "file", "argument": "a"',
    ]
    (tmp_path / HOST_RECORD_FILE).write_text("\n".join(lines))
    host, inputs = read_host_record(tmp_path)
    assert host is not None
    assert (host.host, host.packages, host.python) == ("a", {"torch": "2"}, "")
    assert [file.path for file in inputs.files] == ["b"]


def test_recorder_ends_with_the_job(tmp_path: Path) -> None:
    """A file system that hangs does not keep the agent from ending."""
    os.mkfifo(tmp_path / "pipe.jsonl")
    recorder = HostRecorder()
    recorder.start(tmp_path, 0, ["--data-path", str(tmp_path / "pipe.jsonl")])
    (pid,) = recorder.pids
    wait_for(lambda: '"code"' in _read(tmp_path / HOST_RECORD_FILE), "all but the file")
    recorder.stop()
    recorder.record_exit(*os.waitpid(pid, 0))
    assert not recorder.pids
    recorder.stop()


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""
