"""Tests that the results of every operation, type and option are correct on real ranks.

Each fixture starts its ranks once, for a batch of many command lines.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from flagscale.bench.collectives.operations import DATA_TYPES, OPERATIONS

pytestmark = [pytest.mark.integration, pytest.mark.torch]

_REDUCING = {"all_reduce", "reduce_scatter", "reduce"}
_REDUCIBLE = set(DATA_TYPES) - {"uint16", "int16"}

_LINES_FOR_THREE_RANKS = """\
all -b 600 -e 600 -d all -c -n 1 -w 0 --report-to-json-file types.json
all_reduce,reduce_scatter,reduce -b 600 -e 600 -d fp16,fp32,int8 -o all -c -n 1 -w 0 --json ops.json
all -b 1K -e 3K -f 3 -d bf16 -c all_ones -n 2 -w 1 --both-places --unique-buff \
--coalesced-cc-size-ratio [1,2,1] --json options.json
all -b 1K -e 1K -d int32 -c -n 2 -w 1 -m 2 -I 2 -W 1 --unique-buff --shared-output-buff \
--stats avg min p50 max p99/p50 --json again.json
broadcast,reduce,gather,scatter -b 99 -e 99 -c --root -1 -n 1 --json roots.json
all_reduce -b 8 -e 8 -d fp32 -c --seed 5 -p 1 -a 3 -z 1 -C 1 --show-algorithm --run-cycles 2
"""

_LINES_FOR_FOUR_RANKS = """\
allr,allg,sendrecv -b 400 -e 400 -d fp32 -c -n 2 --data-parallel-dimension 2 --json dp.json
all -b 400 -e 400 -d fp32 -c -n 2 --custom-replica-group groups.json --json custom.json
permute -b 400 -e 400 -d uint16 -c -n 2 --custom-src-target-pairs pairs.json --json pairs-out.json
alltoallv -b 4K -e 4K -d fp32 -c -n 2 --alltoallv-metadata counts.json --json counts-out.json
alltoallv -b 4K -e 4K -d int16 -c -n 2 --alltoallv-metadata gaps.json --json gaps-out.json
"""


def _run_batch(bench: Any, directory: Path, ranks: int, lines: str) -> Any:
    (directory / "batch.txt").write_text(lines)
    return bench("--batch", "batch.txt", "-r", str(ranks), "--vcpu-pin-mode", cwd=directory)


@pytest.fixture(scope="module")
def batch_on_three_ranks(bench: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("three")
    return directory, _run_batch(bench, directory, 3, _LINES_FOR_THREE_RANKS)


@pytest.fixture(scope="module")
def batch_on_four_ranks(bench: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("four")
    files = {
        "groups.json": {"replica_groups": [[3, 1]]},
        "pairs.json": {"src_target_pairs": [[[0, 1], [1, 3], [2, 2]]]},
        "counts.json": {"alltoallv_metadata": [_make_metadata(rank, gap=0) for rank in range(4)]},
        "gaps.json": {"alltoallv_metadata": [_make_metadata(rank, gap=3) for rank in range(4)]},
    }
    for name, value in files.items():
        (directory / name).write_text(json.dumps(value))
    return directory, _run_batch(bench, directory, 4, _LINES_FOR_FOUR_RANKS)


def _make_metadata(rank: int, gap: int) -> dict[str, list[int]]:
    """Return the all-to-all metadata of a rank, which sends (2 * rank + j) % 5 values to rank j.

    ``gap`` is the number of unused elements before each block of the buffers.
    """
    sends = [(2 * rank + j) % 5 for j in range(4)]
    receives = [(2 * i + rank) % 5 for i in range(4)]

    def displs(counts: list[int]) -> list[int]:
        return (
            [sum(counts[:i]) + gap * (i + 1) for i in range(4)]
            if gap
            else [sum(counts[:i]) for i in range(4)]
        )

    return {
        "send_counts": sends,
        "send_displs": displs(sends),
        "recv_counts": receives,
        "recv_displs": displs(receives),
    }


def _read_rows(directory: Path, name: str) -> list[dict[str, Any]]:
    data = json.loads((directory / name).read_text())
    assert data["complete"]
    rows: list[dict[str, Any]] = data["results"]
    assert rows
    for row in rows:
        assert row["failure"] is None
        assert row["wrong"] == (None if row["operation"] == "barrier" else 0), row
        assert row["time:avg(us)"] > 0
    return rows


def test_every_operation_is_correct_for_every_type(batch_on_three_ranks: tuple[Path, Any]) -> None:
    directory, completed = batch_on_three_ranks
    assert completed.code == 0, completed.err
    assert "Warning" not in completed.err
    measured = {(row["operation"], row["type"]) for row in _read_rows(directory, "types.json")}
    expected = {
        (op, type_)
        for op in OPERATIONS
        for type_ in (_REDUCIBLE if op in _REDUCING else DATA_TYPES)
        if op != "barrier"
    }
    assert measured == expected | {("barrier", "uint8")}


def test_every_reduction_is_correct(batch_on_three_ranks: tuple[Path, Any]) -> None:
    counts = Counter(
        (row["type"], row["reduction"]) for row in _read_rows(batch_on_three_ranks[0], "ops.json")
    )
    assert counts[("fp16", "avg")] == counts[("int8", "prod")] == 3
    assert ("int8", "avg") not in counts
    assert len(counts) == 5 + 5 + 4


def test_in_place_unique_and_coalesced_buffers(batch_on_three_ranks: tuple[Path, Any]) -> None:
    rows = _read_rows(batch_on_three_ranks[0], "options.json")
    places = {op: {r["in_place"] for r in rows if r["operation"] == op} for op in OPERATIONS}
    assert places["all_gather"] == places["reduce_scatter"] == {True, False}
    assert places["all_reduce"] == {True}
    assert places["all_to_all"] == {False}
    sizes = [r["size(B)"] for r in rows if r["operation"] == "all_reduce"]
    assert sizes == [1024, 3072]


def test_aggregated_and_replayed_operations_and_shared_buffers(
    batch_on_three_ranks: tuple[Path, Any],
) -> None:
    for row in _read_rows(batch_on_three_ranks[0], "again.json"):
        assert row["samples"] == 4
        statistics = [row[f"time:{name}(us)"] for name in ("min", "p50", "max")]
        assert statistics == sorted(statistics)
        assert row["p99/p50"] >= 1


def test_rooted_operations_run_from_every_root(batch_on_three_ranks: tuple[Path, Any]) -> None:
    counts = Counter(row["operation"] for row in _read_rows(batch_on_three_ranks[0], "roots.json"))
    assert counts == {"broadcast": 3, "reduce": 3, "gather": 3, "scatter": 3}


def test_table_shows_algorithm_buffers_and_cycles(batch_on_three_ranks: tuple[Path, Any]) -> None:
    out = batch_on_three_ranks[1].out
    last_table = out[out.rindex("# flagscale") :]
    assert "checked: random, seed 5" in last_table
    assert "time to issue, maximum over ranks" in last_table
    assert last_table.count("algorithm") == 2
    assert last_table.count("  n/a\n") == 2
    assert re.search(r"^# 8 B, gloo, rank 0: \[-?\d.*\] -> \[-?\d", last_table, re.MULTILINE)
    assert "# note: -z: every operation is awaited on a CPU" in last_table


def test_groups_run_concurrently(batch_on_four_ranks: tuple[Path, Any]) -> None:
    directory, completed = batch_on_four_ranks
    assert completed.code == 0, completed.err
    assert "# 2 groups at once: [0,2] [1,3]" in completed.out
    assert {row["ranks"] for row in _read_rows(directory, "dp.json")} == {2}


def test_ranks_outside_of_all_groups_are_idle(batch_on_four_ranks: tuple[Path, Any]) -> None:
    rows = _read_rows(batch_on_four_ranks[0], "custom.json")
    assert {row["operation"] for row in rows} == set(OPERATIONS)
    assert {row["ranks"] for row in rows} == {2}


@pytest.mark.parametrize("name", ["pairs-out.json", "counts-out.json", "gaps-out.json"])
def test_patterns_from_files(batch_on_four_ranks: tuple[Path, Any], name: str) -> None:
    assert len(_read_rows(batch_on_four_ranks[0], name)) == 1
