"""Common frame of all benchmark commands: parse the command line, then start the ranks, or run
as a rank if a launcher has started this process.
"""

from __future__ import annotations

import os
import socket
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from flagscale.bench.files import UnreadableFileError
from flagscale.bench.placement import Placement, require_capacity, require_local_address
from flagscale.bench.starters.local import run_local_task
from flagscale.bench.world import BenchWorld, detect_world, usable_cores
from flagscale.cli_errors import run_command
from flagscale.errors import ConfigError
from flagscale.hosts.workers.task import WorkerTask, load_function


class BenchPlan(Protocol):
    """Parsed command line of a benchmark."""

    @property
    def placement(self) -> Placement:
        """Ranks and their hosts."""

    def check(self, ranks: int) -> None:
        """Refuse a plan that does not fit the number of ranks.

        Raises:
            ConfigError: it does not fit.
        """


P = TypeVar("P", bound=BenchPlan)
# Ranks that wait for a stopped rank during a measurement report it earlier.
_STOPPED_MARGIN_SECONDS = 8.0


class RankStarter(Generic[P]):
    """Starts the ranks of a plan ``P``."""

    run: str
    """Function of every rank as ``module:function``. It is imported by the ranks alone: it needs
    torch.
    """

    def header(self, plan: P) -> bool:
        """Return whether to print lines about the start."""
        return True

    def start_here(self, plan: P, ranks: int) -> int:
        """Start the ranks on this machine, and return the exit code."""
        place = plan.placement
        task = WorkerTask.of(self.run, plan)
        limit = place.timeout + _STOPPED_MARGIN_SECONDS
        return run_local_task(task, ranks, log_dir=place.log_dir, stopped_limit=limit)

    def start(self, plan: P, ranks: int) -> int:
        """Start the ranks where the placement puts them, and return the exit code."""
        place = plan.placement
        # Starters are imported here: the ranks import this module, too, and need no connections.
        if place.slurm:
            from flagscale.bench.starters.slurm import run_in_slurm

            return run_in_slurm(
                place, WorkerTask.of(self.run, plan), os.environ, note=self.header(plan)
            )
        if place.hosts and place.starter == "mpirun":
            from flagscale.bench.starters.mpirun import run_by_mpirun

            return run_by_mpirun(place, WorkerTask.of(self.run, plan), os.environ)
        if place.hosts:
            from flagscale.bench.starters.ssh import run_over_ssh

            return run_over_ssh(place, self.run, plan, os.environ)
        if place.nodes > 1:
            raise ConfigError(
                f"-N {place.nodes} hosts: which? give --hosts, --hosts-file or --slurm-mode"
            )
        require_capacity(ranks, usable_cores(), place, "this machine")
        require_local_address(place.address)
        return self.start_here(plan, ranks)


class BenchCommand(RankStarter[P], ABC):
    """A benchmark command. Its command line is parsed into a plan ``P``."""

    prog: str

    def main(self, arguments: Sequence[str] | None = None, *, prog: str | None = None) -> int:
        """Run the command, and return the exit code. Under a launcher every rank runs it with
        the same arguments.
        """
        words = list(sys.argv[1:] if arguments is None else arguments)
        return run_command(lambda: self.run_line(words, prog or self.prog))

    @abstractmethod
    def parse_plan(self, words: list[str], prog: str, *, keeps: bool) -> P:
        """Parse a command line.

        Args:
            words: arguments.
            prog: name of the command in messages.
            keeps: this process writes and compares result files, so they are checked.

        Raises:
            ConfigError: a flag or value is wrong; a file cannot be read or used.
        """

    def debug(self, plan: P) -> bool:
        """Return whether libraries print debug output."""
        return False

    def run_line(self, words: list[str], prog: str) -> int:
        """Run a command line, and return the exit code.

        Raises:
            FlagscaleError: the line is wrong, or the ranks cannot be started.
        """
        world = detect_world(os.environ)
        try:
            plan = self.parse_plan(words, prog, keeps=world is None or world.rank == 0)
            ranks = _count_ranks(plan.placement, world)
            plan.check(ranks)
        except ConfigError as error:
            if world is None or world.rank == 0:
                raise
            # All ranks detect the same mistake and one message suffices, except for a file that
            # one host lacks.
            if isinstance(error, UnreadableFileError) and world.local_rank == 0:
                location = f"rank {world.rank} on {socket.gethostname()}"
                print(f"error: {location}: {error}", file=sys.stderr)
            return ConfigError.exit_code
        # The libraries read these variables when they are loaded, here or in the ranks. torch's
        # warnings of a broken connection are pages of addresses around one line with the reason.
        debug = self.debug(plan)
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "INFO" if debug else "ERROR")
        if debug:
            os.environ.setdefault("NCCL_DEBUG", "INFO")
        return self.start(plan, ranks) if world is None else load_function(self.run)(plan, world)


def _count_ranks(place: Placement, world: BenchWorld | None) -> int:
    """Return the number of ranks."""
    if world is None:
        if place.workers is None:
            raise ConfigError(
                "the number of ranks is missing: -r 8, or start this under torchrun, mpirun or srun"
            )
        return place.workers
    if place.workers not in (None, world.size):
        raise ConfigError(
            f"-r asks for {place.workers} ranks, and {world.launcher} has started {world.size}",
            hint="leave -r out under a launcher, or make both equal",
        )
    return world.size
