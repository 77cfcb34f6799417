"""Typed schema of an experiment: every key of a YAML, with its documentation.

The rest of the launcher works with these frozen dataclasses. ``config.load`` fills them from a
composed YAML. The pages of ``docs/reference/configuration/`` are generated from their fields, so
the documentation of a key is here and nowhere else. A key that is null or missing takes the
default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flagscale.config import actions
from flagscale.config.arguments.spec.train_arguments import TrainArguments
from flagscale.config.documented import doc, documented_fields
from flagscale.config.runner_schema import NOTICES, Notify, Runner
from flagscale.config.slurm_schema import Container, Slurm, SlurmType
from flagscale.config.tuner_schema import Tuner

__all__ = [
    "ARGUMENT_SECTIONS",
    "BACKEND_DIRECTORY",
    "BACKEND_SOURCE",
    "NOTICES",
    "OWN_PROGRAM",
    "PROJECT",
    "SECTIONS",
    "SPECIFIC_SECTIONS",
    "Commands",
    "Container",
    "Environments",
    "Experiment",
    "HostOverride",
    "Notify",
    "Options",
    "Runner",
    "Slurm",
    "SlurmType",
    "Task",
    "Tuner",
    "doc",
    "documented_fields",
]

PROJECT = Path(__file__).resolve().parents[2]
OWN_PROGRAM = PROJECT / "flagscale" / "train" / "train_gpt.py"
BACKEND_DIRECTORY = Path("third_party") / "Megatron-LM"
BACKEND_SOURCE = PROJECT / BACKEND_DIRECTORY
"""Directory of the adapted source of the training backend."""

SECTIONS = ("system", "model", "data")
SPECIFIC_SECTIONS = ("device_type_specific", "node_specific")
ARGUMENT_SECTIONS = ("train", *SPECIFIC_SECTIONS)
"""Top-level sections that may hold arguments of the training program."""
TASK_TYPES = ("train", "command")
TASK_BACKENDS = ("megatron",)


@dataclass(frozen=True)
class Task:
    """Program of the ranks: ``experiment.task``."""

    entrypoint: Path = field(
        default=OWN_PROGRAM,
        metadata=doc(
            "Training program. Default: the program of this project. A relative path is looked up "
            "in the working directory, then in this project. An external Python script (such as "
            "`pretrain_gpt.py` of a Megatron-LM checkout) receives the same arguments and checks "
            "them with its own parser; the packages `flagscale` and `megatron` of its checkout "
            "take precedence. FlagScale's paths `flagscale/train/megatron/train_gpt.py` and "
            "`flagscale/train/hetero/train_gpt.py` stand for the program of this project, unless "
            "the file exists in the working directory.",
        ),
    )
    type: str = field(
        default="train",
        metadata=doc(
            "`train`: the ranks run the training program, started by torchrun. `command`: each "
            "rank runs `command`, on hosts that need no torch.",
            choices=TASK_TYPES,
        ),
    )
    command: tuple[str, ...] = field(
        default=(),
        metadata=doc(
            "With `type: command`, the program and its arguments: a list of words, or a text that "
            "is split as a shell splits it, without expansion (use `[bash, -c, 'echo $RANK']` for "
            "a shell). `python`, a first word that ends in `.py` (looked up as `entrypoint` is) "
            "and `-m MODULE` are run by the host's Python. The command runs once per host, or "
            "`runner.nproc_per_node` times, with `RANK`, `LOCAL_RANK`, `WORLD_SIZE`, "
            "`LOCAL_WORLD_SIZE`, `GROUP_RANK`, `MASTER_ADDR` and `MASTER_PORT` set as torchrun "
            "does.",
        ),
    )
    backend: str = field(
        default="megatron",
        metadata=doc(
            "Accepted for compatibility: `megatron` is the only training backend.",
            choices=TASK_BACKENDS,
        ),
    )
    external: bool = False
    """True if ``entrypoint`` is a program other than this project's."""
    packages: tuple[Path, ...] = ()
    """Directories with packages of an external program's checkout. Its `flagscale` and `megatron`
    are imported from there, not from this project."""
    is_copied: bool = False
    """True if ``entrypoint`` is in a copy of the code, which has the same path on every host."""

    @property
    def is_command(self) -> bool:
        return self.type == "command"

    @property
    def program(self) -> str:
        """Name of the program, for display."""
        return Path(self.command[0]).name if self.command else self.entrypoint.name


@dataclass(frozen=True)
class Environments:
    """Environment of the ranks: ``experiment.envs``. Values are the YAML's text, unchanged."""

    common: Mapping[str, str] = field(default_factory=dict)
    by_type: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """``envs.device_type_specific.<type>``: overrides ``common``."""
    by_host: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """``envs.node_specific.<host>``: overrides both."""

    def for_host(self, host: str, device_type: str | None) -> dict[str, str]:
        """Return the variables of a host's ranks: common, of its device type, of the host."""
        merged = dict(self.common)
        merged.update(self.by_type.get(device_type, {}) if device_type else {})
        merged.update(self.by_host.get(host, {}))
        return merged


@dataclass(frozen=True)
class Commands:
    """Shell commands around the job on every host: ``experiment.cmds``."""

    before_start: str = field(
        default="",
        metadata=doc(
            "Shell command that runs on every host before the ranks start. If it fails, the run "
            "ends."
        ),
    )
    after_stop: str = field(
        default="",
        metadata=doc(
            "Shell command that runs on every host after the ranks have ended, whatever their "
            "result."
        ),
    )


@dataclass(frozen=True)
class HostOverride:
    """Settings of the hosts of one device type, or of one host: ``device_type_specific.<type>`` and
    ``node_specific.<host>`` at the top level of the YAML."""

    build_dir: Path | None = field(
        default=None,
        metadata=doc("Directory of this project on these hosts. Overrides `runner.build_dir`."),
    )
    python: str | None = field(
        default=None, metadata=doc("Python interpreter of these hosts. Overrides `runner.python`.")
    )
    conda: str | None = field(
        default=None, metadata=doc("conda environment of these hosts. Overrides `runner.conda`.")
    )
    before_start: str | None = None
    """``cmds.before_start``: replaces ``experiment.cmds.before_start``."""
    after_stop: str | None = None
    arguments: TrainArguments = field(default_factory=TrainArguments)
    """Arguments of the training program; an explicit null removes an argument."""


@dataclass(frozen=True)
class Options:
    """Options of the launcher itself, given on the command line or at the YAML's top level."""

    action: str = field(
        default="run", metadata=doc(actions.describe_actions(), choices=actions.action_names())
    )
    follow: bool = field(default=False, metadata=doc(actions.describe_option("follow")))
    rank: int | None = field(default=None, metadata=doc(actions.describe_option("rank"), minimum=0))
    lines: int | None = field(
        default=None, metadata=doc(actions.describe_option("lines"), minimum=0)
    )
    host: str | None = field(default=None, metadata=doc(actions.describe_option("host")))
    grep: str | None = field(default=None, metadata=doc(actions.describe_option("grep")))
    since: str | None = field(default=None, metadata=doc(actions.describe_option("since")))
    level: str | None = field(
        default=None, metadata=doc(actions.describe_option("level"), choices=("warning", "error"))
    )
    json: bool = field(default=False, metadata=doc(actions.describe_option("json")))
    csv: str | None = field(default=None, metadata=doc(actions.describe_option("csv")))
    dry: bool = field(default=False, metadata=doc(actions.describe_option("dry")))
    run_best: bool = field(default=False, metadata=doc(actions.describe_option("run_best")))
    project: str | None = field(default=None, metadata=doc(actions.describe_option("project")))


@dataclass(frozen=True)
class Experiment:
    """A whole experiment, checked. Every path in it is absolute."""

    name: str = field(
        metadata=doc(
            "Name of the experiment, for display and for Weights & Biases. At most 255 bytes of "
            "printable text.",
            key="exp_name",
        )
    )
    exp_dir: Path = field(
        metadata=doc(
            "Directory for everything that the experiment writes: scripts, logs, checkpoints. The "
            "launcher creates it and its `logs` with mode 0700, regardless of your umask; an "
            "existing directory keeps its mode. To share checkpoints, save them elsewhere (`save` "
            "and `load` under `train.system.checkpoint`), or `chmod` this directory, which leaves "
            "`logs` private."
        )
    )
    task: Task
    runner: Runner
    envs: Environments
    cmds: Commands
    config_file: Path
    """YAML that the user named."""
    tuner: Tuner = field(default_factory=Tuner)
    """``auto_tuner``: the search of ``action=auto_tune``."""
    train: TrainArguments = field(default_factory=TrainArguments)
    """Arguments of the training program: ``train``, parsed. None are read for commands on existing
    runs."""
    by_type: Mapping[str, HostOverride] = field(default_factory=dict)
    """``device_type_specific``: overrides the settings of all hosts."""
    by_host: Mapping[str, HostOverride] = field(default_factory=dict)
    """``node_specific``: overrides ``by_type``."""
    overrides: tuple[str, ...] = ()
    """Hydra overrides, as the user typed them."""
    resolved: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Composed configuration with interpolations resolved, as plain data. It may contain secrets
    (see ``config.secrets.redact``)."""
    composed: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """Composed configuration with references between its keys, from which the same experiment can
    be loaded again. It may contain secrets, too."""
    sources: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    """Source location of each dotted key: ``file:line`` or ``override``."""
    unreferenced_keys: tuple[str, ...] = field(default=(), compare=False)
    """Additional keys of the user that no interpolation refers to."""
    filled_arguments: tuple[str, ...] = field(default=(), compare=False)
    """Names of the arguments that were taken from the config.json of the pretrained model."""
