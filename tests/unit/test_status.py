"""Tests of reading status files."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flagscale.status import Event, StatusWriter, list_status_files, read_events

GOOD = [
    {"time": 1.5, "event": "joined", "backend": "gloo"},
    {"time": 2, "event": "progress", "step": 3, "loss": float("nan")},
]
LINES = st.sampled_from(
    [
        *(json.dumps(record).encode() for record in GOOD),
        *(b"", b"{", b"}", b"[1", b"2]", b"1,2", b'{"time":1},{"event":"x"}', b"\xff", b"null"),
        *(b"7", b'"x"', b"[]", b"{}", b'{"time": "soon", "event": "joined"}', b'{"event": "x"}'),
    ]
)


def _parse_single_line(line: bytes) -> list[Event]:
    """Return the event of a single line, if it is valid."""
    try:
        record: Any = json.loads(line)
    except ValueError:
        return []
    if not isinstance(record, dict) or not {"time", "event"} <= record.keys():
        return []
    if not isinstance(record["time"], (int, float)):
        return []
    return [Event(3, float(record.pop("time")), record.pop("event"), record)]


@given(st.lists(LINES, max_size=8))
def test_corrupt_lines_are_skipped(lines: list[bytes]) -> None:
    with TemporaryDirectory() as directory:
        path = Path(directory, "rank_3.jsonl")
        path.write_bytes(b"".join(line + b"\n" for line in lines))
        found, offset = read_events(path)
    expected = [event for line in lines for event in _parse_single_line(line)]
    assert str(found) == str(expected)  # NaN is not NaN
    assert offset == sum(len(line) + 1 for line in lines)


def test_reading_continues_at_the_offset(tmp_path: Path) -> None:
    writer = StatusWriter(tmp_path, 12)
    writer.write("joined", backend="gloo", place=None)
    (path,) = list_status_files(tmp_path)
    first, offset = read_events(path)
    assert [(e.rank, e.event, dict(e.fields)) for e in first] == [
        (12, "joined", {"backend": "gloo"})
    ]
    with path.open("ab") as file:
        file.write(b'{"time": 1, "event": "ready"}\n{"time": 2, "ev')
    second, after = read_events(path, offset)
    assert [event.event for event in second] == ["ready"]
    assert after == path.stat().st_size - len(b'{"time": 2, "ev')
    assert read_events(tmp_path / "rank_7.jsonl", 5) == ([], 5)


def test_unknown_events_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown status event 'lunch'"):
        StatusWriter(tmp_path, 0).write("lunch")
