"""Placement of heterogeneous meshes: hosts in the order of the meshes, and the notes of a plan.
Pure."""

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
from flagscale.config.arguments.spec.train_arguments import GivenArgument, TrainArguments
from flagscale.config.schema import Experiment
from flagscale.errors import Problem

_DEVICE_TYPES = "hetero_device_types"


class TypedHost(Protocol):
    """A host, as far as meshes are concerned."""

    @property
    def device_type(self) -> str | None: ...
    @property
    def name(self) -> str: ...


class PlacedHost(TypedHost, Protocol):
    """A host with its ranks."""

    @property
    def ranks(self) -> range: ...


_Host = TypeVar("_Host", bound=TypedHost)


def _parse_meshes(experiment: Experiment) -> tuple[TrainArguments, Meshes | None]:
    args = experiment.train
    try:
        return args, meshes_of(args.values)
    except ValueError:
        return args, None  # the rules say what is wrong


def order_by_mesh(experiment: Experiment, hosts: Sequence[_Host]) -> tuple[_Host, ...]:
    """The hosts, those of the first mesh's device type first, each type's in their own order."""
    args, meshes = _parse_meshes(experiment)
    types = [mesh.device_type for mesh in meshes.meshes] if meshes else []
    if uses_microbatch_split(args.values):
        types = list(args["hetero_device_types"] or ())
    elif are_automatic(args.values):
        types = list(args["hetero_device_types"] or [host.device_type for host in hosts])
    place = {name: index for index, name in reversed(list(enumerate(types))) if name}
    return tuple(sorted(hosts, key=lambda host: place.get(host.device_type or "", len(place))))


def fill_automatic_meshes(args: TrainArguments, hosts: Sequence[PlacedHost]) -> TrainArguments:
    """The arguments in which ``hetero_process_meshes: auto`` is a mesh of each device type, with as
    many ranks as its hosts have, which then lie in the meshes' order."""
    if not any(map(_is_auto, args)):
        return args
    words = _mesh_words_of_types(hosts)
    # The words say the device types.
    return TrainArguments(
        tuple(
            replace(argument, value=words, converted=words, canonical=words)
            if _is_auto(argument)
            else argument
            for argument in args.without(_DEVICE_TYPES).entries
        )
    )


def _mesh_words_of_types(hosts: Sequence[PlacedHost]) -> list[str]:
    """A mesh of each device type, in the order of hosts."""
    return [
        f"device_type={kind},ranks={sum(len(host.ranks) for host in alike)}"
        for kind, alike in groupby(hosts, key=lambda host: host.device_type)
    ]


def _is_auto(argument: GivenArgument) -> bool:
    return argument.name == MESHES and argument.value in (AUTO, [AUTO], (AUTO,))


@dataclass(frozen=True)
class _RankGroup:
    """Ranks that want hosts of one type."""

    text: str
    device_type: str | None
    ranks: range


def _rank_groups(args: TrainArguments, meshes: Meshes | None) -> Iterator[_RankGroup]:
    if meshes is not None:
        for index, mesh in enumerate(meshes.meshes):
            first = meshes.first_rank(index)
            text = f"mesh {index} ({mesh.text()})"
            yield _RankGroup(text, mesh.device_type, range(first, first + mesh.ranks))
    elif uses_microbatch_split(args.values) and args["hetero_device_types"]:
        first, each = 0, replica_ranks(args.values)
        counts = args[SPLIT_SIZES][::2]
        for count, kind in zip(counts, args["hetero_device_types"], strict=False):
            text = f"{count} replica{'s' * (count > 1)}"
            yield _RankGroup(text, kind, range(first, first + count * each))
            first += count * each


def check_placement(experiment: Experiment, hosts: Sequence[PlacedHost]) -> list[Problem]:
    """Ranks that would lie on hosts of another type than their mesh's."""
    args, meshes = _parse_meshes(experiment)
    if experiment.task.external:
        return []
    if are_automatic(args.values):
        return list(_check_automatic_meshes(args, hosts))
    parts, problems = list(_rank_groups(args, meshes)), []
    for part in parts:
        for host in hosts:
            wrong = part.device_type and host.device_type != part.device_type
            if wrong and _intersect(part.ranks, host.ranks):
                there = sum(len(h.ranks) for h in hosts if h.device_type == part.device_type)
                expected = sum(len(p.ranks) for p in parts if p.device_type == part.device_type)
                kind = f"type={host.device_type}" if host.device_type else "no type="
                message = (
                    f"{part.text} of {part.device_type}: of ranks {_rank_range_text(part.ranks)}, "
                    f"{_rank_range_text(_intersect(part.ranks, host.ranks))} are on {host.name} "
                    f"({kind}); hosts "
                    f"of type {part.device_type} have {there} ranks, {expected} are wanted"
                )
                problems.append(
                    args.problem(_DEVICE_TYPES if args[_DEVICE_TYPES] else MESHES, message)
                )
                break
    return problems


def describe_places(experiment: Experiment, ranks: Sequence[range]) -> list[str]:
    """Describe the part of the model on each host, by its ranks, for messages; empty for
    homogeneous ranks, external programs and invalid layouts."""
    values = experiment.train.values
    world_size = sum(map(len, ranks))
    unlike = values["enable_hetero"] and not experiment.task.external
    if not unlike or check_world_size(values, world_size):
        return []
    return describe_rank_ranges(values, ranks, world_size)


def device_types_of_replicas(values: Values, hosts: Sequence[PlacedHost]) -> list[str | None]:
    """The ``type=`` of the hosts that each of unlike replicas lies on, None where they have none or
    several; empty where replicas are alike."""
    if not uses_microbatch_split(values):
        return []
    each, kinds = replica_ranks(values), list[str | None]()
    for first in range(0, sum(len(host.ranks) for host in hosts), each):
        ranks = range(first, first + each)
        types = {host.device_type for host in hosts if _intersect(ranks, host.ranks)}
        kinds.append(types.pop() if len(types) == 1 else None)
    return kinds


def _check_automatic_meshes(args: TrainArguments, hosts: Sequence[PlacedHost]) -> Iterator[Problem]:
    """Why hosts make no meshes by themselves."""
    if unknown := [host.name for host in hosts if not host.device_type]:
        message = f"auto makes a mesh of each type= of the hostfile, and {unknown[0]} has none"
        yield args.problem(MESHES, message)
    elif len({host.device_type for host in hosts}) < 2:
        message = f"auto makes a mesh of each type= of the hostfile: all are {hosts[0].device_type}"
        yield args.problem(MESHES, f"{message}; leave enable_hetero out")


def placement_notes(experiment: Experiment, hosts: Sequence[PlacedHost]) -> Iterator[str]:
    """The meshes, drawn: a line a stage."""
    args, meshes = _parse_meshes(experiment)
    if experiment.task.external:
        return
    if uses_microbatch_split(args.values):
        yield from _describe_split(args, hosts)
    if are_automatic(args.values):
        words = _mesh_words_of_types(hosts)
        yield f"a mesh of each type, {' and '.join(words)}: training measures, and chooses sizes"
    if meshes is None:
        return
    micro_batches = (args["global_batch_size"] or meshes.sequences) // meshes.sequences
    yield f"{len(meshes.meshes)} meshes, a pipeline of {len(meshes.stages)} stages; a step is " + (
        f"{micro_batches} micro-batches of {meshes.sequences} sequences"
    )
    for stage in meshes.stages:
        yield _describe_stage(meshes, stage, hosts)


def _describe_split(args: TrainArguments, hosts: Sequence[PlacedHost]) -> Iterator[str]:
    """Describe the shares of heterogeneous replicas, one line per group of equal ones."""
    each = replica_ranks(args.values)
    replicas = sum(len(host.ranks) for host in hosts) // each
    shares = shares_of(args.values, replicas)
    yield f"unlike replicas share the {shares[-1].stop} sequences of a step, by tokens"
    if is_split_measured(args.values):
        yield (
            f"{SPLIT_COUNTS}: {AUTO}: until {MEASURED_STEPS} steps have shown how "
            "fast each replica is, counts are as even as the batch allows"
        )
    first = 0
    for (size, count), group in groupby(shares, key=lambda share: (share.size, share.count)):
        number = len(list(group))
        ranks = range(first * each, (first + number) * each)
        yield (
            f"{number} replica{'s' * (number > 1)}, ranks {_rank_range_text(ranks)}: {count} "
            f"micro-batch{'es' * (count > 1)} of {size} sequence{'s' * (size > 1)} each"
        )
        first += number


def _describe_stage(meshes: Meshes, stage: Stage, hosts: Sequence[PlacedHost]) -> str:
    mesh = stage.mesh
    ends = ["embedding"] * (stage.index == 0) + ["loss"] * (stage is meshes.stages[-1])
    where = [
        f"ranks {_rank_range_text(common)} on {host.name}"
        for host in hosts
        if (common := _intersect(stage.ranks, host.ranks))
    ]
    if len(where) > 4:
        where = [*where[:2], f"… {len(where) - 3} more hosts", where[-1]]
    sizes = sorted({len(meshes.sequences_of(mesh, d)) for d in range(mesh.dp)})
    each = "-".join(map(str, sizes))
    layers = f"{stage.layers} layer{'s' * (stage.layers != 1)}"
    return (
        f"stage {stage.index}: mesh {stage.mesh_index} ({mesh.named()}), "
        f"{' + '.join([layers, *ends])}, {', '.join(where)}, {each} sequence(s) a rank"
    )


def _intersect(a: range, b: range) -> range:
    return range(max(a.start, b.start), min(a.stop, b.stop))


def _rank_range_text(ranks: range) -> str:
    return str(ranks.start) if len(ranks) == 1 else f"{ranks.start}-{ranks.stop - 1}"
