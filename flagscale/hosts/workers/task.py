"""The task of a worker process, and the program that runs it. Standard library alone.

A worker receives its task as JSON on stdin, so that neither keys nor long lists appear in a process
table. mpirun and srun do not pass stdin to every process: with them it comes in a variable of the
environment. The task's function is part of the command line, where ``ps`` shows it.
"""

from __future__ import annotations

import base64
import os
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, get_type_hints

from flagscale.cli_errors import run_command
from flagscale.errors import ConfigError
from flagscale.module_command import python_arguments
from flagscale.records import decode, encode

TASK_MODULE = "flagscale.hosts.workers.task"
"""This module, which workers run."""
TASK_VARIABLE = "FLAGSCALE_WORKER_TASK"
"""Variable that holds a compressed task for workers without stdin."""
# The kernel limits an environment variable to 128 KiB.
_MAX_VARIABLE_BYTES = 120 * 1024


@dataclass(frozen=True)
class WorkerTask:
    """A function to run in a worker process, with its argument."""

    function: str
    """``module:function``. It takes one dataclass and returns the exit code of the process."""
    argument: str
    """The function's argument as JSON."""
    argv: tuple[str, ...]
    """Command line of the program that created the task: results are stored with it."""

    @classmethod
    def create(cls, function: str, argument: Any) -> WorkerTask:
        """Return a task that calls ``function`` with a dataclass."""
        return cls(function, encode(argument), tuple(sys.argv))

    @property
    def command(self) -> list[str]:
        """Command line of the worker."""
        return [sys.executable, *python_arguments(TASK_MODULE), self.function]

    def to_stdin(self) -> bytes:
        """Return the bytes that the worker reads from stdin."""
        return encode(self).encode()

    def to_environment(self) -> dict[str, str]:
        """Return the variable with which the worker needs no stdin.

        Raises:
            ConfigError: the task is longer than an environment variable may be.
        """
        compressed_task = base64.b64encode(zlib.compress(encode(self).encode(), 9)).decode()
        if len(compressed_task) > _MAX_VARIABLE_BYTES:
            raise ConfigError(
                f"the measurement takes {len(compressed_task)} bytes to describe, and mpirun and "
                f"Slurm hand on {_MAX_VARIABLE_BYTES}",
                hint="give fewer sizes or lines at once, or start over SSH (--hosts)",
            )
        return {TASK_VARIABLE: compressed_task}


def load_function(name: str) -> Callable[..., int]:
    """Import a function by its ``module:function`` name."""
    module, _, function = name.partition(":")
    loaded: Callable[..., int] = getattr(import_module(module), function)
    return loaded


def python_path() -> str:
    """Return a PYTHONPATH with which another process imports the same modules as this one."""
    return os.pathsep.join(path for path in sys.path if path)


def main() -> int:
    """Run this worker's task and return its exit code."""
    return run_command(_run_task)


def _run_task() -> int:
    compressed_task = os.environ.pop(TASK_VARIABLE, None)
    text = (
        zlib.decompress(base64.b64decode(compressed_task))
        if compressed_task
        else sys.stdin.buffer.read()
    )
    task = decode(WorkerTask, text)
    sys.argv[:] = task.argv
    function = load_function(task.function)
    # The annotation of the first parameter is the dataclass that the argument holds.
    argument_type = next(iter(get_type_hints(function).values()))
    return function(decode(argument_type, task.argument))
