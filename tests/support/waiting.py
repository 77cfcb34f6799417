"""Waiting in tests, for as long as a busy machine may need."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

PATIENCE_SECONDS = 180.0
"""The limit of everything that a test waits for.

It is long because it costs nothing where all is well, and a machine that runs other work may need
many times the usual time. A shorter limit is right where the delay itself is tested, and for the
end of processes, which would end by themselves some time.
"""


def wait_for(
    condition: Callable[[], Any],
    expected: str = "",
    seconds: float = PATIENCE_SECONDS,
    interval: float = 0.05,
) -> Any:
    """Wait until a condition is true, and return its value.

    Args:
        condition: Called every ``interval`` seconds.
        expected: What is waited for, for the message of the error.
        seconds: Limit of the wait.
        interval: Seconds between two calls.

    Raises:
        TimeoutError: The condition was false for ``seconds``.
    """
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds:g} s{expected and f': {expected}'}")
        time.sleep(interval)
    return value
