"""Placement of heterogeneous ranks on hosts: order of the hosts, checks, and the notes of a plan.

Heterogeneous training assigns ranks to device types (``type=`` of the hostfile) in one of two ways:
meshes (pipeline stages with sizes of their own) or data-parallel replicas that split a batch
unevenly (``hetero_mode: dp``). Functions here are pure and take the hosts of a plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Protocol, TypeVar

from flagscale.config.arguments.hetero.meshes import AUTO, Meshes, Stage, are_automatic, meshes_of
from flagscale.config.arguments.hetero.microbatch_split import (
    MEASURED_STEPS,
    is_split_measured,
    replica_ranks,
    shares_of,
    uses_microbatch_split,
)
from flagscale.config.arguments.layout import check_world_size, describe_rank_ranges
from flagscale.config.arguments.spec.argument import Values
from flagscale.config.arguments.spec.system_arguments import MESHES, SPLIT_COUNTS, SPLIT_SIZES
from flagscale.config.arguments.spec.train_arguments import TrainArguments
from flagscale.config.schema import Experiment
from flagscale.errors import Problem

_DEVICE_TYPES = "hetero_device_types"


class TypedHost(Protocol):
    """A host with the attributes that its place in a mesh depends on."""

    @property
    def device_type(self) -> str | None: ...
    @property
    def name(self) -> str: ...


class PlacedHost(TypedHost, Protocol):
    """A host with its ranks."""

    @property
    def ranks(self) -> range: ...


_Host = TypeVar("_Host", bound=TypedHost)


def _parse_meshes(values: Values) -> Meshes | None:
    try:
        return meshes_of(values)
    except ValueError:
        return None  # reported by the rules of the meshes


def order_by_mesh(experiment: Experiment, hosts: Sequence[_Host]) -> tuple[_Host, ...]:
    """Return the hosts sorted by the order in which the meshes name their device types. The order
    within a type is kept.
    """
    args = experiment.train
    meshes = _parse_meshes(args.values)
    types = [mesh.device_type for mesh in meshes.meshes] if meshes else []
    if uses_microbatch_split(args.values):
        types = list(args["hetero_device_types"] or ())
    elif are_automatic(args.values):
        types = list(args["hetero_device_types"] or [host.device_type for host in hosts])
    type_index = {name: index for index, name in reversed(list(enumerate(types))) if name}
    return tuple(
        sorted(hosts, key=lambda host: type_index.get(host.device_type or "", len(type_index)))
    )


def fill_automatic_meshes(args: TrainArguments, hosts: Sequence[PlacedHost]) -> TrainArguments:
    """Replace ``hetero_process_meshes: auto`` by one mesh per device type, with as many ranks as
    its hosts have. ``hosts`` must be in the order of :func:`order_by_mesh`.
    """
    if not are_automatic(args.values):
        return args
    mesh_texts = _automatic_meshes(hosts)
    # The device types are part of the texts, so the argument that names them is removed.
    return TrainArguments(
        tuple(
            replace(argument, value=mesh_texts, converted=mesh_texts, canonical=mesh_texts)
            if argument.argument == MESHES
            else argument
            for argument in args.without(_DEVICE_TYPES).entries
        )
    )


def _automatic_meshes(hosts: Sequence[PlacedHost]) -> list[str]:
    """Return the description of one mesh per device type, in the order of the hosts."""
    return [
        f"device_type={kind},ranks={sum(len(host.ranks) for host in type_hosts)}"
        for kind, type_hosts in groupby(hosts, key=lambda host: host.device_type)
    ]


@dataclass(frozen=True)
class _RankGroup:
    """Consecutive ranks that must be on hosts of one device type."""

    description: str
    device_type: str | None
    ranks: range


def _rank_groups(args: TrainArguments, meshes: Meshes | None) -> Iterator[_RankGroup]:
    if meshes is not None:
        for index, mesh in enumerate(meshes.meshes):
            first = meshes.first_rank(index)
            description = f"mesh {index} ({mesh.format_sizes()})"
            yield _RankGroup(description, mesh.device_type, range(first, first + mesh.ranks))
    elif uses_microbatch_split(args.values) and args["hetero_device_types"]:
        first, replica_size = 0, replica_ranks(args.values)
        replica_counts = args[SPLIT_SIZES][::2]
        for count, kind in zip(replica_counts, args["hetero_device_types"], strict=False):
            description = f"{count} replica{'s' * (count > 1)}"
            yield _RankGroup(description, kind, range(first, first + count * replica_size))
            first += count * replica_size


def check_placement(experiment: Experiment, hosts: Sequence[PlacedHost]) -> list[Problem]:
    """Return the problems of ranks on hosts of another device type than their mesh requires."""
    args = experiment.train
    meshes = _parse_meshes(args.values)
    if experiment.task.external:
        return []
    if are_automatic(args.values):
        return list(_check_automatic_meshes(args, hosts))
    groups, problems = list(_rank_groups(args, meshes)), []
    for group in groups:
        for host in hosts:
            is_mismatch = group.device_type and host.device_type != group.device_type
            if is_mismatch and _intersect(group.ranks, host.ranks):
                available = sum(len(h.ranks) for h in hosts if h.device_type == group.device_type)
                required = sum(
                    len(other_group.ranks)
                    for other_group in groups
                    if other_group.device_type == group.device_type
                )
                host_type = f"type={host.device_type}" if host.device_type else "no type="
                misplaced = _intersect(group.ranks, host.ranks)
                message = (
                    f"{group.description} of {group.device_type}: of ranks "
                    f"{_rank_range_text(group.ranks)}, {_rank_range_text(misplaced)} are on "
                    f"{host.name} ({host_type}); hosts of type {group.device_type} have "
                    f"{available} ranks, {required} are required"
                )
                problems.append(
                    args.problem(_DEVICE_TYPES if args[_DEVICE_TYPES] else MESHES, message)
                )
                break
    return problems


def describe_host_contents(experiment: Experiment, ranks: Sequence[range]) -> list[str]:
    """Describe which part of the model each host holds, for messages.

    Args:
        experiment: The experiment.
        ranks: Ranks of each host.

    Returns:
        One text per host; empty for homogeneous ranks, external programs and invalid layouts.
    """
    values = experiment.train.values
    world_size = sum(map(len, ranks))
    is_heterogeneous = values["enable_hetero"] and not experiment.task.external
    if not is_heterogeneous or check_world_size(values, world_size):
        return []
    return describe_rank_ranges(values, ranks, world_size)


def device_types_of_replicas(values: Values, hosts: Sequence[PlacedHost]) -> list[str | None]:
    """Return the device type of each replica: the ``type=`` of its hosts, or None if they have none
    or several. Empty if the replicas are homogeneous.
    """
    if not uses_microbatch_split(values):
        return []
    replica_size, device_types = replica_ranks(values), list[str | None]()
    for first in range(0, sum(len(host.ranks) for host in hosts), replica_size):
        ranks = range(first, first + replica_size)
        types = {host.device_type for host in hosts if _intersect(ranks, host.ranks)}
        device_types.append(types.pop() if len(types) == 1 else None)
    return device_types


def _check_automatic_meshes(args: TrainArguments, hosts: Sequence[PlacedHost]) -> Iterator[Problem]:
    """Yield the reasons why automatic meshes cannot be made of these hosts."""
    if untyped := [host.name for host in hosts if not host.device_type]:
        message = f"auto makes one mesh per type= of the hostfile, and {untyped[0]} has no type"
        yield args.problem(MESHES, message)
    elif len({host.device_type for host in hosts}) < 2:
        message = (
            "auto makes one mesh per type= of the hostfile, and all hosts have type="
            f"{hosts[0].device_type}"
        )
        yield args.problem(MESHES, f"{message}; leave enable_hetero out")


def placement_notes(experiment: Experiment, hosts: Sequence[PlacedHost]) -> Iterator[str]:
    """Yield the notes of a plan about heterogeneous ranks: one line per stage of the meshes, or the
    split of a batch among replicas.
    """
    args = experiment.train
    meshes = _parse_meshes(args.values)
    if experiment.task.external:
        return
    if uses_microbatch_split(args.values):
        yield from _describe_split(args, hosts)
    if are_automatic(args.values):
        mesh_texts = _automatic_meshes(hosts)
        yield (
            f"one mesh per device type, {' and '.join(mesh_texts)}: training measures the devices "
            "and chooses the parallel sizes"
        )
    if meshes is None:
        return
    micro_batches = (args["global_batch_size"] or meshes.sequences) // meshes.sequences
    yield f"{len(meshes.meshes)} meshes, a pipeline of {len(meshes.stages)} stages; a step is " + (
        f"{micro_batches} micro-batches of {meshes.sequences} sequences"
    )
    for stage in meshes.stages:
        yield _describe_stage(meshes, stage, hosts)


def _describe_split(args: TrainArguments, hosts: Sequence[PlacedHost]) -> Iterator[str]:
    """Yield a line about the split of a batch, and one per group of consecutive replicas with equal
    shares.
    """
    replica_size = replica_ranks(args.values)
    replicas = sum(len(host.ranks) for host in hosts) // replica_size
    shares = shares_of(args.values, replicas)
    yield (
        f"heterogeneous replicas split the {shares[-1].stop} sequences of a step; gradients are "
        "weighted by tokens"
    )
    if is_split_measured(args.values):
        yield (
            f"{SPLIT_COUNTS}: {AUTO}: until the replicas' speeds have been measured for "
            f"{MEASURED_STEPS} steps, counts are as even as the batch allows"
        )
    first_replica = 0
    for (size, count), group in groupby(shares, key=lambda share: (share.size, share.count)):
        replica_count = len(list(group))
        ranks = range(first_replica * replica_size, (first_replica + replica_count) * replica_size)
        yield (
            f"{replica_count} replica{'s' * (replica_count > 1)}, ranks "
            f"{_rank_range_text(ranks)}: {count} micro-batch{'es' * (count > 1)} of {size} "
            f"sequence{'s' * (size > 1)} each"
        )
        first_replica += replica_count


def _describe_stage(meshes: Meshes, stage: Stage, hosts: Sequence[PlacedHost]) -> str:
    mesh = stage.mesh
    extra_parts = ["embedding"] * (stage.index == 0) + ["loss"] * (stage is meshes.stages[-1])
    rank_locations = [
        f"ranks {_rank_range_text(common)} on {host.name}"
        for host in hosts
        if (common := _intersect(stage.ranks, host.ranks))
    ]
    if len(rank_locations) > 4:
        rank_locations = [
            *rank_locations[:2],
            f"… {len(rank_locations) - 3} more hosts",
            rank_locations[-1],
        ]
    sizes = sorted({len(meshes.sequences_of(mesh, d)) for d in range(mesh.dp)})
    sequences = "-".join(map(str, sizes))
    layers = f"{stage.layers} layer{'s' * (stage.layers != 1)}"
    return (
        f"stage {stage.index}: mesh {stage.mesh_index} ({mesh.format()}), "
        f"{' + '.join([layers, *extra_parts])}, {', '.join(rank_locations)}, "
        f"{sequences} sequence(s) per rank"
    )


def _intersect(a: range, b: range) -> range:
    return range(max(a.start, b.start), min(a.stop, b.stop))


def _rank_range_text(ranks: range) -> str:
    return str(ranks.start) if len(ranks) == 1 else f"{ranks.start}-{ranks.stop - 1}"
