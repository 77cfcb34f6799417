"""Tests of ``--comm``, the backend options of the benchmark's commands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.bench_lines import parse_spec

from flagscale.bench.collectives.cli import read_specs
from flagscale.errors import ConfigError


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("allr", {}),
        ("--comm socket_ifname=lo allr", {"auto": {"socket_ifname": "lo"}}),
        (
            "allr --backend fsccl --comm debug=INFO clusters=4,4 -r 8",
            {"fsccl": {"debug": "INFO", "clusters": "4,4"}},
        ),
        (
            "--comm socket_ifname=a=b --comm clusters=1,1 allr --backend fsccl",
            {"fsccl": {"socket_ifname": "a=b", "clusters": "1,1"}},
        ),
        (
            "allr --compare gloo,fsccl --comm socket_ifname=lo fsccl.debug=INFO",
            {"gloo": {"socket_ifname": "lo"}, "fsccl": {"socket_ifname": "lo", "debug": "INFO"}},
        ),
        (
            "allr --compare nccl,fsccl --comm max_ctas=8",
            {"nccl": {"max_ctas": 8}},
        ),
        (
            "allr --compare gloo,gloo --comm gloo.socket_ifname=lo",
            {"gloo": {"socket_ifname": "lo"}},
        ),
    ],
)
def test_options_reach_their_backends(line: str, expected: dict[str, Any]) -> None:
    spec = parse_spec(line.split())
    assert [op.name for op in spec.operations] == ["all_reduce"]
    assert spec.backend_options == expected


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("allr --comm", "--comm: expected at least one argument"),
        ("allr --comm debug", "--comm debug: has no value; expected a text"),
        ("allr --backend gloo --comm socket_ifnam=x", "--comm socket_ifnam: is no option of gloo;"),
        ("allr --backend nccl --comm max_ctas=0", "--comm max_ctas: expected a whole number"),
        ("allr --compare gloo,fsccl --comm debg=1", "of gloo or fsccl; did you mean 'debug'"),
        ("allr --compare gloo,fsccl --comm nccl.debug=1", "nccl.debug: nccl is not measured"),
        ("allr --backend mpi --comm x=1", "it has none"),
    ],
)
def test_errors_name_flag_and_option(line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_spec(line.split())


def test_all_errors_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        parse_spec(["allr", "--backend", "fsccl", "--comm", "a=1", "b=2"])
    assert [p.key for p in error.value.problems] == ["--comm a", "--comm b"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("allr --comm socket_ifname=a\nallg\n", "an earlier line sets other values"),
        ("allr\nallg -r 3\n", r"batch.txt:2: .*this one changes ranks"),
        ("allr\nallg -T 9 --vcpu-pin-mode\n", "this one changes timeout, pin"),
    ],
    ids=["options", "ranks", "several"],
)
def test_lines_of_a_batch_must_share_process_options(
    tmp_path: Path, lines: str, message: str
) -> None:
    file = tmp_path / "batch.txt"
    file.write_text(lines)
    for flag in (["--batch", str(file)], [f"--batch={file}"]):
        with pytest.raises(ConfigError, match=message):
            read_specs([*flag, "-r", "2"])


def test_lines_of_a_batch_may_differ_in_backend_and_its_options(tmp_path: Path) -> None:
    file = tmp_path / "batch.txt"
    file.write_text("allr --backend gloo\n\nallg --backend fsccl --comm debug=INFO # loud\n")
    specs = read_specs(["--batch", str(file), "-r", "2"])
    assert [spec.placement.backend for spec in specs] == ["gloo", "fsccl"]
    assert [spec.options_of("fsccl") for spec in specs] == [{}, {"debug": "INFO"}]
