"""What stands around every command: a mistake is one message and an exit code, not a traceback."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable
from typing import TextIO

from flagscale.errors import FlagscaleError


class Interrupted(KeyboardInterrupt):
    """A signal asked this program to end; ``exit_code`` says which."""

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.exit_code = 128 + number


def guard(work: Callable[[], int]) -> int:
    """The exit code of some work, a mistake's message printed in place of its traceback."""
    try:
        code = work()
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
        left = [stream for stream in (sys.stdout, sys.stderr) if nobody_reads(stream)]
        if not left:
            raise
        # Python's own flush at exit must not complain.
        for stream in left:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return 0
    except OSError as error:
        if error.filename is None:
            raise
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    return code


def nobody_reads(stream: TextIO) -> bool:
    """Whether it is a pipe, or a connection, whose other end was closed."""
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):
        return False  # it is in memory, or closed
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
