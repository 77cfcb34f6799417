"""Tests of the launcher of a command's ranks: printed streams, and the table of failed ranks."""

from __future__ import annotations

import pytest

from flagscale.launcher.liveness.diagnosis import TableEntry, parse_failure_table
from flagscale.launcher.rank_processes import RankProcess, format_failures, parse_streams

BOTH = ("stdout", "stderr")


@pytest.mark.parametrize(
    ("text", "streams"),
    [
        pytest.param("0", [(), ()], id="none"),
        pytest.param("3", [BOTH, BOTH], id="both"),
        pytest.param("1", [("stdout",), ("stdout",)], id="stdout"),
        pytest.param("0:3,1:2", [BOTH, ("stderr",)], id="by rank"),
        pytest.param("1:1", [(), ("stdout",)], id="of one"),
    ],
)
def test_the_streams_of_each_rank(text: str, streams: list[tuple[str, ...]]) -> None:
    assert [parse_streams(text, local) for local in (0, 1)] == streams


@pytest.mark.parametrize("text", ["4", "", "all", "3,1", "0:9", "a:1"])
def test_invalid_stream_selection(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        parse_streams(text, 0)


def test_the_table_is_read_as_torchruns_is() -> None:
    ranks = []
    for number, code, end_time in ((9, -9, 1700000000.5), (8, 3, 1700000000.25)):
        rank = RankProcess(number, number - 8, {})
        rank.exit_code, rank.ended = code, end_time
        ranks.append(rank)
    text = f"output\n{format_failures(ranks, 'h 0')}"
    # Sorted by time with millisecond resolution, which determines the first failure.
    assert parse_failure_table(text) == [
        TableEntry(8, 3, 1700000000.25),
        TableEntry(9, -9, 1700000000.5),
    ]
