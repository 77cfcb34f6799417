"""Functions that run as the ranks of a measurement, under any launcher."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Protocol, TypeVar

from flagscale.bench.world import BenchWorld, detect_world
from flagscale.errors import ConfigError

P_contra = TypeVar("P_contra", contravariant=True)


class RankFunction(Protocol[P_contra]):
    """Function of a rank: carries out a plan, and returns the exit code."""

    def __call__(self, plan: P_contra, world: BenchWorld | None = None) -> int:
        """Run as a rank of ``world``; without it, of the world in this process's environment."""


def rank_function(function: Callable[[P_contra, BenchWorld], int]) -> RankFunction[P_contra]:
    """Decorate the function that a rank runs, so that it can be the function of a
    :class:`.WorkerTask`.

    Raises:
        ConfigError: (the decorated function) no launcher has started this process.
    """

    @wraps(function)
    def run(plan: P_contra, world: BenchWorld | None = None) -> int:
        world = world or detect_world(os.environ)
        if world is None:
            raise ConfigError(f"{function.__module__} runs as a rank: start it by its command")
        return function(plan, world)

    return run
