"""The typed schema of an experiment: what a YAML may say, with the meaning of every key.

These frozen dataclasses are what the rest of the launcher works with. ``config.load`` fills them
from a composed YAML and ``docs/configuration.md`` is generated from their fields, so a key's
documentation lives here and nowhere else. A key that is null or missing takes the default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flagscale.config import actions
from flagscale.config.documented import doc, documented
from flagscale.config.runner_schema import NOTICES, Notify, Runner
from flagscale.config.slurm_schema import Container, Slurm, SlurmType

__all__ = [
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
    "Notify",
    "Options",
    "Runner",
    "Slurm",
    "SlurmType",
    "Specific",
    "Task",
    "Train",
    "doc",
    "documented",
]

PROJECT = Path(__file__).resolve().parents[2]
OWN_PROGRAM = PROJECT / "flagscale" / "train" / "train_gpt.py"
BACKEND_DIRECTORY = Path("third_party") / "Megatron-LM"
BACKEND_SOURCE = PROJECT / BACKEND_DIRECTORY
"""Where the training backend's adapted source is."""

SECTIONS = ("system", "model", "data")
SPECIFIC_SECTIONS = ("device_type_specific", "node_specific")
TASK_TYPES = ("train", "command")
TASK_BACKENDS = ("megatron",)


@dataclass(frozen=True)
class Task:
    """What is run: ``experiment.task``."""

    entrypoint: Path = field(
        default=OWN_PROGRAM,
        metadata=doc(
            "The training program: this project's own unless given, looked for in the working "
            "directory, then in this project. A Python script that is another's (a Megatron-LM "
            "checkout's `pretrain_gpt.py`) gets the same arguments, judged by its own parser. The "
            "packages `flagscale` and `megatron` of the checkout it lies in come first for it. "
            "FlagScale's `flagscale/train/hetero/train_gpt.py` is this project's own program, "
            "which trains on unlike devices too.",
        ),
    )
    type: str = field(
        default="train",
        metadata=doc(
            "`train`: the ranks run the training program, started by torchrun. `command`: each of "
            "them runs `command`, on hosts that need no torch.",
            choices=TASK_TYPES,
        ),
    )
    command: tuple[str, ...] = field(
        default=(),
        metadata=doc(
            "With `type: command`, the program and its arguments: a list of words, or a text that "
            "is split as a shell splits it, and in which nothing is filled in (`[bash, -c, 'echo "
            "$RANK']` asks a shell). `python`, a first word that ends in `.py` (looked for as "
            "`entrypoint` is) and `-m MODULE` are run by the host's Python. It runs once on every "
            "host, or `runner.nproc_per_node` times, with `RANK`, `LOCAL_RANK`, `WORLD_SIZE`, "
            "`LOCAL_WORLD_SIZE`, `GROUP_RANK`, `MASTER_ADDR` and `MASTER_PORT` as torchrun gives "
            "them.",
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
    """Whether ``entrypoint`` is a program other than this project's own."""
    packages: tuple[Path, ...] = ()
    """Where such a program's own packages are, if it lies in a checkout that has some: `flagscale`
    and `megatron` mean those to it, not this project's."""

    @property
    def is_command(self) -> bool:
        return self.type == "command"

    @property
    def program(self) -> str:
        """What runs, for people."""
        return Path(self.command[0]).name if self.command else self.entrypoint.name


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

    action: str = field(default="run", metadata=doc(actions.actions_doc(), choices=actions.names()))
    follow: bool = field(default=False, metadata=doc(actions.option_doc("follow")))
    rank: int | None = field(default=None, metadata=doc(actions.option_doc("rank"), minimum=0))
    lines: int | None = field(default=None, metadata=doc(actions.option_doc("lines"), minimum=0))
    host: str | None = field(default=None, metadata=doc(actions.option_doc("host")))
    json: bool = field(default=False, metadata=doc(actions.option_doc("json")))


@dataclass(frozen=True)
class Experiment:
    """A whole experiment, checked. Every path in it is absolute."""

    name: str = field(
        metadata=doc(
            "Name of the experiment; a word for people, also used in W&B. At most 255 bytes of "
            "printable text.",
            key="exp_name",
        )
    )
    exp_dir: Path = field(
        metadata=doc(
            "Directory of everything that the experiment writes: scripts, logs, checkpoints. It "
            "and its `logs` are made for your eyes alone (mode 0700), whatever your umask; one "
            "that is there already keeps its mode. To share checkpoints, save them elsewhere "
            "(`save` and `load` under `train.system.checkpoint`), or `chmod` this directory, "
            "which leaves `logs` private."
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
    idle: tuple[str, ...] = field(default=(), compare=False)
    """Keys of the user's own from which no other takes its value."""
    filled: tuple[str, ...] = field(default=(), compare=False)
    """Arguments that the model to start from has given."""
