"""``python -m flagscale.bench.rank MODULE:FUNCTION``: what every rank runs that we start.

Its job, a plan in JSON, comes in a variable of the environment or else on stdin; the annotation of
the function's ``plan`` tells what it is.
"""

from __future__ import annotations

import base64
import os
import sys
import zlib
from dataclasses import dataclass
from importlib import import_module
from typing import Any, get_type_hints

from flagscale.bench.world import BenchWorld, detect
from flagscale.cli_errors import guard
from flagscale.errors import ConfigError
from flagscale.records import decode, encode

JOB_VARIABLE = "FLAGSCALE_BENCH_JOB"
"""Of the job, where a launcher hands on no stdin to all ranks."""
# The kernel takes 128 KiB a variable.
_LONGEST_VARIABLE = 120 * 1024


@dataclass(frozen=True)
class Job:
    """What every rank runs."""

    run: str
    """``module:function``, which takes a plan and the rank's world and returns the exit code."""
    plan: str
    """In JSON."""
    argv: tuple[str, ...]
    """What was typed: it is kept with the results."""

    @classmethod
    def of(cls, run: str, plan: Any) -> Job:
        return cls(run, encode(plan), tuple(sys.argv))

    @property
    def command(self) -> list[str]:
        """Of one rank."""
        return [sys.executable, "-m", "flagscale.bench.rank", self.run]

    def variable(self) -> dict[str, str]:
        """The environment in which :attr:`command` needs no stdin.

        Raises:
            ConfigError: it is too long for that.
        """
        packed = base64.b64encode(zlib.compress(encode(self).encode(), 9)).decode()
        if len(packed) > _LONGEST_VARIABLE:
            raise ConfigError(
                f"the measurement takes {len(packed)} bytes to describe, and mpirun and Slurm "
                f"hand on {_LONGEST_VARIABLE}",
                hint="give fewer sizes or lines at once, or start over SSH (--hosts)",
            )
        return {JOB_VARIABLE: packed}


def carry_out(run: str, plan: Any, world: BenchWorld | None) -> int:
    """Do as a rank of ``world`` what a :attr:`Job.run` says, with a plan or the JSON of one; the
    exit code."""
    module, _, name = run.partition(":")
    function = getattr(import_module(module), name)
    if isinstance(plan, str):
        plan = decode(get_type_hints(function)["plan"], plan)
    code: int = function(plan, world)
    return code


def main() -> int:
    """Carry out this rank's job; the exit code.

    Raises:
        ConfigError: there is none, or this process is no rank.
    """
    packed = os.environ.pop(JOB_VARIABLE, None)
    text = zlib.decompress(base64.b64decode(packed)) if packed else sys.stdin.buffer.read()
    job = decode(Job, text)
    sys.argv[:] = job.argv
    world = detect(os.environ)
    if world is None:
        raise ConfigError("flagscale.bench.rank is what ranks are started with")
    return carry_out(job.run, job.plan, world)


if __name__ == "__main__":
    sys.exit(guard(main))
