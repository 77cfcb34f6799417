"""Base class of all benchmark commands: parses the command line and starts the ranks.

If a launcher, such as torchrun, has started this process, it runs as one of the ranks. Each
benchmark's ``cli`` module derives a :class:`BenchCommand`.
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
# Ranks that wait for a stopped rank in a measurement time out earlier, and report it.
_STOPPED_MARGIN_SECONDS = 8.0


class RankStarter(Generic[P]):
    """Starts the ranks of a plan ``P``."""

    rank_entry_point: str
    """Function that every rank runs, as ``module:function``. Only the ranks import it, because it
    needs torch.
    """

    def prints_header(self, plan: P) -> bool:
        """Return whether to print lines about the start of the ranks."""
        return True

    def start_here(self, plan: P, ranks: int) -> int:
        """Start the ranks on this machine, and return the exit code."""
        placement = plan.placement
        task = WorkerTask.create(self.rank_entry_point, plan)
        stopped_limit_seconds = placement.timeout + _STOPPED_MARGIN_SECONDS
        return run_local_task(
            task, ranks, log_dir=placement.log_dir, stopped_limit_seconds=stopped_limit_seconds
        )

    def start(self, plan: P, ranks: int) -> int:
        """Start the ranks where the placement puts them, and return the exit code."""
        placement = plan.placement
        # Starters are imported late, because the ranks import this module too and start nothing.
        if placement.slurm:
            from flagscale.bench.starters.slurm import run_in_slurm

            return run_in_slurm(
                placement,
                WorkerTask.create(self.rank_entry_point, plan),
                os.environ,
                print_job_id=self.prints_header(plan),
            )
        if placement.hosts and placement.starter == "mpirun":
            from flagscale.bench.starters.mpirun import run_by_mpirun

            return run_by_mpirun(
                placement, WorkerTask.create(self.rank_entry_point, plan), os.environ
            )
        if placement.hosts:
            from flagscale.bench.starters.ssh import run_over_ssh

            return run_over_ssh(placement, self.rank_entry_point, plan, os.environ)
        if placement.nodes > 1:
            raise ConfigError(
                f"-N {placement.nodes}: hosts are missing: --hosts, --hosts-file or --slurm-mode"
            )
        require_capacity(ranks, usable_cores(), placement, "this machine")
        require_local_address(placement.address)
        return self.start_here(plan, ranks)


class BenchCommand(RankStarter[P], ABC):
    """A benchmark command. Its command line is parsed into a plan ``P``."""

    prog: str

    def main(self, arguments: Sequence[str] | None = None, *, prog: str | None = None) -> int:
        """Run the command, and return the exit code. Under a launcher every rank runs it with
        the same arguments.
        """
        words = list(sys.argv[1:] if arguments is None else arguments)
        return run_command(lambda: self.run_arguments(words, prog or self.prog))

    @abstractmethod
    def parse_plan(self, words: list[str], prog: str, *, writes_results: bool) -> P:
        """Parse a command line.

        Args:
            words: arguments.
            prog: name of the command in messages.
            writes_results: this process writes and compares result files, so their paths are
                checked. False on all ranks but rank 0.

        Raises:
            ConfigError: a flag or value is wrong; a file cannot be read or used.
        """

    def prints_debug(self, plan: P) -> bool:
        """Return whether libraries print debug output."""
        return False

    def run_arguments(self, words: list[str], prog: str) -> int:
        """Run the command with these arguments, and return the exit code.

        Raises:
            FlagscaleError: the command line is wrong, or the ranks cannot be started.
        """
        world = detect_world(os.environ)
        try:
            plan = self.parse_plan(words, prog, writes_results=world is None or world.rank == 0)
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
        debug = self.prints_debug(plan)
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "INFO" if debug else "ERROR")
        if debug:
            os.environ.setdefault("NCCL_DEBUG", "INFO")
        return (
            self.start(plan, ranks)
            if world is None
            else load_function(self.rank_entry_point)(plan, world)
        )


def _count_ranks(placement: Placement, world: BenchWorld | None) -> int:
    """Return the number of ranks."""
    if world is None:
        if placement.ranks is None:
            raise ConfigError(
                "the number of ranks is missing: -r 8, or start this under torchrun, mpirun or srun"
            )
        return placement.ranks
    if placement.ranks not in (None, world.size):
        raise ConfigError(
            f"-r {placement.ranks}: {world.launcher} has started {world.size} ranks",
            hint="omit -r under a launcher, or set it to the same number",
        )
    return world.size
