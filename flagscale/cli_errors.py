"""Error handling of every command: user errors become one message and an exit code, not a
traceback.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

from flagscale.errors import FlagscaleError
from flagscale.output_streams import STDOUT, escape_controls, prepare_standard_streams


class Interrupted(KeyboardInterrupt):
    """A signal asked this program to end. ``exit_code`` is 128 plus the signal's number."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"signal {signal_number}")
        self.exit_code = 128 + signal_number


def run_command(command: Callable[[], int]) -> int:
    """Run a command and return its exit code, printing the message of a user error."""
    prepare_standard_streams()
    try:
        exit_code = command()
        sys.stdout.flush()
    except FlagscaleError as error:
        _print_error(f"error: {error}")
        return error.exit_code
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "flagscale":
            raise
        _print_error(
            f"error: {sys.executable} has no module {error.name}\n"
            "  hint: activate the environment (. .venv/bin/activate), or make it: make setup"
        )
        return 1
    except KeyboardInterrupt as interrupt:
        return interrupt.exit_code if isinstance(interrupt, Interrupted) else 130
    except BrokenPipeError:
        closed_streams = [stream for stream in (sys.stdout, sys.stderr) if has_no_reader(stream)]
        if not closed_streams:
            raise
        for stream in closed_streams:
            _discard_output(stream)
        return 0
    except OSError as error:
        if error.filename is None:
            raise
        if error.filename == STDOUT:
            _discard_output(sys.stdout)
        _print_error(f"error: {error.filename}: {error.strerror}")
        return 1
    return exit_code


def _print_error(text: str) -> None:
    """Print to stderr. If that fails, the exit code still reports the error."""
    with suppress(OSError):
        print(escape_controls(text), file=sys.stderr, flush=True)


def _discard_output(stream: TextIO) -> None:
    """Discard the output of a stream from now on, so that Python's own flush at exit succeeds."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def has_no_reader(stream: TextIO) -> bool:
    """Return True if the stream is a pipe or connection whose other end is closed."""
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):
        return False  # an in-memory or closed stream
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
