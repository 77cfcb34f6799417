"""The typed schema of an experiment: what a YAML may say, with the meaning of every key.

These frozen dataclasses are what the rest of the launcher works with. ``config.load`` fills them
from a composed YAML and ``docs/configuration.md`` is generated from their fields, so a key's
documentation lives here and nowhere else. A key that is null or missing takes the default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

PROJECT = Path(__file__).resolve().parents[2]
OWN_PROGRAM = PROJECT / "flagscale" / "train" / "train_gpt.py"

ACTIONS = ("run", "dryrun", "test", "check", "query", "logs", "stop")
SECTIONS = ("system", "model", "data")
RUNNER_TYPES = ("local", "ssh")
TORCHRUN_BACKENDS = ("torchrun",)
SYNC_KINDS = ("none", "code")
SPECIFIC_SECTIONS = ("device_type_specific", "node_specific")
TASK_TYPES = ("train",)
TASK_BACKENDS = ("megatron",)


def doc(
    text: str,
    *,
    key: str | None = None,
    choices: tuple[str, ...] | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
) -> Mapping[str, Any]:
    """A schema field's metadata. ``key`` is its name in the YAML when it differs from the
    field's; ``minimum`` and ``maximum`` are inclusive."""
    return MappingProxyType(
        {"doc": text, "key": key, "choices": choices, "minimum": minimum, "maximum": maximum}
    )


def documented(schema: type) -> dict[str, Field[Any]]:
    """The fields of a schema class that are keys of the YAML, by key."""
    return {f.metadata["key"] or f.name: f for f in fields(schema) if "doc" in f.metadata}


@dataclass(frozen=True)
class Task:
    """What is run: ``experiment.task``."""

    entrypoint: Path = field(
        default=OWN_PROGRAM,
        metadata=doc(
            "The training program: this project's own unless given, looked for in the working "
            "directory, then in this project. A script that is another's (a Megatron-LM "
            "checkout's `pretrain_gpt.py`) gets the same arguments, judged by its own parser.",
        ),
    )
    type: str = field(default="train", metadata=doc("The kind of task.", choices=TASK_TYPES))
    backend: str = field(
        default="megatron", metadata=doc("The training backend.", choices=TASK_BACKENDS)
    )
    foreign: bool = False
    """Whether ``entrypoint`` is a program other than this project's own."""


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
        metadata=doc("What to tell of.", choices=NOTICES),
    )


@dataclass(frozen=True)
class Runner:
    """How and where it is run: ``experiment.runner``."""

    type: str | None = field(
        default=None,
        metadata=doc(
            "How hosts are reached. Without it: `ssh` where the hostfile names other machines, "
            "`local` where there is none or it names this machine alone.",
            choices=RUNNER_TYPES,
        ),
    )
    backend: str = field(
        default="torchrun",
        metadata=doc("What starts the ranks of a host.", choices=TORCHRUN_BACKENDS),
    )
    nnodes: int | None = field(
        default=None,
        metadata=doc(
            "Number of hosts: the smaller of this and the hostfile's. `a:b` means `a`.", minimum=1
        ),
    )
    nproc_per_node: int | Literal["auto"] | None = field(
        default=None,
        metadata=doc(
            "Ranks a host: the smallest of this, the host's slots and its visible devices. `auto`: "
            "as many as the host has devices, 1 on a host that has none.",
            minimum=1,
        ),
    )
    hostfile: Path | None = field(
        default=None,
        metadata=doc(
            "File with a line `host slots=N [type=T] [port=P] [user=U] [addr=A] [proxy=J]` for "
            "each host; `node[01-16]` names sixteen. `addr` is the address for the ranks where "
            "SSH uses another; `proxy` is a jump host, as for `ssh -J`. Without a hostfile: this "
            "machine."
        ),
    )
    master_addr: str | None = field(
        default=None,
        metadata=doc("Address at which ranks meet. Without it: the first host's `addr` or name."),
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
            "Seconds within which every rank must have joined the process group.", minimum=1
        ),
    )
    stop_grace: float = field(
        default=60.0,
        metadata=doc(
            "Seconds that stopped processes have to end (and save a checkpoint) before they are "
            "killed.",
            minimum=0,
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
            "`action=check` does."
        ),
    )
    per_node_task: bool = field(
        default=False,
        metadata=doc("Whether each host runs a job of its own. Of no effect on one host."),
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
        ),
    )
    notify: Notify | None = None
    """Who is told what becomes of the run; ``experiment.runner.notify``."""
    extra: Mapping[str, str | None] = field(default_factory=dict)
    """Other keys, which torchrun gets as ``--key value``; None is a flag without a value."""


@dataclass(frozen=True)
class Environments:
    """Environment of the ranks: ``experiment.envs``. Values are the YAML's text, unchanged."""

    common: Mapping[str, str] = field(default_factory=dict)
    by_type: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """``envs.device_type_specific.<type>``: wins over ``common``."""
    by_host: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """``envs.node_specific.<host>``: wins over both."""

    def for_host(self, host: str, device_type: str | None) -> dict[str, str]:
        """What a host's ranks get: common, then its device type's, then its own."""
        merged = dict(self.common)
        merged.update(self.by_type.get(device_type, {}) if device_type else {})
        merged.update(self.by_host.get(host, {}))
        return merged


@dataclass(frozen=True)
class Commands:
    """Shell commands around the job on every host: ``experiment.cmds``."""

    before_start: str = field(
        default="", metadata=doc("Run before the ranks start; a failure ends the run.")
    )
    after_stop: str = field(
        default="", metadata=doc("Run after the ranks have ended, however they did.")
    )


@dataclass(frozen=True)
class Specific:
    """What is different on the hosts of one device type, or on one host:
    ``device_type_specific.<type>`` and ``node_specific.<host>`` at the YAML's top level."""

    build_dir: Path | None = field(
        default=None, metadata=doc("This project's directory there, for `runner.build_dir`.")
    )
    python: str | None = field(default=None, metadata=doc("The Python there, for `runner.python`."))
    conda: str | None = field(
        default=None, metadata=doc("The conda environment there, for `runner.conda`.")
    )
    before_start: str | None = None
    """``cmds.before_start``, in place of ``experiment.cmds.before_start``."""
    after_stop: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the training program, in sections or not, as in ``train``; null takes the
    argument away."""


@dataclass(frozen=True)
class Train:
    """The training program's arguments: ``train``. Plain nested dicts, as the YAML has them."""

    system: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)

    def sections(self) -> dict[str, Any]:
        """The three sections as one dict, in the order in which their arguments are passed."""
        return {name: getattr(self, name) for name in SECTIONS}


@dataclass(frozen=True)
class Options:
    """Options of the launcher itself, given on the command line or at the YAML's top level."""

    action: str = field(
        default="run",
        metadata=doc(
            "`run` starts in the background and returns when every rank has joined; `dryrun` "
            "prints the plan and the scripts; `test` runs in the foreground; `check` looks for "
            "what would keep a run from starting; `query` tells the state; `logs` shows the "
            "output; `stop` ends the run.",
            choices=ACTIONS,
        ),
    )
    follow: bool = field(
        default=False, metadata=doc("`query` and `logs` keep on until the run ends.")
    )
    rank: int | None = field(default=None, metadata=doc("`logs` of this rank alone.", minimum=0))
    lines: int | None = field(
        default=None, metadata=doc("`logs` shows this many last lines.", minimum=0)
    )
    json: bool = field(default=False, metadata=doc("`query` and `dryrun` print JSON."))


@dataclass(frozen=True)
class Experiment:
    """A whole experiment, checked. Every path in it is absolute."""

    name: str = field(
        metadata=doc("Name of the experiment; a word for people, also used in W&B.", key="exp_name")
    )
    exp_dir: Path = field(
        metadata=doc(
            "Directory of everything that the experiment writes: scripts, logs, checkpoints."
        )
    )
    task: Task
    runner: Runner
    envs: Environments
    cmds: Commands
    train: Train
    config_file: Path
    """The YAML that the user named."""
    by_type: Mapping[str, Specific] = field(default_factory=dict)
    """``device_type_specific``: wins over ``train`` and the like."""
    by_host: Mapping[str, Specific] = field(default_factory=dict)
    """``node_specific``: wins over ``by_type``."""
    overrides: tuple[str, ...] = ()
    """Hydra overrides, as the user typed them."""
    resolved: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """The whole composed configuration, interpolations resolved, as plain data. May hold
    secrets: see ``config.secrets.redact``."""
    sources: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    """Where a dotted key stands: ``file:line`` or ``override``."""
