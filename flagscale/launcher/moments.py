"""Times that users type: ages, times of the day, and dates."""

from __future__ import annotations

import re
import time
from datetime import datetime, timedelta

from flagscale.errors import ConfigError

_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 24 * 3600, "w": 7 * 24 * 3600}
_UNIT = r"s|secs?|seconds?|m|mins?|minutes?|h|hours?|d|days?|w|weeks?"
_AGE_PART = re.compile(rf"(\d{{1,9}}(?:\.\d+)?)\s*({_UNIT})(?![a-z])")
_AGE = re.compile(rf"(?:{_AGE_PART.pattern})+")
_CLOCK_TIME = re.compile(r"\d{1,2}:\d\d(?::\d\d)?")


def parse_moment(text: str, option: str = "since=", now: float | None = None) -> float:
    """Parse a time that is past and return Unix seconds.

    It is an age (``30m``, ``1h30m``, ``2 days``), a time of the last 24 hours (``14:02``), or a
    date with or without a time in ISO format, which is a local one unless it has a time zone.

    Args:
        text: the time.
        option: name of the option before its value, for messages.
        now: the present, in Unix seconds.

    Raises:
        ConfigError: it is none of these, or in the future.
    """
    present = time.time() if now is None else now
    try:
        seconds = _parse(text.strip(), present)
    except (ValueError, OverflowError, OSError):
        raise ConfigError(
            f"{option}{text}: expected an age (10m, 2h, 1d), a time (14:02), or a date and time "
            "(2026-11-26T14:02)"
        ) from None
    if seconds > present:
        raise ConfigError(f"{option}{text}: is in the future")
    return seconds


def _parse(word: str, present: float) -> float:
    if _AGE.fullmatch(word):
        return present - sum(
            float(number) * _UNIT_SECONDS[unit[0]] for number, unit in _AGE_PART.findall(word)
        )
    if not _CLOCK_TIME.fullmatch(word):
        # Python 3.10 does not accept the Z of UTC.
        return datetime.fromisoformat(word.replace("Z", "+00:00")).timestamp()
    clock = datetime.strptime(word, "%H:%M:%S" if word.count(":") == 2 else "%H:%M").time()
    today = datetime.fromtimestamp(present)
    moment = datetime.combine(today.date(), clock)
    return (moment if moment <= today else moment - timedelta(days=1)).timestamp()
