"""Where the meshes of heterogeneous training lie: hosts in the meshes' order, and what a plan says
of it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol, TypeVar

from flagscale.config.arguments import shares
from flagscale.config.arguments.meshes import MESHES, Meshes, Stage, meshes_of
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
    place = {name: index for index, name in reversed(list(enumerate(types))) if name}
    return tuple(sorted(hosts, key=lambda host: place.get(host.device_type or "", len(place))))


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
        first, each = 0, args["tensor_model_parallel_size"] * args["context_parallel_size"]
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
    parts, found = list(_parts(args, meshes)), []
    for part in parts:
        for host in hosts:
            wrong = part.device_type and host.device_type != part.device_type
            if wrong and _overlap(part.ranks, host.ranks):
                there = sum(len(h.ranks) for h in hosts if h.device_type == part.device_type)
                wanted = sum(len(p.ranks) for p in parts if p.device_type == part.device_type)
                kind = f"type={host.device_type}" if host.device_type else "no type="
                message = (
                    f"{part.text} of {part.device_type} takes ranks {_text(part.ranks)}, of which "
                    f"{_text(_overlap(part.ranks, host.ranks))} are on {host.name} ({kind}): hosts "
                    f"of type {part.device_type} have {there} ranks, {wanted} are wanted"
                )
                found.append(args.problem(_KEY if args[_KEY] else MESHES, message))
                break
    return found


def notes(experiment: Experiment, hosts: Sequence[Placed]) -> Iterator[str]:
    """The meshes, drawn: a line a stage."""
    args, meshes = _meshes(experiment)
    if experiment.task.external:
        return
    if shares.is_on(args.values()):
        yield from _shared(args, hosts)
    if meshes is None:
        return
    if args["hetero_current_device_type"]:
        yield "hetero_current_device_type: the hostfile's type= says it; no effect"
    micro_batches = (args["global_batch_size"] or meshes.sequences) // meshes.sequences
    yield f"{len(meshes.meshes)} meshes, a pipeline of {len(meshes.stages)} stages; a step is " + (
        f"{micro_batches} micro-batches of {meshes.sequences} sequences"
    )
    for stage in meshes.stages:
        yield _drawn(meshes, stage, hosts)


def _shared(args: Arguments, hosts: Sequence[Placed]) -> Iterator[str]:
    """What unlike replicas take of a step: a line for those that take as much one after another."""
    each = args["tensor_model_parallel_size"] * args["context_parallel_size"]
    replicas = sum(len(host.ranks) for host in hosts) // each
    taken = shares.shares_of(args.values(), replicas)
    yield f"unlike replicas share the {taken[-1].stop} sequences of a step, by tokens"
    for (size, count), group in groupby(taken, key=lambda share: (share.size, share.count)):
        number = len(list(group))
        yield (
            f"{number} replica{'s' * (number > 1)}: {count} micro-batch{'es' * (count > 1)} of "
            f"{size} sequence{'s' * (size > 1)} each"
        )


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
