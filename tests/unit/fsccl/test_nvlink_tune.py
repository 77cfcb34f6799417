"""Choosing NVLink algorithms from measurements, and keeping what was chosen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flagscale.comm.fsccl import tune
from flagscale.comm.fsccl.tune import Timing, choose, store, stored_tables, table_file
from flagscale.errors import ConfigError

GPU = "NVIDIA H200"


def timing(size: int, algorithm: str, us: float, memory: str = "ordinary") -> Timing:
    return Timing("all_reduce", memory, size, algorithm, 8, 256, us)


def test_sizes_with_one_winner_make_one_row() -> None:
    timings = [
        timing(1024, "other", 20.0),
        timing(1024, "flagged", 4.0),
        timing(4096, "flagged", 4.5),
        timing(4096, "other", 20.0),
        timing(16384, "flagged", 9.0),
        timing(16384, "staged", 8.0),
        timing(65536, "other", 30.0),
        timing(65536, "staged", 31.0),
        timing(1024, "direct", 3.0, "registered"),
    ]
    assert choose(timings).splitlines() == [
        "all_reduce ordinary 4096 flagged 8 256",
        "all_reduce ordinary 16384 staged 8 256",
        "all_reduce ordinary 65536 other 0 0",
        "all_reduce registered 1024 direct 8 256",
    ]


def test_the_order_of_measuring_does_not_matter() -> None:
    timings = [timing(s, a, s * f) for s in (9, 1, 5) for a, f in (("staged", 2.0), ("other", 3.0))]
    assert choose(timings) == choose(timings[::-1]) == "all_reduce ordinary 9 staged 8 256\n"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv(tune.VARIABLE, raising=False)
    return tmp_path


def test_tables_of_several_numbers_of_ranks_are_kept(config: Path) -> None:
    assert stored_tables(GPU) == {}
    store(GPU, 8, "all_reduce ordinary 1 flagged 0 0\n", {"torch": "2.11"})
    path = store(GPU, 4, "all_gather ordinary 1 staged 0 0\n", {"torch": "2.11"})
    assert path == config / "flagscale" / "fsccl-nvidia-h200.json"
    assert stored_tables(GPU) == {
        4: "all_gather ordinary 1 staged 0 0\n",
        8: "all_reduce ordinary 1 flagged 0 0\n",
    }


def test_a_hostile_name_stays_in_its_directory(config: Path) -> None:
    assert table_file("../../etc/a GPU/$x").parent == config / "flagscale"


@pytest.mark.parametrize(
    ("content", "complaint"),
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
def test_other_files_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, complaint: str
) -> None:
    path = tmp_path / "a table, by hand.json"
    path.write_text(content)
    monkeypatch.setenv(tune.VARIABLE, str(path))
    with pytest.raises(ConfigError, match=complaint) as caught:
        stored_tables(GPU)
    assert str(path) in str(caught.value)


def test_what_was_kept_is_readable_json(config: Path) -> None:
    path = store(GPU, 2, choose([timing(8, "flagged", 1.0)]), {"date": "2026-01-01"})
    content = json.loads(path.read_text())
    assert content["tables"]["2"] == ["all_reduce ordinary 8 flagged 8 256"]
    assert content["measured"] == {"date": "2026-01-01"}
