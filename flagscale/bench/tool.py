"""What every measuring command does: read its line, and find its ranks or start them."""

from __future__ import annotations

import os
import socket
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from flagscale.bench.files import UnreadableFileError
from flagscale.bench.placement import Placement, require_own, require_room
from flagscale.bench.rank import Job, carry_out
from flagscale.bench.spawn import cores_here, run_job
from flagscale.bench.world import BenchWorld, detect
from flagscale.cli_errors import guard
from flagscale.errors import ConfigError


class Plan(Protocol):
    """What a command line amounts to."""

    @property
    def placement(self) -> Placement:
        """Which ranks run where."""

    def check(self, ranks: int) -> None:
        """Refuse what does not fit so many ranks.

        Raises:
            ConfigError: it does not.
        """


P = TypeVar("P", bound=Plan)


class Starter(Generic[P]):
    """Starts the ranks of a plan ``P``."""

    run: str
    """What every rank carries out, see :attr:`.Job.run`: by its name, for it needs torch."""

    def header(self, plan: P) -> bool:
        """Whether lines about the start are wanted."""
        return True

    def start_here(self, plan: P, ranks: int) -> int:
        """Start the ranks on this machine; the exit code."""
        # Of one that is stopped while it measures the others tell before.
        place, patience = plan.placement, plan.placement.timeout + 8.0
        job = Job.of(self.run, plan)
        return run_job(job, ranks, log_dir=place.log_dir, patience=patience)

    def start(self, plan: P, ranks: int) -> int:
        """Start the ranks wherever they shall run; the exit code."""
        place = plan.placement
        # What opens connections is no business of the ranks, which load this module too.
        if place.slurm:
            from flagscale.bench.starters.slurm import run_in_slurm

            return run_in_slurm(place, Job.of(self.run, plan), os.environ, note=self.header(plan))
        if place.hosts and place.starter == "mpirun":
            from flagscale.bench.starters.mpirun import run_by_mpirun

            return run_by_mpirun(place, Job.of(self.run, plan), os.environ)
        if place.hosts:
            from flagscale.bench.starters.ssh import run_over_ssh

            return run_over_ssh(place, self.run, plan, os.environ)
        if place.nodes > 1:
            raise ConfigError(
                f"-N {place.nodes} hosts: which? give --hosts, --hosts-file or --slurm-mode"
            )
        require_room(ranks, cores_here(), place, "this machine")
        require_own(place.address)
        return self.start_here(plan, ranks)


class Tool(Starter[P], ABC):
    """A command; ``P`` is the plan that its line amounts to."""

    prog: str

    def main(self, arguments: Sequence[str] | None = None, *, prog: str | None = None) -> int:
        """Run the command; the exit code. Under a launcher, every rank comes here with the same
        line."""
        words = list(sys.argv[1:] if arguments is None else arguments)
        return guard(lambda: self.run_line(words, prog or self.prog))

    @abstractmethod
    def read(self, words: list[str], prog: str, *, keeps: bool) -> P:
        """The plan of a command line. ``keeps``: this process is the one that writes files and
        compares with them, so they are looked at.

        Raises:
            ConfigError: a flag or value is wrong; a file it names cannot be read or used.
        """

    def debug(self, plan: P) -> bool:
        """Whether libraries shall speak."""
        return False

    def run_line(self, words: list[str], prog: str) -> int:
        """Carry out a command line; the exit code.

        Raises:
            FlagscaleError: it is wrong, or its ranks cannot be started.
        """
        world = detect(os.environ)
        try:
            plan = self.read(words, prog, keeps=world is None or world.rank == 0)
            ranks = _ranks(plan.placement, world)
            plan.check(ranks)
        except ConfigError as error:
            if world is None or world.rank == 0:
                raise
            # Each rank finds the same mistake and one message is enough, but for what one host
            # lacks.
            if isinstance(error, UnreadableFileError) and world.local_rank == 0:
                where = f"rank {world.rank} on {socket.gethostname()}"
                print(f"error: {where}: {error}", file=sys.stderr)
            return ConfigError.exit_code
        # Read by the libraries when they are loaded, here or in the ranks. torch's warnings of a
        # connection that broke are pages of addresses, around the one line that says why.
        debug = self.debug(plan)
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "INFO" if debug else "ERROR")
        if debug:
            os.environ.setdefault("NCCL_DEBUG", "INFO")
        return self.start(plan, ranks) if world is None else carry_out(self.run, plan, world)


def _ranks(place: Placement, world: BenchWorld | None) -> int:
    """How many ranks there are, or shall be."""
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
