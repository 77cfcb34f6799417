"""Names of the files an experiment leaves in its directory. Standard library alone.

::

    <exp_dir>/
      checkpoints/  tensorboard/  wandb/
      logs/
        state.json                                the run that was last started here
        run.lock                                  held while a run is being started
        host_<rank>_<host>.output                 everything the host's script prints
        scripts/host_<rank>_<host>_run.sh         one a host
        scripts/{config.yaml,overrides.yaml,plan.json}
        pids/host_<rank>_<host>.pid               the script's process
        details/host_<rank>_<host>/<run id>/      the run's directory on that host:
          script agent.json exit.json             who runs and watches the job, how it ended
          liveness.json                           on host 0: attempt, hosts, first failure
          status/rank_<rank>.{jsonl,place}        what the ranks report and where they are
          status.<n>/…                            the same once the job was started n times more
          ranks/…/attempt_<n>/<local rank>/       torchrun's stdout.log, stderr.log, error.json
          output                                  the host's output, once a later run has begun
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

AGENT_FILE = "agent.json"
EXIT_FILE = "exit.json"
SCRIPT_FILE = "script"
LIVENESS_FILE = "liveness.json"
STATUS_DIRECTORY = "status"
EARLIER_STATUS = "status-before-"
"""Of starts of the same run that were before this one."""
RANKS_DIRECTORY = "ranks"
OLD_OUTPUT_FILE = "output"
# ext4, xfs and the like take 255 bytes a name; the rest of ours needs about 30 of them.
_MAX_HOST_BYTES = 100


def status_directory(attempt: int) -> str:
    """The name of the ranks' reports of one attempt, counted from 0, in a run's directory."""
    return f"{STATUS_DIRECTORY}.{attempt}" if attempt else STATUS_DIRECTORY


def latest_status(run_dir: Path) -> Path:
    """The directory of the reports of a run's latest attempt on a host."""
    found = [p for p in run_dir.glob(f"{STATUS_DIRECTORY}.*") if p.suffix[1:].isdigit()]
    return max(found, key=lambda p: int(p.suffix[1:]), default=run_dir / STATUS_DIRECTORY)


def host_label(rank: int, host: str) -> str:
    """``host_<rank>_<host>``, safe as a file name whatever the host is called."""
    safe = re.sub(r"[^A-Za-z0-9.\-]", "_", host).encode()[:_MAX_HOST_BYTES].decode()
    return f"host_{rank}_{safe}"


class HasRanks:
    """A host's part of a run: its ranks follow each other."""

    first_rank: int
    nproc: int

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.nproc)


@dataclass(frozen=True)
class HostFiles(HasRanks):
    """A host's part of a run, and where its files are."""

    name: str
    first_rank: int
    nproc: int
    run_dir: Path
    output: Path


class _Below:
    """A path below the experiment's directory."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __get__(self, layout: Layout, _owner: type[Layout]) -> Path:
        return layout.exp_dir / self._path


@dataclass(frozen=True)
class Layout:
    """The paths of one experiment."""

    exp_dir: Path
    log_dir: Path | None = None
    """``runner.log_dir``: where torchrun's logs and the runs' directories go instead."""

    logs = _Below("logs")
    state = _Below("logs/state.json")
    lock = _Below("logs/run.lock")
    scripts = _Below("logs/scripts")
    plan = _Below("logs/scripts/plan.json")
    config = _Below("logs/scripts/config.yaml")
    overrides = _Below("logs/scripts/overrides.yaml")
    checkpoints = _Below("checkpoints")
    tensorboard = _Below("tensorboard")
    wandb = _Below("wandb")

    def script(self, rank: int, host: str) -> Path:
        return self.scripts / f"{host_label(rank, host)}_run.sh"

    def pid(self, rank: int, host: str) -> Path:
        return self.logs / "pids" / f"{host_label(rank, host)}.pid"

    def output(self, rank: int, host: str) -> Path:
        return self.logs / f"{host_label(rank, host)}.output"

    def run_dir(self, rank: int, host: str, run_id: str) -> Path:
        details = self.log_dir or self.logs / "details"
        return details / host_label(rank, host) / run_id
