"""``experiment.runner.slurm``: what a job asks of Slurm. Part of :mod:`.schema`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from flagscale.config.documented import doc

RUNTIMES = ("pyxis", "apptainer", "singularity")
MOST_NODES = 65_536
"""Of a cluster of Slurm's."""


@dataclass(frozen=True)
class Container:
    """The container that a job's nodes run in: ``experiment.runner.slurm.container``. The script of
    each node runs in it, its agent and its ranks too; the image needs bash and a Python."""

    image: str = field(
        default="",
        metadata=doc(
            "The image, as the runtime writes it: `/shared/train.sqsh` or `nvcr.io#nvidia/pytorch` "
            "for Pyxis, `/shared/train.sif` or `docker://...` for Apptainer. Its Python is "
            "`runner.python`, `python3` without it."
        ),
    )
    runtime: str = field(
        default="pyxis",
        metadata=doc(
            "Who makes the container: `pyxis`, a plug-in of Slurm's that srun is told by options; "
            "`apptainer` or `singularity`, commands that the nodes have.",
            choices=RUNTIMES,
        ),
    )
    mounts: tuple[str, ...] = field(
        default=(),
        metadata=doc(
            "What of the nodes is there too: `/data`, `/data:/mnt/data` or `/data:/data:ro`. "
            "`exp_dir`, `log_dir`, this project (unless `runner.build_dir` says where the image "
            "has it) and the working directory are, under their own names."
        ),
    )
    workdir: str | None = field(
        default=None,
        metadata=doc(
            "The ranks' working directory in the container. Without it: the one in which the "
            "launcher is called."
        ),
    )
    options: tuple[str, ...] = field(
        default=(),
        metadata=doc(
            "Further words for the runtime: `[--nv]` for Apptainer with NVIDIA's GPUs, "
            "`[--no-container-mount-home]` for Pyxis. Processes must see those of the node: none "
            "that makes a PID namespace."
        ),
    )


@dataclass(frozen=True)
class SlurmType:
    """What the nodes of one device type are asked for by:
    ``experiment.runner.slurm.device_type_specific.<type>``. What is not given is as for all."""

    nodes: int | None = field(
        default=None,
        metadata=doc(
            "How many of this type. With a hostfile its lines say it.",
            minimum=1,
            maximum=MOST_NODES,
        ),
    )
    partition: str | None = field(default=None, metadata=doc("Their partition."))
    gpus_per_node: str | None = field(default=None, metadata=doc("GPUs of each of them."))
    mem: str | None = field(default=None, metadata=doc("Memory of each of them."))
    constraint: str | None = field(default=None, metadata=doc("Features that they must have."))
    reservation: str | None = field(default=None, metadata=doc("Their reservation."))


@dataclass(frozen=True)
class Slurm:
    """What the job of a run asks for: ``experiment.runner.slurm``. Texts reach sbatch as they are,
    each as one word ``--option=value``."""

    partition: str | None = field(
        default=None, metadata=doc("Partition, or several with commas. Without it: Slurm's own.")
    )
    account: str | None = field(default=None, metadata=doc("Account that pays for the job."))
    qos: str | None = field(default=None, metadata=doc("Quality of service."))
    time: str | None = field(
        default=None,
        metadata=doc(
            "Time limit, as Slurm writes it: `30` (minutes), `2:00:00`, `1-12` (days and hours). "
            "`stop_grace` and half a minute before its end the job is told to save a checkpoint "
            "and to end, so it must be longer than that. Without it: the partition's."
        ),
    )
    nodes: int | None = field(
        default=None,
        metadata=doc(
            "Number of nodes; the same as `runner.nnodes`. With a hostfile the job is on its "
            "hosts, whose names are then Slurm's, in the order of the hostfile. Without: on the "
            "nodes that Slurm gives it, in Slurm's order.",
            minimum=1,
            maximum=MOST_NODES,
        ),
    )
    gpus_per_node: str | None = field(
        default=None,
        metadata=doc(
            "GPUs of each node, as sbatch's `--gpus-per-node`: `8` or `h100:8`. Without "
            "`nproc_per_node` training has as many ranks, a command one."
        ),
    )
    cpus_per_task: int | None = field(
        default=None,
        metadata=doc(
            "CPUs of each node: all ranks of a node are one task of Slurm's. Without it: all of a "
            "node that is the job's alone (`exclusive`), one of a node that is shared.",
            minimum=1,
        ),
    )
    mem: str | None = field(
        default=None, metadata=doc("Memory of each node, as sbatch's `--mem`: `0` is all of it.")
    )
    exclusive: bool = field(
        default=True, metadata=doc("Whether no other job may be on the nodes meanwhile.")
    )
    constraint: str | None = field(
        default=None, metadata=doc("Features that nodes must have: `a100&nvlink`.")
    )
    reservation: str | None = field(default=None, metadata=doc("Reservation to use."))
    dependency: str | None = field(
        default=None,
        metadata=doc(
            "What the job waits for, as sbatch's `--dependency`: `afterok:1234`. A job whose "
            "condition cannot come true any more is cancelled."
        ),
    )
    requeue: int = field(
        default=0,
        metadata=doc(
            "How often Slurm may start the job again: after a preemption, at its time limit, or "
            "when somebody requeues it. It goes on from its last checkpoint, as the same run. What "
            "fails by itself is not started again (`max_restarts` is for that).",
            minimum=0,
        ),
    )
    by_type: Mapping[str, SlurmType] = field(default_factory=dict)
    """``device_type_specific``: what is asked for unlike nodes, in one heterogeneous job."""
    container: Container | None = None
    """What nodes run in; ``experiment.runner.slurm.container``."""
    extra: Mapping[str, str | None] = field(default_factory=dict)
    """Other options of sbatch by their long names; None is one without a value."""


TYPED = {
    "job_name": "it is made of `experiment.exp_name` and the run's id, by which the run is found",
    "nodes": "it is a key of `slurm`, or `experiment.runner.nnodes`",
    "nodelist": "give a hostfile: `experiment.runner.hostfile`",
    "nodefile": "give a hostfile: `experiment.runner.hostfile`",
    "gpus": "give `gpus_per_node`: every node has as many",
    "gpus_per_task": "give `gpus_per_node`: a node's ranks are one task of Slurm's",
    "gpus_per_socket": "give `gpus_per_node`",
    "mincpus": "give `cpus_per_task`",
    "ntasks": "a node is one task, whose ranks are `experiment.runner.nproc_per_node`",
    "ntasks_per_node": "a node is one task, whose ranks are `experiment.runner.nproc_per_node`",
    "ntasks_per_core": "a node is one task, whose ranks are `experiment.runner.nproc_per_node`",
    "ntasks_per_gpu": "a node is one task, whose ranks are `experiment.runner.nproc_per_node`",
    "ntasks_per_socket": "a node is one task, whose ranks are `experiment.runner.nproc_per_node`",
    "oversubscribe": "give `exclusive: false`, which shares nodes with other jobs",
    "overcommit": "a node is one task, whose ranks are `experiment.runner.nproc_per_node`",
    "no_requeue": "give `requeue: 0`, which is the default",
    "signal": "it has its time from `experiment.runner.stop_grace`",
    "output": "`action=logs` shows it; `experiment.exp_dir` says where it is",
    "error": "`action=logs` shows it; `experiment.exp_dir` says where it is",
    "input": "a job in the background reads nothing",
    "open_mode": "output is always appended",
    "chdir": "the ranks work in the directory in which the launcher is called",
    "export": "`experiment.envs` has the ranks' variables",
    "export_file": "`experiment.envs` has the ranks' variables",
    "get_user_env": "`experiment.cmds.before_start` may read a profile",
    "container_image": "give `container`: `{runtime: pyxis, image: ...}`",
    "container_mounts": "give `container`: its `mounts`",
    "container_workdir": "give `container`: its `workdir`",
    "array": "a run is one job",
    "wrap": "the script is the launcher's",
    "test_only": "`action=check` does this",
    "wait": "`experiment.runner.foreground` stays until the run ends",
    "parsable": "the launcher reads the job's id",
    "quiet": "the launcher reads the job's id",
    "kill_on_invalid_dep": "it is always `yes`",
    "no_kill": "the agents end a job that has lost a node",
    "wait_all_nodes": "it is always 1",
    "clusters": "a run is on the cluster of the machine it is started from",
    "help": "`sbatch --help` prints it",
    "version": "`sbatch --version` prints it",
    "usage": "`sbatch --usage` prints it",
}
"""Options of sbatch that ``extra`` cannot give, and what to do instead."""

OTHERS = (
    *("acctg_freq", "batch", "bb", "bbf", "begin", "burst_buffer", "cluster_constraint"),
    *("comment", "consolidate_segments", "container", "container_id", "contiguous", "core_spec"),
    *("cores_per_socket", "cpu_freq", "cpus_per_gpu", "deadline", "delay_boot", "distribution"),
    *("exclude", "exclusive_topo", "external_launcher", "extra", "extra_node_info", "gid"),
    *("gpu_bind", "gpu_freq", "gres", "gres_flags", "hint", "hold", "ignore_pbs", "immediate"),
    *("licenses", "mail_type", "mail_user", "mcs_label", "mem_bind", "mem_per_cpu"),
    *("mem_per_gpu", "network", "nice", "oom_kill_step", "power", "prefer"),
    *("priority", "profile", "propagate", "reboot", "resv_ports", "segment", "share"),
    *("sockets_per_node", "spread_job", "stepmgr", "switches", "thread_spec", "threads_per_core"),
    *("time_min", "tmp", "tres_bind", "tres_per_task", "uid", "umask", "use_min_nodes"),
    *("verbose", "wckey", "x11"),
)
"""Options of sbatch, up to Slurm 25.05, that are given in ``extra``; a newer one is, too."""

_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")


def seconds(time: str) -> int | None:
    """A time limit of Slurm's in seconds; None for one that never comes, as 0 is. Raises
    :class:`ValueError` for what is none: ``minutes``, ``minutes:seconds``, ``h:m:s``, ``d-h``,
    ``d-h:m`` and ``d-h:m:s`` are."""
    if time.lower() in ("infinite", "unlimited", "-1"):
        return None
    found = _TIME.fullmatch(time)
    if found is None:
        raise ValueError(time)
    days, *given = found.groups()
    numbers = [int(number) for number in given if number is not None]
    if days is not None:
        hours, minutes, rest = (*numbers, 0, 0)[:3]
    elif len(numbers) == 3:
        hours, minutes, rest = numbers
    else:
        hours, minutes, rest = (0, *numbers, 0)[:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + rest or None
