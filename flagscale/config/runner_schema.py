"""``experiment.runner``: how and where an experiment is run. Part of :mod:`.schema`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from flagscale.config.documented import doc
from flagscale.config.slurm_schema import Slurm

TORCHRUN_BACKENDS = ("torchrun",)
SYNC_KINDS = ("none", "code")
WAITS = ("none", "joined", "ready", "step")
LONGEST = 30_000_000
"""Seconds that anything here may be waited for: about a year. What is meant to last for ever would
overflow the clocks of torch and the shell."""
NOTICES = ("failed", "stalled", "restarted", "finished")


@dataclass(frozen=True)
class Notify:
    """Whom to tell what becomes of a run: ``experiment.runner.notify``. Each notification has ten
    seconds; one that fails is a line in the output of the first host and harms nothing."""

    command: str = field(
        default="",
        metadata=doc(
            "A bash command that the first host runs, with a JSON object on its stdin: `event`, "
            "`run`, `name`, `time`, `attempt`, `attempts`, `text`, and of the first failure "
            "`host`, `rank`, `exit_code`, `reason`, `traceback`, `log`."
        ),
    )
    webhook: str = field(
        default="",
        repr=False,
        metadata=doc(
            "Address that the first host sends the same JSON to by HTTP POST. Is a secret: give "
            "it as `${oc.env:NAME}`; it is written to no file. `text` is what chat services show."
        ),
    )
    on: tuple[str, ...] = field(
        default=("failed", "stalled", "restarted"),
        metadata=doc(
            "What to tell of. `finished` is told of the end, however it comes: `event` is then "
            "`finished`, `failed` or `stopped`.",
            choices=NOTICES,
        ),
    )


@dataclass(frozen=True)
class Runner:
    """How and where it is run: ``experiment.runner``."""

    type: str | None = field(
        default=None,
        metadata=doc(
            "Who starts the run. `local`: this machine alone, by itself. `ssh`: every host by "
            "SSH, this machine too where it is the only one. Without it: `ssh` where the hostfile "
            "names other machines, `local` where there is none or it names this machine alone. "
            "`slurm`: one job of Slurm's, which `experiment.runner.slurm` describes. Or "
            "the name of a runner that an installed package brings (entry points "
            "`flagscale.runners`); what such a runner is told beside this section is a section of "
            "its own name in it."
        ),
    )
    backend: str = field(
        default="torchrun",
        metadata=doc(
            "Accepted for compatibility: ranks of training are always started by `torchrun`.",
            choices=TORCHRUN_BACKENDS,
        ),
    )
    nnodes: int | None = field(
        default=None,
        metadata=doc(
            "Number of hosts: the smaller of this and the hostfile's, with a note where the "
            "hostfile has fewer. `a:b` means `a`.",
            minimum=1,
            maximum=1_000_000,
        ),
    )
    nproc_per_node: int | Literal["auto"] | None = field(
        default=None,
        metadata=doc(
            "Ranks a host: the smallest of this, the host's slots and its visible devices. `auto`: "
            "as many as the host has devices, 1 on a host that has none. Without it a command "
            "(`experiment.task.type`) runs once on every host.",
            minimum=1,
            maximum=65_536,
        ),
    )
    hostfile: Path | None = field(
        default=None,
        metadata=doc(
            "File with a line `host slots=N [type=T] [port=P] [user=U] [addr=A] [proxy=J] [via=V]` "
            "for each host; `node[01-16]` names sixteen. `addr` is the address for the ranks where "
            "SSH uses another; `proxy` is a jump host, as for `ssh -J`; `via` is another way to "
            "reach it than SSH, which an installed package brings (entry points "
            "`flagscale.executors`). Without a hostfile: this machine."
        ),
    )
    master_addr: str | None = field(
        default=None,
        metadata=doc(
            "Address at which ranks meet. Without it: the first host's `addr` or name. A loopback "
            "address is refused where another machine takes part."
        ),
    )
    master_port: int | None = field(
        default=None,
        metadata=doc(
            "Port at which ranks meet. Without it: one that is free on the first host.",
            minimum=1,
            maximum=65535,
        ),
    )
    foreground: bool = field(
        default=False,
        metadata=doc(
            "Whether `action=run` stays, shows the ranks' output and exits with the job's code."
        ),
    )
    start_timeout: float = field(
        default=600.0,
        metadata=doc(
            "Seconds within which every rank must have joined the process group.",
            minimum=1,
            maximum=LONGEST,
        ),
    )
    wait_for: str = field(
        default="ready",
        metadata=doc(
            "What `action=run` waits for in the background before it returns: `joined`, that every "
            "rank is in the process group; `ready`, that each has its model, data and checkpoint "
            "too, so that one that does not fit is told at once; `step`, that the first step is "
            "done, for which memory has to suffice; `none`, nothing. Another's program that knows "
            "no `ready` counts as ready when it has joined.",
            choices=WAITS,
        ),
    )
    stop_grace: float = field(
        default=60.0,
        metadata=doc(
            "Seconds that stopped processes have to end (and save a checkpoint) before they are "
            "killed.",
            minimum=0,
            maximum=LONGEST,
        ),
    )
    log_dir: Path | None = field(
        default=None,
        metadata=doc("Directory of torchrun's logs. Without it: `<exp_dir>/logs/details`."),
    )
    redirects: str = field(
        default="3",
        metadata=doc("Which streams of a rank go to its log file, as torchrun's `--redirects`."),
    )
    tee: str = field(
        default="3",
        metadata=doc(
            "Which streams of a rank also go to the host's output, as torchrun's `--tee`."
        ),
    )
    max_restarts: int = field(
        default=0,
        metadata=doc(
            "How often the whole job, on all hosts together, is started again after a failure, "
            "from its last checkpoint. A stop is never followed by a start, nor is a job whose "
            "ranks have never joined, or one that has lost a host.",
            minimum=0,
            maximum=1_000_000,
        ),
    )
    on_failure: str = field(
        default="stop",
        metadata=doc(
            "What happens on the other hosts when one fails: `stop` ends the job there within "
            "seconds, `leave` lets it go on.",
            choices=("stop", "leave"),
        ),
    )
    lost_host_timeout: float = field(
        default=60.0,
        metadata=doc(
            "Seconds without a word between a host and the first one after which each takes the "
            "other for lost and ends its part of the job. Shorter interruptions do no harm.",
            minimum=1,
            maximum=LONGEST,
        ),
    )
    liveness_port: int | None = field(
        default=None,
        metadata=doc(
            "Port of the first host at which the agents of several hosts meet. Without it: the "
            "one after `master_port`.",
            minimum=1,
            maximum=65535,
        ),
    )
    rdzv_id: str | None = field(
        default=None, metadata=doc("Name of the rendezvous. Without it: the run's identity.")
    )
    rdzv_backend: str = field(
        default="static",
        metadata=doc(
            "Kind of rendezvous. Only `static`: others number the hosts by a rule of their own.",
            choices=("static",),
        ),
    )
    rdzv_endpoint: str | None = field(
        default=None,
        metadata=doc(
            "`host:port`; the same as `master_addr` and `master_port`, which win over it."
        ),
    )
    ssh_port: int | None = field(
        default=None,
        metadata=doc(
            "Port of the hosts' SSH servers; the hostfile's `port` wins. Without it: what the "
            "user's SSH configuration says, else 22.",
            minimum=1,
            maximum=65535,
        ),
    )
    ssh_config: Path | None = field(
        default=None,
        metadata=doc(
            "An SSH configuration in place of `~/.ssh/config` and the system's, as `ssh -F`."
        ),
    )
    no_shared_fs: bool = field(
        default=False,
        metadata=doc(
            "Whether hosts have no file system in common with this machine. Each host then gets "
            "its own script, configuration and plan under `exp_dir`; logs and states are fetched. "
            "Of no effect where this machine is the only host."
        ),
    )
    sync: str = field(
        default="none",
        metadata=doc(
            "What is copied to the hosts before a run when there is no shared file system: "
            "`code` is this project and the adapted backend, changed files alone, into "
            "`build_dir`. With `none` hosts whose code differs are refused.",
            choices=SYNC_KINDS,
        ),
    )
    build_dir: Path | None = field(
        default=None,
        metadata=doc(
            "This project's directory on the hosts. Without it: the same as here. A device type "
            "or host may have another."
        ),
    )
    python: str | None = field(
        default=None,
        metadata=doc(
            "The Python of the hosts, a path or a name; a path's directory also comes first in "
            "PATH, as activating a virtual environment would have it. Without it: the launcher's "
            "own, or with `conda` that environment's. A device type or host may have another."
        ),
    )
    conda: str | None = field(
        default=None,
        metadata=doc(
            "Name or path of a conda environment that hosts activate first. A device type or "
            "host may have another."
        ),
    )
    preflight: bool = field(
        default=True,
        metadata=doc(
            "Whether a run first looks at every host for what would make it fail, as "
            "`action=check` does. The Python of a host over SSH is not asked again as long as "
            "nothing there has changed; `action=check` asks it in any case."
        ),
    )
    per_node_task: bool = field(
        default=False,
        metadata=doc(
            "FlagScale's: whether each host runs a job of its own. On one host that is so in any "
            "case; refused with several, which do one job together."
        ),
    )
    enable_monitoring: bool = field(
        default=True,
        metadata=doc(
            "Of no effect, kept for configurations that have it: every run is watched by its own "
            "agents, and no process of theirs outlives it."
        ),
    )
    hang_detection_timeout: float = field(
        default=1800.0,
        metadata=doc(
            "Seconds in which no rank gets on, once all have joined, after which the job has "
            "failed: its ranks write their stacks to their logs and the one that is behind is "
            "named. Must be longer than the longest step, and for a program that reports nothing "
            "but `progress`, than the time between two of those. Evaluations and checkpoints may "
            "take four times as long, and half an hour in any case. 0: hangs are not looked for.",
            minimum=0,
            maximum=LONGEST,
        ),
    )
    notify: Notify | None = None
    """Who is told what becomes of the run; ``experiment.runner.notify``."""
    slurm: Slurm = field(default_factory=Slurm)
    """What a job asks of Slurm; ``experiment.runner.slurm``."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The section of an installed runner's own name, which that runner reads and checks."""
    extra: Mapping[str, str | None] = field(default_factory=dict)
    """Other keys, which torchrun gets as ``--key value``; None is a flag without a value."""
