"""What stands around every command: a mistake is one message and an exit code, not a traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from flagscale.errors import FlagscaleError


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
        return int(getattr(interrupt, "exit_code", 130))
    except BrokenPipeError:
        # Whoever read our output has left. Python's own flush at exit must not complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.filename is None:
            raise
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    return code
