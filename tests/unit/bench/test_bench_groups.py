"""Tests of the benchmark of process groups: members, table, findings and usage errors."""

from __future__ import annotations

import pytest

from flagscale.bench.groups.cli import Sample, Variant, main
from flagscale.bench.groups.worker import list_findings, make_table, rotate_members

pytestmark = pytest.mark.torch


def _samples(usable: float, splits: int = -1) -> list[Sample]:
    return [
        Sample(0.5, usable * 0.75 + i * 1e-4, usable * 0.25, 0.001, 100.0, splits)
        for i in range(10)
    ]


def test_groups_rotate_through_the_ranks() -> None:
    assert rotate_members(3, 2, 3) == [[0, 1], [1, 2], [0, 2]]
    assert len(rotate_members(33, 7, 8)) == 33
    assert all(len(set(group)) == 7 for group in rotate_members(33, 7, 8))


def test_table_shows_medians() -> None:
    lines = make_table({("cold", 8): _samples(0.4)})
    assert lines[0].split() == (
        "variant groups runs world ms create ms first ms second ms total ms GPU MiB splits".split()  # noqa: SIM905
    )
    assert lines[1].split() == [
        "cold",
        "8",
        "10",
        "500.0",
        "300.5",
        "100.0",
        "1.0",
        "900.5",
        "100",
        "n/a",
    ]


@pytest.mark.parametrize(
    ("splits", "finding"),
    [
        (8, "proved: the backend counts 8 splits"),
        (0, "NOT split: the backend counts 0 splits of 8"),
        (-1, "the backend does not tell"),
    ],
)
def test_split_is_proved_by_the_backend_count(splits: int, finding: str) -> None:
    results: dict[tuple[Variant, int], list[Sample]] = {
        ("bound", 8): _samples(0.1, splits),
        ("cold", 8): _samples(0.8),
        ("warm", 8): _samples(0.4),
    }
    lines = "\n".join(list_findings(results))
    assert f"8 groups, bound: {finding}" in lines
    assert "bound against the warmed control: usable 3.99 times as fast" in lines
    assert "contains the process's first communicator and is not a gain of splitting" in lines
    assert "unbatched sends and receives" in lines
    assert "take at least" not in lines


def test_few_runs_and_equal_times_are_reported() -> None:
    results: dict[tuple[Variant, int], list[Sample]] = {
        ("cold", 1): _samples(0.4)[:3],
        ("warm", 1): _samples(0.4)[:3],
    }
    lines = "\n".join(list_findings(results))
    assert "(no difference shown)" in lines
    assert "3 runs a variant: take at least 10" in lines


def test_single_run_has_no_interval() -> None:
    lines = "\n".join(
        list_findings({("cold", 1): _samples(0.4)[:1], ("warm", 1): _samples(0.1)[:1]})
    )
    assert "a single run each, which shows no difference" in lines
    assert "times as fast" not in lines
    assert "interval" not in lines


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "the number of ranks is missing"),
        ("-r 0", "expected at least 1"),
        ("-r 2 --arms hot", "expected bound, cold, warm, split"),
        ("-r 2 --groups x", "expected such as 1,8,33"),
        ("-r 2 --groups 0", "at least 1"),
        ("-r 2 --members 3", "expected 1 to 2"),
        ("-r 2 --without-split", "goes with --simple"),
        ("-r 2 --backend ncll", "error: --backend: 'ncll' is not a known backend"),
        ("-r 2 --device cpu --arms split", "only accelerators can be bound"),
    ],
)
def test_usage_errors_name_the_flag(
    line: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert main(line.split()) == 2
    assert message in capsys.readouterr().err
