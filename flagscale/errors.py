"""Exception hierarchy of the project.

Every error that a user can cause or encounter derives from :class:`FlagscaleError`. The command
line prints its message, without a traceback, and exits with its ``exit_code``:

==  ==================================================
0   success
1   the job failed
2   the configuration is invalid
3   a host or a scheduler could not be reached
4   a benchmark fell below its baseline
==  ==================================================

A message contains the actual value, the expected one and, where it helps, the next step to take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

# A hostfile of thousands of lines may contain a mistake in each of them.
_MAX_PROBLEMS = 50


class FlagscaleError(Exception):
    """Base of all errors that are printed as a message instead of a traceback."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message


@dataclass(frozen=True)
class Problem:
    """One problem of a configuration.

    ``where`` is ``file:line`` if the line is known, otherwise a file, or ``override`` for a
    command-line override. ``key`` is the dotted key, such as ``train.model.num_layers``.
    """

    key: str
    message: str
    where: str | None = None

    def __str__(self) -> str:
        location_prefix = f"{self.where}: " if self.where else ""
        key_prefix = f"{self.key}: " if self.key else ""
        return f"{location_prefix}{key_prefix}{self.message}"


class ConfigError(FlagscaleError):
    """The configuration is invalid. Carries all problems, not only the first."""

    exit_code = 2

    def __init__(
        self, problems: str | Problem | Sequence[Problem], *, hint: str | None = None
    ) -> None:
        if isinstance(problems, str):
            problems = Problem(key="", message=problems)
        all_problems = (problems,) if isinstance(problems, Problem) else tuple(problems)
        self.problems: tuple[Problem, ...] = all_problems
        lines = [str(problem) for problem in all_problems[:_MAX_PROBLEMS]]
        if len(all_problems) > _MAX_PROBLEMS:
            lines.append(f"and {len(all_problems) - _MAX_PROBLEMS} more problems")
        super().__init__("\n".join(lines), hint=hint)


class JobError(FlagscaleError):
    """The job failed or did not start. ``exit_code`` is the job's own if it is known."""

    def __init__(self, message: str, *, hint: str | None = None, exit_code: int = 1) -> None:
        super().__init__(message, hint=hint)
        self.exit_code = exit_code  # type: ignore[misc]


class RunStateError(FlagscaleError):
    """An action does not fit the state of the run: still alive, never started, or unreadable."""


class UnreachableError(FlagscaleError):
    """A host or a scheduler could not be reached."""

    exit_code = 3


class BackendSourceError(FlagscaleError):
    """A training backend's source could not be fetched, verified or adapted."""


class DataError(FlagscaleError):
    """A data set, an index or a tokenizer is missing, damaged or does not fit the model."""


class CheckpointError(FlagscaleError):
    """A checkpoint cannot be written or read."""


def first_line(error: BaseException) -> str:
    """Return the class of an error and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
