"""Tests of the times that users type."""

from __future__ import annotations

from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flagscale.errors import ConfigError
from flagscale.launcher.moments import parse_moment

NOW = datetime(2026, 11, 26, 14, 30).timestamp()
DAY = 24 * 3600


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90s", NOW - 90),
        ("10m", NOW - 600),
        ("10min", NOW - 600),
        ("1.5h", NOW - 5400),
        ("1h30m", NOW - 5400),
        ("2d", NOW - 2 * DAY),
        ("2 days", NOW - 2 * DAY),
        ("1w", NOW - 7 * DAY),
        ("14:02", datetime(2026, 11, 26, 14, 2).timestamp()),
        ("9:05:30", datetime(2026, 11, 26, 9, 5, 30).timestamp()),
        ("14:31", datetime(2026, 11, 25, 14, 31).timestamp()),
        ("2026-11-26", datetime(2026, 11, 26).timestamp()),
        ("2026-11-26T14:02", datetime(2026, 11, 26, 14, 2).timestamp()),
        ("2026-11-26 14:02:01", datetime(2026, 11, 26, 14, 2, 1).timestamp()),
        ("2026-11-25T12:00:00Z", 1795608000.0),
    ],
)
def test_moments(text: str, expected: float) -> None:
    assert parse_moment(text, now=NOW) == expected


@pytest.mark.parametrize(
    "text",
    ["", "m", "10", "25:00", "yesterday", "-5m", "2026-13-01", "1h 2m", "2 months", "3 minnows"],
)
def test_other_texts_are_no_moments(text: str) -> None:
    with pytest.raises(ConfigError, match="expected an age"):
        parse_moment(text, now=NOW)


@given(st.text(max_size=12))
def test_a_moment_is_parsed_or_refused(text: str) -> None:
    try:
        assert parse_moment(text, "--since ", NOW) <= NOW
    except ConfigError as error:
        assert error.message.startswith(f"--since {text}: ")


def test_a_moment_in_the_future_is_refused() -> None:
    with pytest.raises(ConfigError, match="since=2026-11-27: is in the future"):
        parse_moment("2026-11-27", now=NOW)
