"""Schema of ``experiment.runner``: where and how ranks are started, watched and stopped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from flagscale.config.documented import doc
from flagscale.config.slurm_schema import Slurm

TORCHRUN_BACKENDS = ("torchrun",)
SYNC_CHOICES = ("none", "code")
WAIT_STATES = ("none", "joined", "ready", "step")
MAX_TIMEOUT_SECONDS = 30_000_000
"""Maximum of all timeouts in seconds, about a year. Larger values would overflow the clocks of
torch and of the shell."""
HEALTH_CHOICES = ("off", "quick", "full")
NOTICES = ("failed", "stalled", "restarted", "finished")


@dataclass(frozen=True)
class Notify:
    """Notifications about a run: ``experiment.runner.notify``. Each one times out after ten
    seconds; a failure is a line in the output of the first host and has no other effect."""

    command: str = field(
        default="",
        metadata=doc(
            "Bash command that the first host runs for each notification. It receives a JSON "
            "object on stdin with `event`, `run`, `name`, `time`, `attempt`, `attempts` and "
            "`text`, and for the first failure `host`, `rank`, `exit_code`, `reason`, `traceback` "
            "and `log`."
        ),
    )
    webhook: str = field(
        default="",
        repr=False,
        metadata=doc(
            "URL to which the first host sends the same JSON object by HTTP POST. The URL is a "
            "secret: write it as `${oc.env:NAME}`; it is stored in no file. Chat services display "
            "`text`."
        ),
    )
    on: tuple[str, ...] = field(
        default=("failed", "stalled", "restarted"),
        metadata=doc(
            "Events that cause a notification. `finished` reports the end of the run, whatever "
            "its result: `event` is then `finished`, `failed` or `stopped`.",
            choices=NOTICES,
        ),
    )


@dataclass(frozen=True)
class Runner:
    """Start, supervision and end of a run: ``experiment.runner``."""

    type: str | None = field(
        default=None,
        metadata=doc(
            "Runner that starts the run. `local`: this machine only. `ssh`: every host over SSH, "
            "including this machine if it is the only one. Default: `ssh` if the hostfile lists "
            "other machines, otherwise `local`. `slurm`: one Slurm job, configured in "
            "`experiment.runner.slurm`. `cloud` (or `env`): this host's part of a job whose hosts "
            "were started by something else, such as Kubernetes, with the same command on each; "
            "their ranks and the master's address come from environment variables. Installed "
            "packages can add runners (entry points `flagscale.runners`), whose settings are in a "
            "section of the runner's name."
        ),
    )
    backend: str = field(
        default="torchrun",
        metadata=doc(
            "Accepted for compatibility. Training ranks are always started by `torchrun`.",
            choices=TORCHRUN_BACKENDS,
        ),
    )
    nnodes: int | None = field(
        default=None,
        metadata=doc(
            "Number of hosts. At most as many hosts as the hostfile has take part, with a note if "
            "it has fewer. `a:b` means `a`, except with `on_bad_host: shrink`: then the job starts "
            "on `b` hosts, and goes on with no fewer than `a`. Default with `type: cloud`: "
            "`NNODES`, `PET_NNODES` or `WORLD_SIZE`.",
            minimum=1,
            maximum=1_000_000,
        ),
    )
    nproc_per_node: int | Literal["auto"] | None = field(
        default=None,
        metadata=doc(
            "Ranks per host: the minimum of this value, the host's slots and its visible devices. "
            "`auto`: one rank per device, or one on a host without devices. By default a command "
            "(`experiment.task.type`) runs once per host.",
            minimum=1,
            maximum=65_536,
        ),
    )
    hostfile: Path | None = field(
        default=None,
        metadata=doc(
            "File with one line `host slots=N [type=T] [port=P] [user=U] [addr=A] [proxy=J] "
            "[via=V]` per host; `node[01-16]` stands for sixteen hosts. `addr` is the address for "
            "communication between ranks, if it differs from the SSH address. `proxy` is a jump "
            "host, as in `ssh -J`. `via` selects a connection other than SSH, provided by an "
            "installed package (entry points `flagscale.executors`). Without a hostfile, the run "
            "is on this machine."
        ),
    )
    hosts: tuple[str, ...] = field(
        default=(),
        metadata=doc(
            "Hosts of the run, in place of a hostfile: a list of names, or of lines as a hostfile "
            "has them, in which `slots` may be missing: `[node01, 'node[02-16] user=me']`."
        ),
    )
    node_rank: int | None = field(
        default=None,
        metadata=doc(
            "With `type: cloud`, the rank of this host, from 0. Default: `NODE_RANK`, "
            "`PET_NODE_RANK`, `GROUP_RANK`, `JOB_COMPLETION_INDEX` or `RANK`. With other types the "
            "launcher numbers the hosts.",
            minimum=0,
            maximum=1_000_000,
        ),
    )
    master_addr: str | None = field(
        default=None,
        metadata=doc(
            "Address for the rendezvous of the ranks. Default: `addr` or name of the first host, "
            "or with `type: cloud` the variable `MASTER_ADDR` or `PET_MASTER_ADDR`. "
            "A loopback address is refused if other machines take part."
        ),
    )
    master_port: int | None = field(
        default=None,
        metadata=doc(
            "Port for the rendezvous of the ranks. Default: a free port of the first host, or with "
            "`type: cloud` the variable `MASTER_PORT` or `PET_MASTER_PORT`, otherwise 29500.",
            minimum=1,
            maximum=65535,
        ),
    )
    foreground: bool = field(
        default=False,
        metadata=doc(
            "Whether `action=run` stays in the foreground, prints the ranks' output and exits "
            "with the exit code of the job. Always with `type: cloud`, because a container ends "
            "with its first process."
        ),
    )
    start_timeout: float = field(
        default=600.0,
        metadata=doc(
            "Seconds within which every rank must have joined the process group.",
            minimum=1,
            maximum=MAX_TIMEOUT_SECONDS,
        ),
    )
    wait_for: str = field(
        default="ready",
        metadata=doc(
            "State that `action=run` waits for before it returns, when it runs in the background. "
            "`joined`: every rank has joined the process group. `ready`: every rank has also "
            "loaded its model, data and checkpoint, so that errors there are reported at once. "
            "`step`: the first step has finished, which shows that memory suffices. `none`: do "
            "not wait. External programs that do not report `ready` count as ready when they have "
            "joined.",
            choices=WAIT_STATES,
        ),
    )
    stop_grace: float = field(
        default=60.0,
        metadata=doc(
            "Seconds that stopped processes have to exit (and to save a checkpoint) before they "
            "are killed.",
            minimum=0,
            maximum=MAX_TIMEOUT_SECONDS,
        ),
    )
    log_dir: Path | None = field(
        default=None,
        metadata=doc("Directory of torchrun's logs. Default: `<exp_dir>/logs/details`."),
    )
    redirects: str = field(
        default="3",
        metadata=doc(
            "Streams of a rank that are written to its log file, as in torchrun's `--redirects`."
        ),
    )
    tee: str = field(
        default="3",
        metadata=doc(
            "Streams of a rank that are also written to the host's output, as in torchrun's "
            "`--tee`."
        ),
    )
    max_restarts: int = field(
        default=0,
        metadata=doc(
            "How often the whole job is restarted after a failure, on all hosts and from its last "
            "checkpoint. A job is not restarted after a stop, if its ranks never joined, or if it "
            "lost a host, unless `on_bad_host` allows it. A command, whose ranks do not join, is "
            "restarted after any failure.",
            minimum=0,
            maximum=1_000_000,
        ),
    )
    on_failure: str = field(
        default="stop",
        metadata=doc(
            "Effect of a failed host on the other hosts: `stop` ends the job there within "
            "seconds, `leave` lets it continue.",
            choices=("stop", "leave"),
        ),
    )
    spares: int = field(
        default=0,
        metadata=doc(
            "Number of hosts of the hostfile, after the `nnodes` that train, which wait with an "
            "agent and without ranks until they take the place of a lost or sick host. With "
            "`type: slurm`, the job requests so many nodes in addition to `slurm.nodes`. Needs "
            "`on_bad_host: replace` or `shrink`.",
            minimum=0,
            maximum=1_000_000,
        ),
    )
    on_bad_host: str = field(
        default="stop",
        metadata=doc(
            "Effect of a lost host, or of one that `health` finds sick. `stop`: the job ends. "
            "`replace`: it restarts from its last checkpoint with a host of `spares` in the place "
            "of the lost one. `shrink`: the same, and without a spare it restarts on the hosts "
            "that are left, with fewer data-parallel replicas and the same global batch, and takes "
            "back a host whose script is started again; needs `nnodes: a:b`. This does not count "
            "as one of `max_restarts`. Needs `type: ssh` or `slurm`. Over SSH, another host "
            "coordinates the run and sends notifications if the first one is lost: more than half "
            "of the agents must have contact for that, so it needs three at least. A Slurm job "
            "cannot go on without its first node, and does not take hosts back.",
            choices=("stop", "replace", "shrink"),
        ),
    )
    lost_host_timeout: float = field(
        default=60.0,
        metadata=doc(
            "Seconds without a heartbeat between a host and the coordinating host after which each "
            "considers the other lost and ends its part of the job. Shorter interruptions have no "
            "effect.",
            minimum=1,
            maximum=MAX_TIMEOUT_SECONDS,
        ),
    )
    liveness_port: int | None = field(
        default=None,
        metadata=doc(
            "Port of the coordinating host, at first the first one, at which the agents of several "
            "hosts connect. Default: `master_port` + 1.",
            minimum=1,
            maximum=65535,
        ),
    )
    rdzv_id: str | None = field(
        default=None, metadata=doc("Identifier of the rendezvous. Default: the run id.")
    )
    rdzv_backend: str = field(
        default="static",
        metadata=doc(
            "Kind of rendezvous. Only `static` is supported, because other kinds choose the order "
            "of the hosts themselves.",
            choices=("static",),
        ),
    )
    rdzv_endpoint: str | None = field(
        default=None,
        metadata=doc(
            "`host:port`, equivalent to `master_addr` and `master_port`, which take precedence."
        ),
    )
    ssh_port: int | None = field(
        default=None,
        metadata=doc(
            "Port of the hosts' SSH servers; `port` of the hostfile takes precedence. Default: "
            "the port of your SSH configuration, otherwise 22.",
            minimum=1,
            maximum=65535,
        ),
    )
    ssh_config: Path | None = field(
        default=None,
        metadata=doc(
            "SSH configuration file to use instead of `~/.ssh/config` and the system's, as in "
            "`ssh -F`."
        ),
    )
    no_shared_fs: bool = field(
        default=False,
        metadata=doc(
            "Set to true if the hosts share no file system with this machine. Each host then gets "
            "its own script, configuration and plan below `exp_dir`, and logs and state are "
            "fetched. No effect if this machine is the only host."
        ),
    )
    sync: str = field(
        default="none",
        metadata=doc(
            "Files to copy to the hosts before a run if there is no shared file system. `code`: "
            "this project and the adapted backend, changed files only, into `build_dir`. `none`: "
            "nothing; hosts with different code are refused.",
            choices=SYNC_CHOICES,
        ),
    )
    build_dir: Path | None = field(
        default=None,
        metadata=doc(
            "Directory of this project on the hosts. Default: the same path as on this machine. "
            "Can be overridden per device type or host."
        ),
    )
    python: str | None = field(
        default=None,
        metadata=doc(
            "Python interpreter of the hosts, a path or a name. The directory of a path is also "
            "put first in PATH, as activating a virtual environment does. Default: the launcher's "
            "own interpreter, or that of the `conda` environment. Can be overridden per device "
            "type or host."
        ),
    )
    conda: str | None = field(
        default=None,
        metadata=doc(
            "Name or path of a conda environment that hosts activate first. Can be overridden per "
            "device type or host."
        ),
    )
    preflight: bool = field(
        default=True,
        metadata=doc(
            "Whether a run first checks every host for problems, as `action=check` does. The "
            "result of a host's Python environment is cached until the environment changes; "
            "`action=check` ignores the cache."
        ),
    )
    health: str = field(
        default="off",
        metadata=doc(
            "Check of the hosts' hardware before a run, and by `action=check`: errors that devices "
            "report, and short measurements of devices, of communication within a host and of "
            "pairs of hosts, which are compared with those of equal devices. A sick host keeps the "
            "run from starting. `quick` takes about ten seconds, `full` about a minute. With "
            "`on_bad_host: replace` or `shrink`, the quick check is repeated after a failure, and "
            "a host that two measurements find sick leaves the job. Needs torch on the hosts.",
            choices=HEALTH_CHOICES,
        ),
    )
    enable_gpu_health_check: bool = field(
        default=False,
        metadata=doc("FlagScale's name of `health: quick`, which it stands for if it is true."),
    )
    require_clean: bool = field(
        default=False,
        metadata=doc(
            "Whether a run is refused if Git does not know its code: if a file of this project's "
            "or the program's checkout is changed or untracked, or the program is in no checkout. "
            "`flagscale run --require-clean` sets it. Files that runs have written do not count."
        ),
    )
    snapshot: bool = field(
        default=False,
        metadata=doc(
            "Whether the ranks run a copy of the code as it was at the start, so that later edits "
            "do not change the run or its restarts. The copy is below `<exp_dir>/logs/code`; runs "
            "with the same code share it. It has this project, the adapted backend, and the Git "
            "checkout (or directory) of an external program or a command, without ignored files. "
            "`flagscale run --snapshot` sets it; `flagscale rerun` starts from it."
        ),
    )
    per_node_task: bool = field(
        default=False,
        metadata=doc(
            "For compatibility with FlagScale: whether each host runs a job of its own. Refused "
            "with several hosts, which always run one job together."
        ),
    )
    enable_monitoring: bool = field(
        default=True,
        metadata=doc(
            "No effect, accepted for compatibility. Every run is monitored by its own agents, and "
            "none of their processes outlives it."
        ),
    )
    hang_detection_timeout: float = field(
        default=1800.0,
        metadata=doc(
            "Seconds without progress on any rank, after all have joined, before the job is "
            "considered hung. The ranks then write their stacks and latest collectives, the job "
            "fails, and the rank that the others wait for is reported. Must be longer than the "
            "longest step, and for an external program that reports only `progress`, longer than "
            "the time between two reports. Evaluations and checkpoints may take four times as "
            "long, and at least half an hour. A collective that has waited for so long, or for "
            "half of its own timeout, "
            "is explained in the log while the job goes on, also of a command. 0 disables all "
            "of this.",
            minimum=0,
            maximum=MAX_TIMEOUT_SECONDS,
        ),
    )
    metrics_port: int | None = field(
        default=None,
        metadata=doc(
            "Port at which the agent of each host serves the metrics of the run for Prometheus "
            "(`/metrics`). Not set: no metrics are served. Runs on one host at the same time need "
            "different ports.",
            minimum=1,
            maximum=65535,
        ),
    )
    metrics_address: str = field(
        default="127.0.0.1",
        metadata=doc(
            "Address of each host at which metrics are served; `0.0.0.0` for all of them. There is "
            "no authentication, so only this host can read them by default."
        ),
    )
    notify: Notify | None = None
    """Notifications about the run: ``experiment.runner.notify``."""
    slurm: Slurm = field(default_factory=Slurm)
    """Options of the Slurm job: ``experiment.runner.slurm``."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Section named after an installed runner, which that runner reads and checks."""
    min_nnodes: int | None = None
    """Smallest number of hosts, of ``nnodes: a:b`` with ``on_bad_host: shrink``."""
    extra: Mapping[str, str | None] = field(default_factory=dict)
    """Additional options of torchrun, ``--key value``; None is a flag without a value."""

    @property
    def names_hosts(self) -> bool:
        """True if the YAML names the hosts, in a hostfile or in ``hosts``."""
        return self.hostfile is not None or bool(self.hosts)
