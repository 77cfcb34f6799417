"""Error handling of every command: user errors become one message and an exit code, not a
traceback.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable
from typing import TextIO

from flagscale.errors import FlagscaleError


class Interrupted(KeyboardInterrupt):
    """A signal asked this program to end. ``exit_code`` is 128 plus the signal's number."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"signal {signal_number}")
        self.exit_code = 128 + signal_number


def run_command(command: Callable[[], int]) -> int:
    """Run a command and return its exit code, printing the message of a user error."""
    try:
        exit_code = command()
        sys.stdout.flush()
    except FlagscaleError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "flagscale":
            raise
        print(
            f"error: {sys.executable} has no module {error.name}\n"
            "  hint: activate the environment (. .venv/bin/activate), or make it: make setup",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt as interrupt:
        return interrupt.exit_code if isinstance(interrupt, Interrupted) else 130
    except BrokenPipeError:
        closed_streams = [stream for stream in (sys.stdout, sys.stderr) if has_no_reader(stream)]
        if not closed_streams:
            raise
        # Python's own flush at exit must not fail.
        for stream in closed_streams:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return 0
    except OSError as error:
        if error.filename is None:
            raise
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    return exit_code


def has_no_reader(stream: TextIO) -> bool:
    """Return True if the stream is a pipe or connection whose other end is closed."""
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):
        return False  # an in-memory or closed stream
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
