"""Meshes: which ranks hold which part of the model when devices are heterogeneous.

A mesh is a number of ranks with parallel sizes of its own that hold consecutive stages of one
pipeline; the pipeline runs through the meshes in order. Ranks are numbered mesh by mesh, and inside
a mesh as Megatron numbers them: tensor-parallel ranks fastest, then context, data and pipeline.
Pure, no torch: the launcher orders hosts and draws the plan by it, and the ranks build process
groups from it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any

from flagscale.config.arguments.hetero.microbatch_split import number_range, uses_microbatch_split
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
    """Ranks that are laid out alike. ``etp`` is the tensor parallel size of experts; ``layers``
    are those of each of its ``pp`` stages, None where nothing is said; ``open``: the sizes are to
    be chosen, of as many ranks."""

    tp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1
    pp: int = 1
    etp: int | None = None
    layers: tuple[int, ...] | None = None
    device_type: str | None = None
    open: bool = False

    @property
    def stage_ranks(self) -> int:
        """Ranks of one stage."""
        return self.tp * self.cp * self.dp

    @property
    def ranks(self) -> int:
        return self.stage_ranks * self.pp

    @property
    def expert_tp(self) -> int:
        return self.tp if self.etp is None else self.etp

    def text(self) -> str:
        """Such as ``tp2 dp4``; ``1 rank`` where every size is 1."""
        if self.open:
            return f"{self.ranks} ranks"
        named = {**{name: getattr(self, name) for name in _MESH_SIZES}, "etp": self.etp or 1}
        return " ".join(f"{name}{size}" for name, size in named.items() if size > 1) or "1 rank"

    def named(self) -> str:
        """The same behind its device type, where that is given: ``A800 tp2 dp4``."""
        return f"{self.device_type} {self.text()}" if self.device_type else self.text()


@dataclass(frozen=True)
class Stage:
    """A stage of the whole pipeline."""

    index: int
    mesh_index: int
    mesh: Mesh
    first_rank: int
    layers: int

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.mesh.stage_ranks)

    def rank(self, d: int, c: int, t: int) -> int:
        """The rank at these data-, context- and tensor-parallel places."""
        return self.first_rank + t + self.mesh.tp * (c + self.mesh.cp * d)

    def place(self, rank: int) -> tuple[int, int, int]:
        """Data-, context- and tensor-parallel place of one of the stage's ranks."""
        inside, t = divmod(rank - self.first_rank, self.mesh.tp)
        d, c = divmod(inside, self.mesh.cp)
        return d, c, t


@dataclass(frozen=True)
class Meshes:
    """All meshes of a job, in the pipeline's order, every stage's layers known.

    ``sequences`` are those of a micro-batch over all data-parallel ranks; ``chunks`` the model
    chunks that a stage holds (the interleaved schedule's), over which its layers are divided;
    ``sequence_parallel``: it is on in every mesh that has tensor-parallel ranks; ``eager``: stages
    do twice as many forward passes ahead as there are stages after them; ``further``: layers that
    predict further tokens, which lie beside the loss.
    """

    meshes: tuple[Mesh, ...]
    sequences: int
    chunks: int = 1
    sequence_parallel: bool = False
    eager: bool = False
    further: int = 0

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
        """True if the sizes of some mesh are still to be chosen."""
        return any(mesh.open for mesh in self.meshes)

    @property
    def world_size(self) -> int:
        return sum(mesh.ranks for mesh in self.meshes)

    def first_rank(self, mesh_index: int) -> int:
        return sum(mesh.ranks for mesh in self.meshes[:mesh_index])

    def stage_of(self, rank: int) -> Stage:
        return next(stage for stage in self.stages if rank in stage.ranks)

    def place_of(self, ranks: range) -> str:
        """Describe the stages on a range of ranks: ``stage 1 of 2, mesh 1 (A100 dp2)``, ``stages
        0-1 of 3, mesh 0 (tp2 pp2) and stage 2 of 3, mesh 1 (1 rank)``."""
        held = [s for s in self.stages if s.ranks.start < ranks.stop and ranks.start < s.ranks.stop]
        if self.open:  # which stages these are is to be chosen
            return " and ".join(f"mesh {s.mesh_index} ({s.mesh.named()})" for s in held)
        return " and ".join(
            f"{number_range('stage', [stage.index for stage in stages])} of {len(self.stages)}, "
            f"mesh {index} ({self.meshes[index].named()})"
            for index, stages in groupby(held, key=lambda stage: stage.mesh_index)
        )

    def sequences_of(self, mesh: Mesh, d: int) -> range:
        """Return the sequences of a micro-batch that data-parallel rank ``d`` of a mesh
        processes."""
        return range(self.sequences * d // mesh.dp, self.sequences * (d + 1) // mesh.dp)

    def layout(self) -> str:
        """megatron.core's ``pipeline_model_parallel_layout``: E is the embedding, t a layer, m
        one that predicts further tokens, L the loss."""
        counts = [s.layers // self.chunks for s in self.stages] * self.chunks
        parts = ["t" * count for count in counts]
        parts[0] = "E" + parts[0]
        parts[-1] += "m" * self.further + "L"
        return "|".join(parts)

    def describe(self) -> str:
        """Such as ``A800 tp2 dp4 (18 layers) + A100 dp2 pp2 (7+7 layers)``."""
        texts = []
        for mesh in self.meshes:
            layers = "+".join(map(str, mesh.layers or ()))
            texts.append(f"{mesh.named()} ({layers} layers)")
        return " + ".join(texts)


def uses_meshes(values: Values) -> bool:
    """Return whether training uses heterogeneous meshes. Heterogeneous data parallelism does
    not."""
    return bool(values.get("enable_hetero")) and not uses_microbatch_split(values)


def meshes_of(values: Values) -> Meshes | None:
    """The meshes that arguments describe; None where training is not heterogeneous, and as long as
    nobody has said which hosts there are.

    Raises:
        ValueError: they are malformed; :func:`problems` says how.
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
    """Model chunks that a stage of a mesh holds."""
    chunks = values["num_virtual_stages_per_pipeline_rank"]
    return int(chunks or values["virtual_pipeline_model_parallel_size"] or 1)


def mesh_view(values: Values, meshes: Meshes, index: int) -> dict[str, Any]:
    """The arguments as the ranks of one mesh have them: its own parallel sizes, beside the whole
    pipeline's. What is decided by a mesh's sizes can be asked of them as of a job of like ranks."""
    mesh = meshes.meshes[index]
    return {
        **values,
        "tensor_model_parallel_size": mesh.tp,
        "context_parallel_size": mesh.cp,
        "expert_model_parallel_size": mesh.ep,
        "expert_tensor_parallel_size": mesh.etp,
        "pipeline_model_parallel_size": len(meshes.stages),
        "pipeline_model_parallel_layout": meshes.layout(),
        # The layers follow from the layout.
        "num_layers_per_virtual_pipeline_stage": None,
        "num_virtual_stages_per_pipeline_rank": meshes.chunks if meshes.chunks > 1 else None,
        "virtual_pipeline_model_parallel_size": None,
        # A rank of its own has no sequence to share.
        "sequence_parallel": values["sequence_parallel"] and mesh.tp > 1,
    }


def check_mesh_syntax(values: Values) -> Iterator[Violation]:
    """Why arguments describe no meshes."""
    names = [name for name in _DESCRIBING if values.get(name) is not None]
    of_replicas = [name for name in (SPLIT_SIZES, SPLIT_COUNTS) if values.get(name) is not None]
    if not values.get("enable_hetero"):
        for name in (*names, *of_replicas):
            yield name, "needs enable_hetero: true; without it all ranks are laid out alike"
        return
    for name in of_replicas:
        yield name, "is for hetero_mode: dp; here a micro-batch is shared out by the meshes"
    sizes = values[MESHES]
    if not sizes:
        yield "enable_hetero", "needs hetero_process_meshes: which meshes?"
        return
    yield from _check_layer_split(values[LAYER_SPLIT])
    if are_automatic(values):
        return
    if not are_in_words(values):
        yield from _check_mesh_numbers(values, sizes)
        return
    layers_said = any("layers=" in text for text in sizes)
    for name in names:
        if name != MESHES and (name != LAYER_SPLIT or layers_said):
            yield name, f"is said by {MESHES} already, which names sizes; keep one"
    for number, text in enumerate(sizes):
        for message in _check_mesh_words(text):
            yield MESHES, f"mesh {number}: {message}"
    if len({"ranks=" in text for text in sizes}) > 1:
        yield MESHES, "some meshes say ranks, some their sizes; say the sizes of all, or of none"


def _check_layer_split(split: Sequence[str] | None) -> Iterator[Violation]:
    for layers in () if split is None or is_split_automatic(split) else split:
        if not _MESH_NUMBER.fullmatch(str(layers)):
            yield (
                LAYER_SPLIT,
                f"{layers!r} is no number of layers; give one for each stage, or auto",
            )
            return


def are_automatic(values: Values) -> bool:
    """Return whether the launcher chooses one mesh per device type."""
    return tuple(values.get(MESHES) or ()) == (AUTO,)


def is_split_automatic(split: Sequence[str] | None) -> bool:
    """Return whether the layers of the stages are chosen by measured times."""
    return split is not None and tuple(split) == (AUTO,)


def _check_mesh_numbers(values: Values, sizes: Sequence[str]) -> Iterator[Violation]:
    for size in sizes:
        if not _MESH_NUMBER.fullmatch(size) or int(size) < 1:
            yield MESHES, f"{size!r} is no whole number of at least 1"
            return
    if len(sizes) % len(_MESH_SIZES):
        yield MESHES, f"{len(sizes)} numbers are not five a mesh (tp, cp, ep, dp, pp)"
        return
    count = len(sizes) // len(_MESH_SIZES)
    for name in ("hetero_device_types", "expert_tensor_parallel_size_per_process_mesh"):
        if values[name] is not None and len(values[name]) != count:
            yield name, f"{len(values[name])} for {count} meshes: give one for each"


_DESCRIBING = (
    MESHES,
    LAYER_SPLIT,
    "hetero_device_types",
    "expert_tensor_parallel_size_per_process_mesh",
)


def are_in_words(values: Values) -> bool:
    """Return whether the meshes are given as words with named sizes."""
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
        least = 0 if key == "layers" else 1
        if key not in _MESH_WORDS:
            yield f"{key!r} is none of {', '.join(_MESH_WORDS)}"
        elif key == "device_type":
            if not value:
                yield "device_type is empty"
        elif not all(_MESH_NUMBER.fullmatch(n) and int(n) >= least for n in numbers):
            yield f"{key}: expected a whole number of at least {least}, found {value!r}"
    keys = {key for key, _ in pairs}
    if "ranks" in keys and keys & {*_MESH_SIZES, "etp", "layers"}:
        yield "ranks leaves sizes and layers to be chosen; give these, or ranks"
    if len(keys) < len(pairs):
        yield "a size is given twice"


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
    """The meshes with the layers of every stage, where they are said or follow."""
    stages = sum(mesh.pp for mesh in meshes)
    split, alone = values[LAYER_SPLIT], bool(values["standalone_embedding_stage"])
    if any(mesh.layers is not None for mesh in meshes):
        return tuple(meshes)
    if is_split_automatic(split) or any(mesh.open for mesh in meshes):
        counts = [0] * alone + even_layers(values, stages - alone)
    elif split is None:
        counts = [values["num_layers"] // max(stages - alone, 1)] * (stages - alone)
    else:
        counts = [int(layers) for layers in split]
    if alone and len(counts) == stages - 1:
        counts = [0, *counts]
    return with_layers(meshes, counts)


def even_layers(values: Values, stages: int) -> list[int]:
    """Return equal numbers of layers for the stages as far as they divide; the first stages get the
    remainder."""
    chunks = chunks_of(values)
    each, more = divmod(values["num_layers"] // chunks, max(stages, 1))
    return [(each + (index < more)) * chunks for index in range(stages)]


def with_layers(meshes: Sequence[Mesh], layers: Sequence[int]) -> tuple[Mesh, ...]:
    """The meshes with these layers, of each stage."""
    stages, first = [], 0
    for mesh in meshes:
        stages.append(replace(mesh, layers=tuple(layers[first : first + mesh.pp])))
        first += mesh.pp
    return tuple(stages)
