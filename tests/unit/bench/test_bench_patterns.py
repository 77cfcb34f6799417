"""Tests of groups, pairs and counts that are read from files or derived from options."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flagscale.bench.collectives import patterns
from flagscale.bench.collectives.patterns import Exchange
from flagscale.errors import ConfigError

# The example of nccom-test's guide.
GUIDE_EXCHANGE = {
    "send_counts": [512, 1024],
    "send_displs": [0, 512],
    "recv_counts": [256, 768],
    "recv_displs": [0, 256],
}


def _write_file(directory: Path, value: Any) -> Path:
    path = directory / "a $file 'with' ünïcode.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    return path


def test_data_parallel_dimension_groups_ranks_across_hosts() -> None:
    groups = patterns.groups_for(8, None, 2)
    assert groups == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert len(patterns.groups_for(128, None, 2)) == 64


@pytest.mark.parametrize("value", [{"replica_groups": [[0, 2], [1, 3]]}, [[0, 2], [1, 3]]])
def test_custom_groups_are_read(tmp_path: Path, value: Any) -> None:
    groups = patterns.read_groups(_write_file(tmp_path, value))
    assert patterns.groups_for(4, groups, None) == ((0, 2), (1, 3))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{", "not JSON"),
        ("{}", 'expected {"replica_groups"'),
        ("3", 'expected {"replica_groups"'),
        ([], "expected lists of ranks"),
        ([[0, "1"]], "expected lists of ranks"),
        ([[0, -1]], "expected lists of ranks"),
        ([[True]], "expected lists of ranks"),
        ([[]], "expected lists of ranks"),
        ([[0, 1], [1, 2]], "rank 1 is in more than one place"),
        ([[0, 1], [2]], "equally large, found 2, 1"),
    ],
)
def test_invalid_groups_are_rejected(tmp_path: Path, value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        patterns.read_groups(_write_file(tmp_path, value))
    assert message in str(error.value)
    assert "--custom-replica-group" in str(error.value)


def test_groups_beyond_the_world_are_rejected() -> None:
    with pytest.raises(ConfigError, match="rank 4 does not exist among 4 ranks"):
        patterns.groups_for(4, ((0, 4),), None)
    with pytest.raises(ConfigError, match="does not divide 4"):
        patterns.groups_for(4, None, 3)


def test_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        patterns.read_pairs(tmp_path / "absent.json")


@pytest.mark.parametrize("depth", [1, 2])
def test_pairs_of_the_nccom_guide_are_read(tmp_path: Path, depth: int) -> None:
    pairs = [[0, 1], [1, 0], [2, 3], [3, 2], [4, 4], [5, 5], [6, 6], [7, 7]]
    value = {"src_target_pairs": [pairs] if depth == 2 else pairs}
    file_pairs = patterns.read_pairs(_write_file(tmp_path, value))
    assert patterns.pairs_for(8, file_pairs) == tuple((a, b) for a, b in pairs)
    with pytest.raises(ConfigError, match="rank 2 does not exist among 2"):
        patterns.pairs_for(2, file_pairs)


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([[0, 1], [0, 2]], "rank 0 sends more than once"),
        ([[0, 1], [2, 1]], "rank 1 receives more than once"),
        ([[0, 1, 2]], "expected pairs"),
        ([[[0, 1]], [[1, 0]]], "one list of pairs is run, found 2"),
        ([], "expected pairs"),
    ],
)
def test_invalid_pairs_are_rejected(tmp_path: Path, pairs: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        patterns.read_pairs(_write_file(tmp_path, {"src_target_pairs": pairs}))


def test_default_pairs_form_a_ring() -> None:
    assert patterns.pairs_for(3, None) == ((0, 1), (1, 2), (2, 0))


def test_counts_of_the_nccom_guide_are_scaled(tmp_path: Path) -> None:
    file_exchange = patterns.read_exchange(
        _write_file(tmp_path, {"alltoallv_metadata": [GUIDE_EXCHANGE]})
    )
    exchanges, notes = patterns.exchanges_for(2, file_exchange, 2**20, 4)
    # The guide prints 262152 elements for 1 MB of fp32.
    assert sum(exchanges[0].send_counts) == 262152
    assert exchanges[0].send_counts == (87384, 174768)
    # Its receive counts do not match the send counts, so they are derived from these.
    assert exchanges[1].recv_counts == (174768, 174768)
    assert len(notes) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"send_counts": [1]}, "lengths differ"),
        ({"send_counts": [1, -1]}, "send_counts must be a list of whole numbers"),
        ({"recv_displs": None}, "recv_displs must be a list"),
        ({"send_counts": [1.5, 2]}, "send_counts must be a list of whole numbers"),
    ],
)
def test_invalid_counts_are_rejected(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        patterns.read_exchange(
            _write_file(tmp_path, {"alltoallv_metadata": [{**GUIDE_EXCHANGE, **change}]})
        )


def test_mismatched_counts_are_reported() -> None:
    first = Exchange((1, 2), (0, 1), (1, 4), (0, 1))
    second = Exchange((3, 4), (0, 3), (2, 4), (0, 2))
    with pytest.raises(ConfigError, match="rank 1 sends 3 elements to rank 0, which expects 4"):
        patterns.exchanges_for(2, (first, second), 64, 4)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ((Exchange((1,), (0,), (1,), (0,)),), "1 counts for 2 ranks"),
        ((Exchange((0, 0), (0, 0), (0, 0), (0, 0)),), "every count is 0"),
        ((Exchange((2, 2), (0, 1), (2, 2), (0, 2)),), "overlap at displacement 1"),
    ],
)
def test_inconsistent_counts_are_rejected(entries: tuple[Exchange, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        patterns.exchanges_for(2, entries, 64, 4)


@given(st.data())
def test_scaled_counts_agree_and_do_not_overlap(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 5))
    counts = st.lists(st.integers(0, 50), min_size=ranks, max_size=ranks)
    sends = data.draw(st.lists(counts, min_size=ranks, max_size=ranks))
    if not any(map(sum, sends)):
        return
    gaps = data.draw(counts)
    size, element = data.draw(st.integers(1, 10_000)), data.draw(st.sampled_from([1, 2, 4, 8]))

    def displs(row: list[int]) -> tuple[int, ...]:
        return tuple(sum(row[:i]) + sum(gaps[: i + 1]) for i in range(ranks))

    entries = tuple(
        Exchange(tuple(sends[r]), displs(sends[r]), tuple(received), displs(received))
        for r in range(ranks)
        for received in [[sends[s][r] for s in range(ranks)]]
    )
    scaled, _ = patterns.exchanges_for(ranks, entries, size, element)
    for source, sender in enumerate(scaled):
        for target, receiver in enumerate(scaled):
            assert sender.send_counts[target] == receiver.recv_counts[source]
        for starts, lengths in (
            (sender.send_displs, sender.send_counts),
            (sender.recv_displs, sender.recv_counts),
        ):
            pieces = sorted((s, s + n) for s, n in zip(starts, lengths, strict=True) if n)
            assert all(a[1] <= b[0] for a, b in pairwise(pieces))
    assert max(sum(e.send_counts) for e in scaled) * element >= size
