"""Tests of tune.py: choice of NVLink kernels from measurements, and storage of tuning tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flagscale.comm.fsccl import tune
from flagscale.comm.fsccl.tune import (
    KernelTiming,
    choose_fastest,
    load_tables,
    store_table,
    table_path,
)
from flagscale.errors import ConfigError

GPU = "NVIDIA H200"


def make_timing(size: int, algorithm: str, us: float, memory: str = "ordinary") -> KernelTiming:
    return KernelTiming("all_reduce", memory, size, algorithm, 8, 256, us)


def test_adjacent_sizes_with_the_same_winner_share_a_row() -> None:
    timings = [
        make_timing(1024, "other", 20.0),
        make_timing(1024, "flagged", 4.0),
        make_timing(4096, "flagged", 4.5),
        make_timing(4096, "other", 20.0),
        make_timing(16384, "flagged", 9.0),
        make_timing(16384, "staged", 8.0),
        make_timing(65536, "other", 30.0),
        make_timing(65536, "staged", 31.0),
        make_timing(1024, "direct", 3.0, "registered"),
    ]
    assert choose_fastest(timings).splitlines() == [
        "all_reduce ordinary 4096 flagged 8 256",
        "all_reduce ordinary 16384 staged 8 256",
        "all_reduce ordinary 65536 other 0 0",
        "all_reduce registered 1024 direct 8 256",
    ]


def test_choice_does_not_depend_on_the_measurement_order() -> None:
    timings = [
        make_timing(s, a, s * f) for s in (9, 1, 5) for a, f in (("staged", 2.0), ("other", 3.0))
    ]
    assert (
        choose_fastest(timings)
        == choose_fastest(timings[::-1])
        == "all_reduce ordinary 9 staged 8 256\n"
    )


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv(tune.TABLE_FILE_VARIABLE, raising=False)
    return tmp_path


def test_tables_are_stored_by_number_of_ranks(config: Path) -> None:
    assert load_tables(GPU) == {}
    store_table(GPU, 8, "all_reduce ordinary 1 flagged 0 0\n", {"torch": "2.11"})
    path = store_table(GPU, 4, "all_gather ordinary 1 staged 0 0\n", {"torch": "2.11"})
    assert path == config / "flagscale" / "fsccl-nvidia-h200.json"
    assert load_tables(GPU) == {
        4: "all_gather ordinary 1 staged 0 0\n",
        8: "all_reduce ordinary 1 flagged 0 0\n",
    }


def test_device_name_cannot_escape_the_directory(config: Path) -> None:
    assert table_path("../../etc/a GPU/$x").parent == config / "flagscale"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "version 1"),
        ('{"version": 2}', "version 1"),
        ('{"version": 1, "device": "NVIDIA H100"}', "measured on 'NVIDIA H100'"),
        ('{"version": 1, "device": "NVIDIA H200", "tables": {"8": "x"}}', "lists of rows"),
        ('{"version": 1, "device": "NVIDIA H200", "tables": {"x": ["y"]}}', "lists of rows"),
    ],
    ids=["not-json", "no-mapping", "other-version", "other-gpu", "text-for-rows", "no-number"],
)
def test_invalid_tables_are_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, message: str
) -> None:
    path = tmp_path / "a table, by hand.json"
    path.write_text(content)
    monkeypatch.setenv(tune.TABLE_FILE_VARIABLE, str(path))
    with pytest.raises(ConfigError, match=message) as error:
        load_tables(GPU)
    assert str(path) in str(error.value)


def test_stored_table_is_readable_json(config: Path) -> None:
    path = store_table(
        GPU, 2, choose_fastest([make_timing(8, "flagged", 1.0)]), {"date": "2026-01-01"}
    )
    content = json.loads(path.read_text())
    assert content["tables"]["2"] == ["all_reduce ordinary 8 flagged 8 256"]
    assert content["measured"] == {"date": "2026-01-01"}
