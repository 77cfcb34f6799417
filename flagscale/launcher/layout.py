"""Names and paths of the files that an experiment leaves in its directory. Standard library only.

::

    <exp_dir>/
      checkpoints/  tensorboard/  wandb/
      logs/
        state.json                                the run that was started last
        run.lock                                  held while a run is being started
        start.id                                  id of the run that may be started
        runs/<run id>/                            what each run of the directory was started from:
          config.yaml overrides.yaml plan.json    as in scripts, but never overwritten
          composed.yaml                           the same with references between keys, for rerun
          launch.json                             time, code, working directory, YAML
          changes.diff                            uncommitted changes of the code, without secrets
          state.json                              its last state, after a later run has started
        code/<name>-<digest>/                     copies of code (runner.snapshot)
        host_<rank>_<host>.output                 everything that the host's script prints
        scripts/host_<rank>_<host>_run.sh         one per host
        scripts/{config.yaml,overrides.yaml,plan.json}
        pids/host_<rank>_<host>.pid               the script's process
        details/host_<rank>_<host>/start.lock     held on the host while it starts a script
        details/host_<rank>_<host>/<run id>/      the run's directory on that host:
          script agent.json exit.json             supervising processes, exit of the job
          liveness.json                           on the coordinator: attempt, hosts, first failure
          status/rank_<rank>.{jsonl,place}        events and progress of the ranks
          status/host.jsonl                       software, devices, data of the host
          status.<n>/…                            the same for the n-th restart
          ranks/…/attempt_<n>/<local rank>/       torchrun's stdout.log, stderr.log, error.json
          output                                  the host's output, after a later run has begun
          output.times                            times at which the output had grown to a size

``<rank>`` of a host is its node rank, from 0 in the order of the plan.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

AGENT_FILE = "agent.json"
EXIT_FILE = "exit.json"
SCRIPT_FILE = "script"
LIVENESS_FILE = "liveness.json"
HOST_LABEL_PREFIX = "host_"
STATUS_DIRECTORY = "status"
HOST_RECORD_FILE = "host.jsonl"
"""File of a status directory with the software, devices and inputs of the host."""
EARLIER_STATUS_PREFIX = "status-before-"
"""Prefix of the status directories of earlier starts of the same run."""
RANKS_DIRECTORY = "ranks"
OLD_OUTPUT_FILE = "output"
OUTPUT_TIMES_FILE = "output.times"
START_LOCK_FILE = "start.lock"
TUNER_DIRECTORY, TUNER_ANSWER_FILE = "auto_tuner", "answer.json"
"""Directory of a search for the fastest layout in ``exp_dir``, and the file of its answer."""
# ext4 and xfs allow 255 bytes per name, and the rest of a name takes about 30.
_MAX_HOST_BYTES = 100


def registry_directory() -> Path:
    """Return the directory with one file for each of the user's runs."""
    state_home = os.environ.get("XDG_STATE_HOME", "")
    # A user without a home has no registry: never write to "/~".
    home = os.path.expanduser("~/.local/state")  # noqa: PTH111
    return Path("/", state_home if state_home.startswith("/") else home, "flagscale", "runs")


def status_directory(attempt: int) -> str:
    """Return the name of the status directory of an attempt, counted from 0."""
    return f"{STATUS_DIRECTORY}.{attempt}" if attempt else STATUS_DIRECTORY


def latest_status_directory(run_dir: Path) -> Path:
    """Return the status directory of a run's latest attempt on a host."""
    restarts = [p for p in run_dir.glob(f"{STATUS_DIRECTORY}.*") if p.suffix[1:].isdigit()]
    return max(restarts, key=lambda p: int(p.suffix[1:]), default=run_dir / STATUS_DIRECTORY)


def host_label(rank: int, host: str) -> str:
    """Return ``host_<rank>_<host>``, made safe as a file name."""
    safe = re.sub(r"[^A-Za-z0-9.\-]", "_", host).encode()[:_MAX_HOST_BYTES].decode()
    return f"{HOST_LABEL_PREFIX}{rank}_{safe}"


class HasRanks:
    """Part of a run on one host, with consecutive ranks."""

    first_rank: int
    nproc: int

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.nproc)


@dataclass(frozen=True)
class HostFiles(HasRanks):
    """Part of a run on one host, with the locations of its files."""

    name: str
    first_rank: int
    nproc: int
    run_dir: Path
    output: Path


class _SubPath:
    """Descriptor of a path below the directory of a :class:`Layout` or :class:`RunFiles`."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __get__(self, layout: Layout | RunFiles, _owner: type) -> Path:
        return layout.directory / self._path


@dataclass(frozen=True)
class RunFiles:
    """Paths of the files on the launching machine that belong to one run of an experiment."""

    directory: Path

    config = _SubPath("config.yaml")
    overrides = _SubPath("overrides.yaml")
    plan = _SubPath("plan.json")
    composed = _SubPath("composed.yaml")
    launch = _SubPath("launch.json")
    changes = _SubPath("changes.diff")
    state = _SubPath("state.json")


@dataclass(frozen=True)
class Layout:
    """Paths of one experiment."""

    exp_dir: Path
    log_dir: Path | None = None
    """``runner.log_dir``: directory of torchrun's logs and of the runs' directories, if not the
    default.
    """

    @property
    def directory(self) -> Path:
        return self.exp_dir

    logs = _SubPath("logs")
    state = _SubPath("logs/state.json")
    lock = _SubPath("logs/run.lock")
    claim = _SubPath("logs/start.id")
    scripts = _SubPath("logs/scripts")
    plan = _SubPath("logs/scripts/plan.json")
    config = _SubPath("logs/scripts/config.yaml")
    overrides = _SubPath("logs/scripts/overrides.yaml")
    runs = _SubPath("logs/runs")
    code = _SubPath("logs/code")
    checkpoints = _SubPath("checkpoints")
    checkpoint_staging = _SubPath("checkpoint_staging")
    tensorboard = _SubPath("tensorboard")
    wandb = _SubPath("wandb")

    def script(self, rank: int, host: str) -> Path:
        return self.scripts / f"{host_label(rank, host)}_run.sh"

    def pid(self, rank: int, host: str) -> Path:
        return self.logs / "pids" / f"{host_label(rank, host)}.pid"

    def output(self, rank: int, host: str) -> Path:
        return self.logs / f"{host_label(rank, host)}.output"

    def run_files(self, run_id: str) -> RunFiles:
        """Return the paths of the files that a run was started from."""
        return RunFiles(self.runs / run_id)

    def run_dir(self, rank: int, host: str, run_id: str) -> Path:
        details = self.log_dir or self.logs / "details"
        return details / host_label(rank, host) / run_id
