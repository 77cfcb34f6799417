"""Meshes: which ranks hold which part of the model when devices are unlike.

A mesh is a number of ranks with parallel sizes of its own that hold consecutive stages of one
pipeline; the pipeline runs through the meshes in their order. Ranks are numbered mesh by mesh, and
inside a mesh as Megatron numbers them: tensor-parallel ranks fastest, then context, data and
pipeline. Pure, and free of torch: the launcher orders hosts and draws the plan by it, and the
ranks make their process groups of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any

from flagscale.config.arguments.precision import Broken, Values
from flagscale.config.arguments.shares import COUNTS, SIZES, is_on, numbered

MESHES, SPLIT = "hetero_process_meshes", "hetero_pipeline_layer_split"
AUTO = "auto"
_SIZES = ("tp", "cp", "ep", "dp", "pp")
_WORDS = (*_SIZES, "etp", "layers", "device_type", "ranks")
_NUMBER = re.compile(r"[0-9]{1,6}")


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
        named = {**{name: getattr(self, name) for name in _SIZES}, "etp": self.etp or 1}
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
        made: list[Stage] = []
        first = 0
        for index, mesh in enumerate(self.meshes):
            for layers in mesh.layers or (0,) * mesh.pp:
                made.append(Stage(len(made), index, mesh, first, layers))
                first += mesh.stage_ranks
        return tuple(made)

    @property
    def open(self) -> bool:
        """Whether their sizes are to be chosen."""
        return any(mesh.open for mesh in self.meshes)

    @property
    def world_size(self) -> int:
        return sum(mesh.ranks for mesh in self.meshes)

    def first_rank(self, mesh_index: int) -> int:
        return sum(mesh.ranks for mesh in self.meshes[:mesh_index])

    def stage_of(self, rank: int) -> Stage:
        return next(stage for stage in self.stages if rank in stage.ranks)

    def place_of(self, ranks: range) -> str:
        """What these ranks hold, for messages: ``stage 1 of 2, mesh 1 (A100 dp2)``, ``stages 0-1 of
        3, mesh 0 (tp2 pp2) and stage 2 of 3, mesh 1 (1 rank)``."""
        held = [s for s in self.stages if s.ranks.start < ranks.stop and ranks.start < s.ranks.stop]
        if self.open:  # which stages these are is to be chosen
            return " and ".join(f"mesh {s.mesh_index} ({s.mesh.named()})" for s in held)
        return " and ".join(
            f"{numbered('stage', [stage.index for stage in own])} of {len(self.stages)}, mesh "
            f"{index} ({self.meshes[index].named()})"
            for index, own in groupby(held, key=lambda stage: stage.mesh_index)
        )

    def sequences_of(self, mesh: Mesh, d: int) -> range:
        """Which sequences of a micro-batch the data-parallel rank ``d`` of a mesh has."""
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


def are_on(values: Values) -> bool:
    """Whether training is on meshes; over unlike replicas it is not."""
    return bool(values.get("enable_hetero")) and not is_on(values)


def meshes_of(values: Values) -> Meshes | None:
    """The meshes that arguments describe; None where training is not heterogeneous, and as long as
    nobody has said which hosts there are.

    Raises:
        ValueError: they are malformed; :func:`problems` says how.
    """
    if not are_on(values) or to_be_filled(values):
        return None
    found = list(malformed(values))
    if found:
        raise ValueError("; ".join(f"{name}: {message}" for name, message in found))
    meshes = _with_layers(_read(values), values)
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


def view(values: Values, meshes: Meshes, index: int) -> dict[str, Any]:
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


# --- reading -------------------------------------------------------------------------------------


def malformed(values: Values) -> Iterator[Broken]:
    """Why arguments describe no meshes."""
    given = [name for name in _DESCRIBING if values.get(name) is not None]
    of_replicas = [name for name in (SIZES, COUNTS) if values.get(name) is not None]
    if not values.get("enable_hetero"):
        for name in (*given, *of_replicas):
            yield name, "needs enable_hetero: true; without it all ranks are laid out alike"
        return
    for name in of_replicas:
        yield name, "is for hetero_mode: dp; here a micro-batch is shared out by the meshes"
    sizes = values[MESHES]
    if not sizes:
        yield "enable_hetero", "needs hetero_process_meshes: which meshes?"
        return
    yield from _split_problems(values[SPLIT])
    if to_be_filled(values):
        return
    if not in_words(values):
        yield from _number_problems(values, sizes)
        return
    layers_said = any("layers=" in text for text in sizes)
    for name in given:
        if name != MESHES and (name != SPLIT or layers_said):
            yield name, f"is said by {MESHES} already, which names sizes; keep one"
    for number, text in enumerate(sizes):
        for message in _word_problems(text):
            yield MESHES, f"mesh {number}: {message}"
    if len({"ranks=" in text for text in sizes}) > 1:
        yield MESHES, "some meshes say ranks, some their sizes; say the sizes of all, or of none"


def _split_problems(split: Sequence[str] | None) -> Iterator[Broken]:
    for layers in () if split is None or chosen_for_us(split) else split:
        if not _NUMBER.fullmatch(str(layers)):
            yield SPLIT, f"{layers!r} is no number of layers; give one for each stage, or auto"
            return


def to_be_filled(values: Values) -> bool:
    """Whether the meshes are to be one of each device type: the launcher knows these."""
    return tuple(values.get(MESHES) or ()) == (AUTO,)


def chosen_for_us(split: Sequence[str] | None) -> bool:
    """Whether the layers of stages are to be chosen by measured times."""
    return split is not None and tuple(split) == (AUTO,)


def _number_problems(values: Values, sizes: Sequence[str]) -> Iterator[Broken]:
    for size in sizes:
        if not _NUMBER.fullmatch(size) or int(size) < 1:
            yield MESHES, f"{size!r} is no whole number of at least 1"
            return
    if len(sizes) % len(_SIZES):
        yield MESHES, f"{len(sizes)} numbers are not five a mesh (tp, cp, ep, dp, pp)"
        return
    count = len(sizes) // len(_SIZES)
    for name in ("hetero_device_types", "expert_tensor_parallel_size_per_process_mesh"):
        if values[name] is not None and len(values[name]) != count:
            yield name, f"{len(values[name])} for {count} meshes: give one for each"


_DESCRIBING = (
    MESHES,
    SPLIT,
    "hetero_device_types",
    "expert_tensor_parallel_size_per_process_mesh",
)


def in_words(values: Values) -> bool:
    """Whether the meshes are given in words, which name their sizes."""
    return any("=" in text for text in values[MESHES] or ())


def _read(values: Values) -> tuple[Mesh, ...]:
    if in_words(values):
        return tuple(_from_words(text) for text in values[MESHES])
    sizes = [int(size) for size in values[MESHES]]
    count = len(sizes) // len(_SIZES)
    types = values["hetero_device_types"] or [None] * count
    experts = values["expert_tensor_parallel_size_per_process_mesh"] or [None] * count
    made = []
    for i in range(count):
        tp, cp, ep, dp, pp = sizes[len(_SIZES) * i : len(_SIZES) * (i + 1)]
        made.append(Mesh(tp, cp, ep, dp, pp, experts[i], device_type=types[i]))
    return tuple(made)


def _pairs(text: str) -> list[tuple[str, str]]:
    return [(key.strip(), value) for key, _, value in (p.partition("=") for p in text.split(","))]


def _word_problems(text: str) -> Iterator[str]:
    pairs = _pairs(text)
    for key, value in pairs:
        numbers = value.split("+") if key == "layers" else [value]
        least = 0 if key == "layers" else 1
        if key not in _WORDS:
            yield f"{key!r} is none of {', '.join(_WORDS)}"
        elif key == "device_type":
            if not value:
                yield "device_type is empty"
        elif not all(_NUMBER.fullmatch(n) and int(n) >= least for n in numbers):
            yield f"{key}: expected a whole number of at least {least}, found {value!r}"
    given = {key for key, _ in pairs}
    if "ranks" in given and given & {*_SIZES, "etp", "layers"}:
        yield "ranks leaves sizes and layers to be chosen; give these, or ranks"
    if len(given) < len(pairs):
        yield "a size is given twice"


def _from_words(text: str) -> Mesh:
    given: dict[str, Any] = {}
    for key, value in _pairs(text):
        if key == "layers":
            given[key] = tuple(map(int, value.split("+")))
        else:
            given[key] = value if key == "device_type" else int(value)
    if "ranks" in given:
        return Mesh(dp=given["ranks"], device_type=given.get("device_type"), open=True)
    return Mesh(**given)


def as_words(meshes: Sequence[Any]) -> list[Any]:
    """The words of a YAML's list of maps; what is no map stays, to be judged where it is read."""
    return [_as_word(mesh) if isinstance(mesh, Mapping) else mesh for mesh in meshes]


def _as_word(mesh: Mapping[Any, Any]) -> str:
    parts = []
    for key, value in mesh.items():
        many = isinstance(value, (list, tuple))
        if value is not None:
            parts.append(f"{key}={'+'.join(map(str, value)) if many else value}")
    return ",".join(parts)


def _with_layers(meshes: Sequence[Mesh], values: Values) -> tuple[Mesh, ...]:
    """The meshes with the layers of every stage, where they are said or follow."""
    stages = sum(mesh.pp for mesh in meshes)
    split, alone = values[SPLIT], bool(values["standalone_embedding_stage"])
    if any(mesh.layers is not None for mesh in meshes):
        return tuple(meshes)
    if chosen_for_us(split) or any(mesh.open for mesh in meshes):
        counts = [0] * alone + even_layers(values, stages - alone)
    elif split is None:
        counts = [values["num_layers"] // max(stages - alone, 1)] * (stages - alone)
    else:
        counts = [int(layers) for layers in split]
    if alone and len(counts) == stages - 1:
        counts = [0, *counts]
    return with_layers(meshes, counts)


def even_layers(values: Values, stages: int) -> list[int]:
    """As many layers in each of the stages, as far as they divide; the first have more."""
    chunks = chunks_of(values)
    each, more = divmod(values["num_layers"] // chunks, max(stages, 1))
    return [(each + (index < more)) * chunks for index in range(stages)]


def with_layers(meshes: Sequence[Mesh], layers: Sequence[int]) -> tuple[Mesh, ...]:
    """The meshes with these layers, of each stage."""
    made, first = [], 0
    for mesh in meshes:
        made.append(replace(mesh, layers=tuple(layers[first : first + mesh.pp])))
        first += mesh.pp
    return tuple(made)
