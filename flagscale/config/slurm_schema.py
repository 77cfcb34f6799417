"""Schema of ``experiment.runner.slurm``: options of a Slurm job and its container."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from flagscale.config.documented import doc

RUNTIMES = ("pyxis", "apptainer", "singularity")
MAX_NODES = 65_536
"""Maximum number of nodes of a Slurm cluster."""


@dataclass(frozen=True)
class Container:
    """Container of each node: ``experiment.runner.slurm.container``. The script, the agent and the
    ranks of a node run in it; the image needs bash and Python."""

    image: str = field(
        default="",
        metadata=doc(
            "Container image, in the notation of the runtime: `/shared/train.sqsh` or "
            "`nvcr.io#nvidia/pytorch` for Pyxis, `/shared/train.sif` or `docker://...` for "
            "Apptainer. Its Python is `runner.python`, by default `python3`."
        ),
    )
    runtime: str = field(
        default="pyxis",
        metadata=doc(
            "Container runtime: `pyxis`, a Slurm plug-in that is configured by options of srun; "
            "`apptainer` or `singularity`, which must be installed on the nodes.",
            choices=RUNTIMES,
        ),
    )
    mounts: tuple[str, ...] = field(
        default=(),
        metadata=doc(
            "Directories of the nodes to mount: `/data`, `/data:/mnt/data` or `/data:/data:ro`. "
            "`exp_dir`, `log_dir`, the working directory and this project (unless "
            "`runner.build_dir` is its path in the image) are always mounted under their own "
            "paths."
        ),
    )
    workdir: str | None = field(
        default=None,
        metadata=doc(
            "Working directory of the ranks in the container. Default: the directory in which the "
            "launcher is started."
        ),
    )
    options: tuple[str, ...] = field(
        default=(),
        metadata=doc(
            "Additional options for the runtime, such as `[--nv]` for Apptainer with NVIDIA GPUs "
            "or `[--no-container-mount-home]` for Pyxis. Options that create a PID namespace are "
            "not supported, because agents must see the processes of the node."
        ),
    )


@dataclass(frozen=True)
class SlurmType:
    """Requests for the nodes of one device type:
    ``experiment.runner.slurm.device_type_specific.<type>``. Missing keys have the common value."""

    nodes: int | None = field(
        default=None,
        metadata=doc(
            "Number of nodes of this type. With a hostfile, its lines determine the number.",
            minimum=1,
            maximum=MAX_NODES,
        ),
    )
    partition: str | None = field(default=None, metadata=doc("Partition of these nodes."))
    gpus_per_node: str | None = field(default=None, metadata=doc("GPUs per node."))
    mem: str | None = field(default=None, metadata=doc("Memory per node."))
    constraint: str | None = field(
        default=None, metadata=doc("Features that these nodes must have.")
    )
    reservation: str | None = field(default=None, metadata=doc("Reservation of these nodes."))


@dataclass(frozen=True)
class Slurm:
    """Options of a run's job: ``experiment.runner.slurm``. Values are passed to sbatch unchanged,
    each as one word ``--option=value``."""

    partition: str | None = field(
        default=None,
        metadata=doc(
            "Partition, or several separated by commas. Default: the default partition of the "
            "cluster."
        ),
    )
    account: str | None = field(default=None, metadata=doc("Account to charge."))
    qos: str | None = field(default=None, metadata=doc("Quality of service."))
    time: str | None = field(
        default=None,
        metadata=doc(
            "Time limit in Slurm's notation: `30` (minutes), `2:00:00`, `1-12` (days and hours). "
            "`stop_grace` plus 30 seconds before the limit, the job is signalled to save a "
            "checkpoint and exit, so the limit must be longer than that. Default: the limit of "
            "the partition."
        ),
    )
    nodes: int | None = field(
        default=None,
        metadata=doc(
            "Number of nodes that train, equivalent to `runner.nnodes`; the job requests "
            "`runner.spares` in addition. With a hostfile, the job is "
            "submitted to exactly its hosts, in the order of the hostfile; their names must be "
            "Slurm node names. Otherwise Slurm chooses the nodes and their order.",
            minimum=1,
            maximum=MAX_NODES,
        ),
    )
    gpus_per_node: str | None = field(
        default=None,
        metadata=doc(
            "GPUs per node, as in sbatch's `--gpus-per-node`: `8` or `h100:8`. If "
            "`nproc_per_node` is not set, training starts one rank per GPU, and a command runs "
            "once per node."
        ),
    )
    cpus_per_task: int | None = field(
        default=None,
        metadata=doc(
            "CPUs per node, because all ranks of a node are one Slurm task. Default: all CPUs of "
            "an exclusive node (`exclusive`), one CPU of a shared node.",
            minimum=1,
        ),
    )
    mem: str | None = field(
        default=None,
        metadata=doc(
            "Memory per node, as in sbatch's `--mem`. `0` requests all memory of the node."
        ),
    )
    exclusive: bool = field(
        default=True,
        metadata=doc("Whether the nodes are allocated exclusively, without other jobs."),
    )
    constraint: str | None = field(
        default=None, metadata=doc("Features that nodes must have, such as `a100&nvlink`.")
    )
    reservation: str | None = field(default=None, metadata=doc("Reservation to use."))
    dependency: str | None = field(
        default=None,
        metadata=doc(
            "Condition for the start of the job, as in sbatch's `--dependency`: `afterok:1234`. "
            "The job is cancelled if the condition can no longer be met."
        ),
    )
    requeue: int = field(
        default=0,
        metadata=doc(
            "How often Slurm may restart the job: after a preemption, at its time limit, after the "
            "loss of a node without which it cannot go on, or when it is requeued by hand. The job "
            "continues from its last checkpoint, as the same run. "
            "A job that fails by itself is not requeued; use `max_restarts` for that.",
            minimum=0,
        ),
    )
    by_type: Mapping[str, SlurmType] = field(default_factory=dict)
    """``device_type_specific``: requests per device type, in one heterogeneous job."""
    container: Container | None = None
    """Container of the nodes: ``experiment.runner.slurm.container``."""
    extra: Mapping[str, str | None] = field(default_factory=dict)
    """Additional options of sbatch by their long names; None is an option without a value."""


REFUSED_SBATCH_OPTIONS = {
    "job_name": "it consists of `experiment.exp_name` and the run id, by which the run is found",
    "nodes": "it is a key of `slurm`, or `experiment.runner.nnodes`",
    "nodelist": "give a hostfile: `experiment.runner.hostfile`",
    "nodefile": "give a hostfile: `experiment.runner.hostfile`",
    "gpus": "give `gpus_per_node`: every node has the same number",
    "gpus_per_task": "give `gpus_per_node`: a node's ranks are one Slurm task",
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
    "signal": "its time is derived from `experiment.runner.stop_grace`",
    "output": "`action=logs` shows it; it is written below `experiment.exp_dir`",
    "error": "`action=logs` shows it; it is written below `experiment.exp_dir`",
    "input": "a background job has no input",
    "open_mode": "output is always appended",
    "chdir": "the ranks run in the directory in which the launcher is started",
    "export": "set the variables of the ranks in `experiment.envs`",
    "export_file": "set the variables of the ranks in `experiment.envs`",
    "get_user_env": "read a profile in `experiment.cmds.before_start`",
    "container_image": "give `container`: `{runtime: pyxis, image: ...}`",
    "container_mounts": "give `container`: its `mounts`",
    "container_workdir": "give `container`: its `workdir`",
    "array": "a run is one job",
    "wrap": "the launcher writes the script",
    "test_only": "`action=check` does this",
    "wait": "`experiment.runner.foreground: true` waits until the run ends",
    "parsable": "the launcher reads the job id from sbatch's output",
    "quiet": "the launcher reads the job id from sbatch's output",
    "kill_on_invalid_dep": "it is always `yes`",
    "no_kill": "`experiment.runner.on_bad_host` decides whether a job goes on without a node",
    "wait_all_nodes": "it is always 1",
    "clusters": "a run is on the cluster of the machine it is started from",
    "help": "`sbatch --help` prints it",
    "version": "`sbatch --version` prints it",
    "usage": "`sbatch --usage` prints it",
}
"""Options of sbatch that ``extra`` cannot set, with the replacement of each."""

EXTRA_SBATCH_OPTIONS = (
    "acctg_freq",
    "batch",
    "bb",
    "bbf",
    "begin",
    "burst_buffer",
    "cluster_constraint",
    "comment",
    "consolidate_segments",
    "container",
    "container_id",
    "contiguous",
    "core_spec",
    "cores_per_socket",
    "cpu_freq",
    "cpus_per_gpu",
    "deadline",
    "delay_boot",
    "distribution",
    "exclude",
    "exclusive_topo",
    "external_launcher",
    "extra",
    "extra_node_info",
    "gid",
    "gpu_bind",
    "gpu_freq",
    "gres",
    "gres_flags",
    "hint",
    "hold",
    "ignore_pbs",
    "immediate",
    "licenses",
    "mail_type",
    "mail_user",
    "mcs_label",
    "mem_bind",
    "mem_per_cpu",
    "mem_per_gpu",
    "network",
    "nice",
    "oom_kill_step",
    "power",
    "prefer",
    "priority",
    "profile",
    "propagate",
    "reboot",
    "resv_ports",
    "segment",
    "share",
    "sockets_per_node",
    "spread_job",
    "stepmgr",
    "switches",
    "thread_spec",
    "threads_per_core",
    "time_min",
    "tmp",
    "tres_bind",
    "tres_per_task",
    "uid",
    "umask",
    "use_min_nodes",
    "verbose",
    "wckey",
    "x11",
)
"""Options of sbatch up to Slurm 25.05 that ``extra`` can set, in addition to newer ones."""

_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")


def parse_time_limit(time: str) -> int | None:
    """Convert a Slurm time limit to seconds; None means no limit, as 0 does.

    Accepts ``minutes``, ``minutes:seconds``, ``h:m:s``, ``d-h``, ``d-h:m`` and ``d-h:m:s``.

    Raises:
        ValueError: for any other text.
    """
    if time.lower() in ("infinite", "unlimited", "-1"):
        return None
    match = _TIME.fullmatch(time)
    if match is None:
        raise ValueError(time)
    days, *parts = match.groups()
    numbers = [int(number) for number in parts if number is not None]
    if days is not None:
        hours, minutes, remainder = (*numbers, 0, 0)[:3]
    elif len(numbers) == 3:
        hours, minutes, remainder = numbers
    else:
        hours, minutes, remainder = (0, *numbers, 0)[:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + remainder or None
