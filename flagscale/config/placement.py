"""Where the meshes of heterogeneous training lie: hosts in the meshes' order, and what a plan says
of it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol, TypeVar

from flagscale.config.arguments import layout, shares
from flagscale.config.arguments.flatten import leaves
from flagscale.config.arguments.meshes import (
    AUTO,
    MESHES,
    Meshes,
    Stage,
    meshes_of,
    to_be_filled,
)
from flagscale.config.arguments.precision import Values
from flagscale.config.checks import Arguments
from flagscale.config.schema import Experiment
from flagscale.errors import Problem

_KEY = "hetero_device_types"


class Typed(Protocol):
    """A host, as far as meshes are concerned."""

    @property
    def device_type(self) -> str | None: ...
    @property
    def name(self) -> str: ...


class Placed(Typed, Protocol):
    """A host with its ranks."""

    @property
    def ranks(self) -> range: ...


_Host = TypeVar("_Host", bound=Typed)


def _meshes(experiment: Experiment) -> tuple[Arguments, Meshes | None]:
    args = Arguments.of(experiment)
    try:
        return args, meshes_of(args.values())
    except ValueError:
        return args, None  # the rules say what is wrong


def by_mesh(experiment: Experiment, hosts: Sequence[_Host]) -> tuple[_Host, ...]:
    """The hosts, those of the first mesh's device type first, each type's in their own order."""
    args, meshes = _meshes(experiment)
    types = [mesh.device_type for mesh in meshes.meshes] if meshes else []
    if shares.is_on(args.values()):
        types = list(args["hetero_device_types"] or ())
    elif to_be_filled(args.values()):
        types = list(args["hetero_device_types"] or [host.device_type for host in hosts])
    place = {name: index for index, name in reversed(list(enumerate(types))) if name}
    return tuple(sorted(hosts, key=lambda host: place.get(host.device_type or "", len(place))))


def written_out(sections: Mapping[str, Any], hosts: Sequence[Placed]) -> Mapping[str, Any]:
    """Sections of arguments in which ``hetero_process_meshes: auto`` is a mesh of each device type,
    with as many ranks as its hosts have, which then lie in the meshes' order."""
    if not any(_is_auto(name, value) for _, name, value in leaves(sections)):
        return sections
    words = [
        f"device_type={kind},ranks={sum(len(host.ranks) for host in alike)}"
        for kind, alike in groupby(hosts, key=lambda host: host.device_type)
    ]

    def filled(section: Mapping[str, Any]) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for key, value in section.items():
            name = str(key).replace("-", "_")
            if isinstance(value, Mapping):
                made[key] = filled(value)
            elif name != _KEY:  # the words say it
                made[key] = words if _is_auto(name, value) else value
        return made

    return filled(sections)


def _is_auto(name: str, value: Any) -> bool:
    return name == MESHES and value in (AUTO, [AUTO], (AUTO,))


@dataclass(frozen=True)
class _Part:
    """Ranks that want hosts of one type."""

    text: str
    device_type: str | None
    ranks: range


def _parts(args: Arguments, meshes: Meshes | None) -> Iterator[_Part]:
    if meshes is not None:
        for index, mesh in enumerate(meshes.meshes):
            first = meshes.first_rank(index)
            text = f"mesh {index} ({mesh.text()})"
            yield _Part(text, mesh.device_type, range(first, first + mesh.ranks))
    elif shares.is_on(args.values()) and args["hetero_device_types"]:
        first, each = 0, shares.replica_ranks(args.values())
        counts = args[shares.SIZES][::2]
        for count, kind in zip(counts, args["hetero_device_types"], strict=False):
            text = f"{count} replica{'s' * (count > 1)}"
            yield _Part(text, kind, range(first, first + count * each))
            first += count * each


def problems(experiment: Experiment, hosts: Sequence[Placed]) -> list[Problem]:
    """Ranks that would lie on hosts of another type than their mesh's."""
    args, meshes = _meshes(experiment)
    if experiment.task.external:
        return []
    if to_be_filled(args.values()):
        return list(_not_of_types(args, hosts))
    parts, found = list(_parts(args, meshes)), []
    for part in parts:
        for host in hosts:
            wrong = part.device_type and host.device_type != part.device_type
            if wrong and _overlap(part.ranks, host.ranks):
                there = sum(len(h.ranks) for h in hosts if h.device_type == part.device_type)
                wanted = sum(len(p.ranks) for p in parts if p.device_type == part.device_type)
                kind = f"type={host.device_type}" if host.device_type else "no type="
                message = (
                    f"{part.text} of {part.device_type}: of ranks {_text(part.ranks)}, "
                    f"{_text(_overlap(part.ranks, host.ranks))} are on {host.name} ({kind}); hosts "
                    f"of type {part.device_type} have {there} ranks, {wanted} are wanted"
                )
                found.append(args.problem(_KEY if args[_KEY] else MESHES, message))
                break
    return found


def places(experiment: Experiment, ranks: Sequence[range]) -> list[str]:
    """What each host holds, by its ranks, for messages; empty where all are alike, or not this
    project's, or no training (the rules say why)."""
    values = Arguments.of(experiment).values()
    world_size = sum(map(len, ranks))
    unlike = values["enable_hetero"] and not experiment.task.external
    if not unlike or layout.broken_world(values, world_size):
        return []
    return layout.places_of(values, ranks, world_size)


def types_of_replicas(values: Values, hosts: Sequence[Placed]) -> list[str | None]:
    """The ``type=`` of the hosts that each of unlike replicas lies on, None where they have none or
    several; empty where replicas are alike."""
    if not shares.is_on(values):
        return []
    each, kinds = shares.replica_ranks(values), list[str | None]()
    for first in range(0, sum(len(host.ranks) for host in hosts), each):
        own = range(first, first + each)
        found = {host.device_type for host in hosts if _overlap(own, host.ranks)}
        kinds.append(found.pop() if len(found) == 1 else None)
    return kinds


def _not_of_types(args: Arguments, hosts: Sequence[Placed]) -> Iterator[Problem]:
    """Why hosts make no meshes by themselves."""
    if unknown := [host.name for host in hosts if not host.device_type]:
        message = f"auto makes a mesh of each type= of the hostfile, and {unknown[0]} has none"
        yield args.problem(MESHES, message)
    elif len({host.device_type for host in hosts}) < 2:
        message = f"auto makes a mesh of each type= of the hostfile: all are {hosts[0].device_type}"
        yield args.problem(MESHES, f"{message}; leave enable_hetero out")


def notes(experiment: Experiment, hosts: Sequence[Placed]) -> Iterator[str]:
    """The meshes, drawn: a line a stage."""
    args, meshes = _meshes(experiment)
    if experiment.task.external:
        return
    if shares.is_on(args.values()):
        yield from _shared(args, hosts)
    if to_be_filled(args.values()):
        words = written_out({MESHES: AUTO}, hosts)[MESHES]
        yield f"a mesh of each type, {' and '.join(words)}: training measures, and chooses sizes"
    if meshes is None:
        return
    micro_batches = (args["global_batch_size"] or meshes.sequences) // meshes.sequences
    yield f"{len(meshes.meshes)} meshes, a pipeline of {len(meshes.stages)} stages; a step is " + (
        f"{micro_batches} micro-batches of {meshes.sequences} sequences"
    )
    for stage in meshes.stages:
        yield _drawn(meshes, stage, hosts)


def _shared(args: Arguments, hosts: Sequence[Placed]) -> Iterator[str]:
    """What unlike replicas take of a step: a line for those that take as much one after another."""
    each = shares.replica_ranks(args.values())
    replicas = sum(len(host.ranks) for host in hosts) // each
    taken = shares.shares_of(args.values(), replicas)
    yield f"unlike replicas share the {taken[-1].stop} sequences of a step, by tokens"
    if shares.are_measured(args.values()):
        yield (
            f"{shares.COUNTS}: {shares.AUTO}: until {shares.MEASURED_STEPS} steps have shown how "
            "fast each replica is, counts are as even as the batch allows"
        )
    first = 0
    for (size, count), group in groupby(taken, key=lambda share: (share.size, share.count)):
        number = len(list(group))
        ranks = range(first * each, (first + number) * each)
        yield (
            f"{number} replica{'s' * (number > 1)}, ranks {_text(ranks)}: {count} "
            f"micro-batch{'es' * (count > 1)} of {size} sequence{'s' * (size > 1)} each"
        )
        first += number


def _drawn(meshes: Meshes, stage: Stage, hosts: Sequence[Placed]) -> str:
    mesh = stage.mesh
    ends = ["embedding"] * (stage.index == 0) + ["loss"] * (stage is meshes.stages[-1])
    where = [
        f"ranks {_text(common)} on {host.name}"
        for host in hosts
        if (common := _overlap(stage.ranks, host.ranks))
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


def _overlap(a: range, b: range) -> range:
    return range(max(a.start, b.start), min(a.stop, b.stop))


def _text(ranks: range) -> str:
    return str(ranks.start) if len(ranks) == 1 else f"{ranks.start}-{ranks.stop - 1}"
