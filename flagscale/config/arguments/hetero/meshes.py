"""Meshes: assignment of the model to ranks in pipelines over heterogeneous devices.

A *mesh* is a set of ranks on devices of one type with its own parallel sizes; it holds consecutive
stages of one pipeline, which runs through the meshes in order. Ranks are numbered mesh by mesh, and
within a mesh as Megatron-LM numbers them: tensor-parallel ranks fastest, then context, data and
pipeline. A mesh is *open* if only its number of ranks is given, and its sizes are chosen by
measurement before training starts.

The launcher orders hosts by the meshes, and the ranks build process groups from them. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any

from flagscale.config.arguments.hetero.microbatch_split import (
    format_index_range,
    uses_microbatch_split,
)
from flagscale.config.arguments.spec.argument import Values, Violation
from flagscale.config.arguments.spec.system_arguments import (
    LAYER_SPLIT,
    MESHES,
    SPLIT_COUNTS,
    SPLIT_SIZES,
)

AUTO = "auto"
_MESH_SIZES = ("tp", "cp", "ep", "dp", "pp")
_MESH_WORDS = (*_MESH_SIZES, "etp", "layers", "device_type", "ranks")
_MESH_NUMBER = re.compile(r"[0-9]{1,6}")


@dataclass(frozen=True)
class Mesh:
    """Parallel sizes of the ranks of one mesh."""

    tp: int = 1
    """Tensor-parallel size."""
    cp: int = 1
    """Context-parallel size."""
    ep: int = 1
    """Expert-parallel size."""
    dp: int = 1
    """Data-parallel size; for an open mesh, the number of ranks."""
    pp: int = 1
    """Pipeline stages in the mesh."""
    etp: int | None = None
    """Tensor-parallel size of experts; None: ``tp``."""
    layers: tuple[int, ...] | None = None
    """Layers of each stage; None if they are not given."""
    device_type: str | None = None
    open: bool = False
    """True if the sizes are still to be chosen."""

    @property
    def stage_ranks(self) -> int:
        """Number of ranks of one stage."""
        return self.tp * self.cp * self.dp

    @property
    def ranks(self) -> int:
        """Number of ranks of the mesh."""
        return self.stage_ranks * self.pp

    @property
    def expert_tp(self) -> int:
        """Tensor-parallel size of experts."""
        return self.tp if self.etp is None else self.etp

    def format_sizes(self) -> str:
        """Format the sizes above 1: ``tp2 dp4``; ``1 rank`` if every size is 1."""
        if self.open:
            return f"{self.ranks} ranks"
        sizes = {**{name: getattr(self, name) for name in _MESH_SIZES}, "etp": self.etp or 1}
        return " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "1 rank"

    def format(self) -> str:
        """Format device type, if known, and sizes: ``A800 tp2 dp4``."""
        return (
            f"{self.device_type} {self.format_sizes()}" if self.device_type else self.format_sizes()
        )


@dataclass(frozen=True)
class Stage:
    """A stage of the pipeline over all meshes."""

    index: int
    """Index in the whole pipeline."""
    mesh_index: int
    mesh: Mesh
    first_rank: int
    layers: int
    """Number of layers over all model chunks of the stage."""

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.mesh.stage_ranks)

    def rank_at(self, d: int, c: int, t: int) -> int:
        """Return the rank at a data-, context- and tensor-parallel position."""
        return self.first_rank + t + self.mesh.tp * (c + self.mesh.cp * d)

    def position_of(self, rank: int) -> tuple[int, int, int]:
        """Return the data-, context- and tensor-parallel position of a rank of the stage."""
        remaining, t = divmod(rank - self.first_rank, self.mesh.tp)
        d, c = divmod(remaining, self.mesh.cp)
        return d, c, t


@dataclass(frozen=True)
class Meshes:
    """All meshes of a job, in pipeline order, with the layers of every stage."""

    meshes: tuple[Mesh, ...]
    sequences: int
    """Sequences per micro-batch over all data-parallel ranks."""
    chunks: int = 1
    """Model chunks per stage (interleaved schedule), over which its layers are divided."""
    sequence_parallel: bool = False
    """True if sequence parallelism is on in every mesh with tensor-parallel ranks."""
    eager: bool = False
    """True if each stage runs up to twice as many forward passes ahead as there are later stages
    (``hetero_eager_1f1b``)."""
    mtp_layers: int = 0
    """Layers of multi-token prediction, which are in the stage of the loss."""

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        stages: list[Stage] = []
        first = 0
        for index, mesh in enumerate(self.meshes):
            for layers in mesh.layers or (0,) * mesh.pp:
                stages.append(Stage(len(stages), index, mesh, first, layers))
                first += mesh.stage_ranks
        return tuple(stages)

    @property
    def open(self) -> bool:
        """True if the sizes of any mesh are still to be chosen."""
        return any(mesh.open for mesh in self.meshes)

    @property
    def world_size(self) -> int:
        return sum(mesh.ranks for mesh in self.meshes)

    def first_rank(self, mesh_index: int) -> int:
        return sum(mesh.ranks for mesh in self.meshes[:mesh_index])

    def stage_of(self, rank: int) -> Stage:
        return next(stage for stage in self.stages if rank in stage.ranks)

    def describe_stages(self, ranks: range) -> str:
        """Describe the stages on a range of ranks: ``stage 1 of 2, mesh 1 (A100 dp2)``, ``stages
        0-1 of 3, mesh 0 (tp2 pp2) and stage 2 of 3, mesh 1 (1 rank)``."""
        overlapping = [
            s for s in self.stages if s.ranks.start < ranks.stop and ranks.start < s.ranks.stop
        ]
        if self.open:  # the number of stages is not known yet
            return " and ".join(f"mesh {s.mesh_index} ({s.mesh.format()})" for s in overlapping)
        return " and ".join(
            f"{format_index_range('stage', [stage.index for stage in stages])} of "
            f"{len(self.stages)}, mesh {index} ({self.meshes[index].format()})"
            for index, stages in groupby(overlapping, key=lambda stage: stage.mesh_index)
        )

    def sequences_of(self, mesh: Mesh, d: int) -> range:
        """Return the indices of the sequences of a micro-batch that data-parallel rank ``d`` of a
        mesh processes."""
        return range(self.sequences * d // mesh.dp, self.sequences * (d + 1) // mesh.dp)

    def layout(self) -> str:
        """Return the stages as megatron.core's ``pipeline_model_parallel_layout``: E is the
        embedding, t a layer, m a multi-token prediction layer, L the loss."""
        counts = [s.layers // self.chunks for s in self.stages] * self.chunks
        parts = ["t" * count for count in counts]
        parts[0] = "E" + parts[0]
        parts[-1] += "m" * self.mtp_layers + "L"
        return "|".join(parts)

    def describe(self) -> str:
        """Describe all meshes: ``A800 tp2 dp4 (18 layers) + A100 dp2 pp2 (7+7 layers)``.

        Checkpoints store this text.
        """
        texts = []
        for mesh in self.meshes:
            layers = "+".join(map(str, mesh.layers or ()))
            texts.append(f"{mesh.format()} ({layers} layers)")
        return " + ".join(texts)


def uses_meshes(values: Values) -> bool:
    """Return whether training uses heterogeneous meshes; heterogeneous data parallelism
    (``hetero_mode: dp``) does not."""
    return bool(values.get("enable_hetero")) and not uses_microbatch_split(values)


def meshes_of(values: Values) -> Meshes | None:
    """Return the meshes that arguments describe; None without meshes, and for ``auto``, which the
    launcher replaces when the hosts are known.

    Raises:
        ValueError: the meshes are malformed; :func:`check_mesh_syntax` reports the problems.
    """
    if not uses_meshes(values) or are_automatic(values):
        return None
    problems = list(check_mesh_syntax(values))
    if problems:
        raise ValueError("; ".join(f"{name}: {message}" for name, message in problems))
    meshes = _assign_layers(_parse_meshes(values), values)
    sequences = values["micro_batch_size"] * meshes[0].dp
    return Meshes(
        meshes,
        sequences,
        chunks_of(values),
        bool(values["sequence_parallel"]),
        bool(values["hetero_eager_1f1b"]),
        values["mtp_num_layers"] or 0,
    )


def chunks_of(values: Values) -> int:
    """Return the number of model chunks per stage of a mesh."""
    chunks = values["num_virtual_stages_per_pipeline_rank"]
    return int(chunks or values["virtual_pipeline_model_parallel_size"] or 1)


def mesh_view(values: Values, meshes: Meshes, index: int) -> dict[str, Any]:
    """Return the arguments for the ranks of one mesh: with the parallel sizes of the mesh, and the
    pipeline of the whole job. Rules of homogeneous jobs can be applied to them."""
    mesh = meshes.meshes[index]
    return {
        **values,
        "tensor_model_parallel_size": mesh.tp,
        "context_parallel_size": mesh.cp,
        "expert_model_parallel_size": mesh.ep,
        "expert_tensor_parallel_size": mesh.etp,
        "pipeline_model_parallel_size": len(meshes.stages),
        "pipeline_model_parallel_layout": meshes.layout(),
        # The layout determines the layers.
        "num_layers_per_virtual_pipeline_stage": None,
        "num_virtual_stages_per_pipeline_rank": meshes.chunks if meshes.chunks > 1 else None,
        "virtual_pipeline_model_parallel_size": None,
        # Sequence parallelism requires several tensor-parallel ranks.
        "sequence_parallel": values["sequence_parallel"] and mesh.tp > 1,
    }


def check_mesh_syntax(values: Values) -> Iterator[Violation]:
    """Check that arguments describe meshes that can be parsed."""
    mesh_names = [name for name in _MESH_ARGUMENTS if values.get(name) is not None]
    replica_names = [name for name in (SPLIT_SIZES, SPLIT_COUNTS) if values.get(name) is not None]
    if not values.get("enable_hetero"):
        for name in (*mesh_names, *replica_names):
            yield name, "requires enable_hetero: true"
        return
    for name in replica_names:
        yield name, "requires hetero_mode: dp; leave it out"
    sizes = values[MESHES]
    if not sizes:
        yield "enable_hetero", f"requires {MESHES}"
        return
    yield from _check_layer_split(values[LAYER_SPLIT])
    if are_automatic(values):
        return
    if not are_in_words(values):
        yield from _check_mesh_numbers(values, sizes)
        return
    has_layers = any("layers=" in text for text in sizes)
    for name in mesh_names:
        if name != MESHES and (name != LAYER_SPLIT or has_layers):
            yield (
                name,
                f"cannot be combined with the maps of {MESHES}, which have a key for it; leave one "
                "out",
            )
    for index, text in enumerate(sizes):
        for message in _check_mesh_words(text):
            yield MESHES, f"mesh {index}: {message}"
    if len({"ranks=" in text for text in sizes}) > 1:
        yield MESHES, "expected either ranks for all meshes or sizes for all meshes, found both"


def _check_layer_split(split: Sequence[str] | None) -> Iterator[Violation]:
    for layers in () if split is None or is_split_automatic(split) else split:
        if not _MESH_NUMBER.fullmatch(str(layers)):
            yield (
                LAYER_SPLIT,
                f"expected a number of layers for each stage, or auto; found {layers!r}",
            )
            return


def are_automatic(values: Values) -> bool:
    """Return whether the launcher makes one mesh per device type (``hetero_process_meshes:
    auto``)."""
    return tuple(values.get(MESHES) or ()) == (AUTO,)


def is_split_automatic(split: Sequence[str] | None) -> bool:
    """Return whether the layers per stage are chosen by measurement
    (``hetero_pipeline_layer_split: auto``)."""
    return split is not None and tuple(split) == (AUTO,)


def _check_mesh_numbers(values: Values, sizes: Sequence[str]) -> Iterator[Violation]:
    for size in sizes:
        if not _MESH_NUMBER.fullmatch(size) or int(size) < 1:
            yield MESHES, f"expected integers of at least 1, found {size!r}"
            return
    if len(sizes) % len(_MESH_SIZES):
        yield (
            MESHES,
            f"expected five numbers per mesh (tp, cp, ep, dp, pp), found {len(sizes)} numbers",
        )
        return
    count = len(sizes) // len(_MESH_SIZES)
    for name in ("hetero_device_types", "expert_tensor_parallel_size_per_process_mesh"):
        if values[name] is not None and len(values[name]) != count:
            yield name, f"expected one item per mesh ({count}), found {len(values[name])}"


_MESH_ARGUMENTS = (
    MESHES,
    LAYER_SPLIT,
    "hetero_device_types",
    "expert_tensor_parallel_size_per_process_mesh",
)


def are_in_words(values: Values) -> bool:
    """Return whether the meshes are given as maps of sizes (``tp=2,dp=4``), not as numbers."""
    return any("=" in text for text in values[MESHES] or ())


def _parse_meshes(values: Values) -> tuple[Mesh, ...]:
    if are_in_words(values):
        return tuple(_mesh_from_words(text) for text in values[MESHES])
    sizes = [int(size) for size in values[MESHES]]
    count = len(sizes) // len(_MESH_SIZES)
    types = values["hetero_device_types"] or [None] * count
    experts = values["expert_tensor_parallel_size_per_process_mesh"] or [None] * count
    meshes = []
    for i in range(count):
        tp, cp, ep, dp, pp = sizes[len(_MESH_SIZES) * i : len(_MESH_SIZES) * (i + 1)]
        meshes.append(Mesh(tp, cp, ep, dp, pp, experts[i], device_type=types[i]))
    return tuple(meshes)


def _word_pairs(text: str) -> list[tuple[str, str]]:
    return [(key.strip(), value) for key, _, value in (p.partition("=") for p in text.split(","))]


def _check_mesh_words(text: str) -> Iterator[str]:
    pairs = _word_pairs(text)
    for key, value in pairs:
        numbers = value.split("+") if key == "layers" else [value]
        minimum = 0 if key == "layers" else 1
        if key not in _MESH_WORDS:
            yield f"expected keys of {', '.join(_MESH_WORDS)}; found {key!r}"
        elif key == "device_type":
            if not value:
                yield "device_type must not be empty"
        elif not all(_MESH_NUMBER.fullmatch(n) and int(n) >= minimum for n in numbers):
            yield f"{key}: expected an integer of at least {minimum}, found {value!r}"
    keys = {key for key, _ in pairs}
    if "ranks" in keys and keys & {*_MESH_SIZES, "etp", "layers"}:
        yield "ranks cannot be combined with sizes or layers, which it leaves to be chosen"
    if len(keys) < len(pairs):
        yield "a key is given twice"


def _mesh_from_words(text: str) -> Mesh:
    fields: dict[str, Any] = {}
    for key, value in _word_pairs(text):
        if key == "layers":
            fields[key] = tuple(map(int, value.split("+")))
        else:
            fields[key] = value if key == "device_type" else int(value)
    if "ranks" in fields:
        return Mesh(dp=fields["ranks"], device_type=fields.get("device_type"), open=True)
    return Mesh(**fields)


def _assign_layers(meshes: Sequence[Mesh], values: Values) -> tuple[Mesh, ...]:
    """Return the meshes with the number of layers of every stage, given or evenly divided."""
    stages = sum(mesh.pp for mesh in meshes)
    split, has_embedding_stage = values[LAYER_SPLIT], bool(values["standalone_embedding_stage"])
    layer_stages = stages - has_embedding_stage
    if any(mesh.layers is not None for mesh in meshes):
        return tuple(meshes)
    if is_split_automatic(split) or any(mesh.open for mesh in meshes):
        counts = [0] * has_embedding_stage + even_layers(values, layer_stages)
    elif split is None:
        counts = [values["num_layers"] // max(layer_stages, 1)] * layer_stages
    else:
        counts = [int(layers) for layers in split]
    if has_embedding_stage and len(counts) == stages - 1:
        counts = [0, *counts]
    return with_layers(meshes, counts)


def even_layers(values: Values, stages: int) -> list[int]:
    """Divide the layers evenly over stages; the first stages get the remainder."""
    chunks = chunks_of(values)
    quotient, remainder = divmod(values["num_layers"] // chunks, max(stages, 1))
    return [(quotient + (index < remainder)) * chunks for index in range(stages)]


def with_layers(meshes: Sequence[Mesh], layers: Sequence[int]) -> tuple[Mesh, ...]:
    """Return the meshes with a number of layers for each stage of the pipeline."""
    changed, first_stage = [], 0
    for mesh in meshes:
        mesh_layers = tuple(layers[first_stage : first_stage + mesh.pp])
        changed.append(replace(mesh, layers=mesh_layers))
        first_stage += mesh.pp
    return tuple(changed)
