"""Megatron-LM's ``torch`` format: a file a rank, tensors cut as the ranks held them.

``iter_0000100`` (or ``release``) ``/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt``: places in tensor,
pipeline and expert parallelism; the latter two only where there are several. Layers are counted
within a rank's model chunk, experts within a rank.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from flagscale.checkpoints import TRACKER
from flagscale.config.arguments.huggingface.models import FURTHER
from flagscale.errors import CheckpointError
from flagscale.train.checkpoint.formats.base import (
    Inspect,
    Model,
    Report,
    UnfitError,
    collect,
    fitting,
)
from flagscale.train.checkpoint.formats.megatron_arguments import (
    layout_in,
    require_same,
    shape_of,
    values_in,
    vocabulary_rows,
)
from flagscale.train.checkpoint.formats.megatron_layout import (
    EMBEDDING,
    EXPERT,
    FILE,
    HEAD,
    Layout,
    copies,
    cut,
    expert_names,
    is_weight,
    rank_file,
    require_shared,
    spelled,
    uncut,
)
from flagscale.train.checkpoint.formats.megatron_unpickler import load
from flagscale.train.checkpoint.formats.megatron_writing import write_ranks
from flagscale.train.checkpoint.formats.sidecar_files import appearing
from flagscale.train.checkpoint.formats.tables import Entry
from flagscale.train.checkpoint.formats.tensors import Mapped, Outline, Shape, Stack, Stored


@dataclass(frozen=True)
class MegatronTorch:
    """Checkpoints of Megatron-LM (``ckpt_format: torch``), written for a layout."""

    name: ClassVar[str] = "torch"
    layout: Layout = field(default_factory=Layout)

    def recognises(self, path: Path) -> bool:
        return any(path.glob(f"mp_rank_*/{FILE}")) or any(path.glob(f"*/mp_rank_*/{FILE}"))

    def laid_out(self, layout: Layout) -> MegatronTorch:
        """The same, written for another layout."""
        return replace(self, layout=layout)

    def read(self, path: Path) -> Model:
        path = _newest(path)
        args = _arguments(path)
        values = values_in(args, path)
        return collect(path, values, _Parts.read(path, args, values))

    def write(self, model: Model, path: Path, report: Report, inspect: Inspect) -> Path:
        require_shared(model.values, model.path)
        with appearing(path, model.origin) as parts:
            write_ranks(model, self.layout, parts, report)
            inspect(self.read(parts.directory))
        return path


def _newest(path: Path) -> Path:
    """The directory of ranks that the tracker file names, or the newest there is."""
    if any(path.glob("mp_rank_*")):
        return path
    try:
        text = (path / TRACKER).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        text = ""
    named = f"iter_{int(text):07d}" if text.isdecimal() else "release" if text else ""
    if named and any((path / named).glob("mp_rank_*")):
        return path / named
    return max(found.parent for found in path.glob("*/mp_rank_*"))


def _arguments(path: Path) -> Mapping[str, Any]:
    args = _arguments_in(load(min(path.glob(f"mp_rank_*/{FILE}"))))
    if not args:
        raise CheckpointError(f"{path} does not say its arguments: it is of an old version")
    return args


def _arguments_in(saved: Mapping[str, Any]) -> Mapping[str, Any]:
    given = saved.get("args")
    return vars(given) if isinstance(given, argparse.Namespace) else {}


def _rank(file: Path, args: Mapping[str, Any]) -> dict[str, Any]:
    """What a rank saved of the checkpoint that has these arguments."""
    saved = load(file)
    require_same(args, _arguments_in(saved), file)
    return saved


@dataclass(frozen=True)
class _Parts:
    """What the ranks saved: model chunks by place, and the layers that each begins with."""

    path: Path
    args: Mapping[str, Any]
    values: Mapping[str, Any]
    layout: Layout
    chunks: Mapping[tuple[int, int], Sequence[Mapping[str, Any]]]
    """By place in tensor and expert parallelism: all model chunks, in the order of layers."""
    layers: Sequence[tuple[int, int]]
    """Of every layer of the model: its chunk, and its number there."""
    used: set[tuple[int, int, int, str]] = field(default_factory=set)
    """The tensors that were found: places in tensor and expert parallelism, the chunk, the name."""

    @classmethod
    def read(cls, path: Path, args: Mapping[str, Any], values: Mapping[str, Any]) -> _Parts:
        """
        Raises:
            CheckpointError: a rank's file is missing or damaged, or the layout is not read.
        """
        layout = layout_in(args, path)
        tp = layout.tensor
        if (args.get("expert_tensor_parallel_size") or tp) != tp and args.get("num_experts"):
            raise CheckpointError(
                f"{path}: experts are cut otherwise than the rest (expert_tensor_parallel_size), "
                "which is not read",
                hint="let Megatron-LM save it as torch_dist",
            )
        experts = values["num_moe_experts"] or 0
        if experts % layout.expert:
            raise CheckpointError(
                f"{path}: expert_model_parallel_size: {layout.expert} ranks cannot share "
                f"{experts} experts"
            )
        chunks = {}
        for t in range(tp):
            for e in range(layout.expert):
                files = [rank_file(path, layout, (t, p, e)) for p in range(layout.pipeline)]
                chunks[t, e] = _in_order([_rank(file, args) for file in files])
        return cls(path, args, values, layout, chunks, _layers(chunks[0, 0]))

    def find(self, entry: Entry) -> Stored | None:
        """A tensor of the model, of the ranks' parts; None where they have none.

        Raises:
            UnfitError: these have other shapes than the arguments say, or no weights.
        """
        if not EXPERT.fullmatch(entry.name):
            return self._merged(
                entry, entry.shape, [*spelled(entry.name)], range(self.layout.expert)
            )
        count = entry.sizes.experts
        each = count // self.layout.expert
        tensors = []
        for expert in range(count):
            place, own = divmod(expert, each)
            names = expert_names(entry.name, own) or ()
            tensors.append(self._merged(entry, entry.shape[1:], names, [place]))
        whole = [tensor for tensor in tensors if tensor is not None]
        return Stack(tuple(whole)) if len(whole) == count else None

    def _merged(
        self, entry: Entry, shape: Shape, names: Sequence[str], places: Sequence[int]
    ) -> Stored | None:
        """A tensor of the parts that tensor-parallel ranks have by one of these names, at each of
        the ``places`` in expert parallelism."""
        chunk, local = self._chunk(entry.name)
        found: list[list[Stored]] = []
        for t in range(self.layout.tensor):
            found.append([])
            for e in places:
                own = self.chunks[t, e][chunk]
                name = next((n for n in _local(names, local) if _is_tensor(own.get(n))), None)
                if name is None:
                    return None
                self.used.add((t, e, chunk % len(self.chunks[t, e]), name))
                found[-1].append(_stored(own[name]))
        self._require_fitting(entry, shape, found, (chunk, places))
        merged = [copies(entry.name, parts) for parts in found]
        return uncut(entry.name, merged, shape[0], gated=self.values["gated_linear_unit"])

    def _require_fitting(
        self,
        entry: Entry,
        shape: Shape,
        found: Sequence[Sequence[Stored]],
        where: tuple[int, Sequence[int]],
    ) -> None:
        """
        Raises:
            UnfitError: the ranks' parts of a tensor are not those of one of this shape.
        """
        chunk, places = where
        parts, shapes = {}, {}
        whole = self._whole_shape(entry, shape, found[0][0])
        for t, copied in enumerate(found):
            wanted = self._part_shape(entry.name, whole, t, found[0][0])
            for e, part in zip(places, copied, strict=True):
                label = f"{entry.name} ({self._directory(t, chunk, e)})"
                parts[label], shapes[label] = part, wanted
        if problems := list(fitting(self.path, entry.name, parts, shapes)):
            raise UnfitError(problems)

    def _whole_shape(self, entry: Entry, shape: Shape, part: Stored) -> Shape:
        if entry.name not in (EMBEDDING, HEAD):
            return shape
        rows = vocabulary_rows(self.args, self.values["vocab_size"])
        return shape_of(entry, rows, next(iter(part.shape), 0) * self.layout.tensor)

    def _part_shape(self, name: str, whole: Shape, place: int, part: Stored) -> Shape:
        """The shape of a rank's part; what only some layers cut is all there or cut."""
        gated, ranks = self.values["gated_linear_unit"], self.layout.tensor
        outline = Outline(whole)
        for engine in (True, False):
            shape = cut(name, outline, place, ranks, gated=gated, engine=engine).shape
            if shape == part.shape:
                break
        return shape

    def _directory(self, tensor: int, chunk: int, expert: int) -> str:
        stage = chunk % self.layout.pipeline  # -1 is the last one's
        return self.layout.directory((tensor, stage, expert))

    def _chunk(self, name: str) -> tuple[int, tuple[str, str]]:
        """The chunk that has a tensor, and what of its name is exchanged there."""
        if found := re.match(r"decoder\.layers\.(\d+)\.", name):
            layer = int(found[1])
            if layer >= len(self.layers):
                return 0, (name, name)
            chunk, own = self.layers[layer]
            return chunk, (found[0], f"decoder.layers.{own}.")
        return (0 if name.startswith("embedding.") else -1), ("", "")

    def left(self) -> list[str]:
        """The weights that were not found, each with the directory of a rank that has it."""
        found: dict[str, str] = {}
        for (t, e), chunks in self.chunks.items():
            for index, chunk in enumerate(chunks):
                for name, tensor in chunk.items():
                    known = (t, e, index, name) in self.used or self._is_copy(index, name)
                    if _is_tensor(tensor) and not known and is_weight(name, self.args):
                        place = self._directory(t, index, e)
                        found.setdefault(f"{index} {name}", f"{name} (in {place})")
        return sorted(found.values())

    def _is_copy(self, chunk: int, name: str) -> bool:
        """Whether a tensor is a copy of the embedding for layers that predict further tokens."""
        return bool(chunk and self.args.get(FURTHER) and name.startswith("embedding."))


def _local(names: Sequence[str], local: tuple[str, str]) -> list[str]:
    """What names are within a chunk."""
    old, new = local
    return [new + name.removeprefix(old) for name in names]


def _is_tensor(found: Any) -> bool:
    return isinstance(found, torch.Tensor)


def _stored(tensor: torch.Tensor) -> Stored:
    own = tensor.detach()
    return Mapped(tuple(own.shape), own.dtype, lambda: own)


def _in_order(files: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The model chunks of a pipeline's stages: the first chunk of each, then the second, …"""
    every = {str(name) for file in files for name in file}
    numbers = sorted(int(m[1]) for name in every if (m := re.fullmatch(r"model(\d+)", name)))
    names = [f"model{number}" for number in numbers] or ["model"]
    found = [file.get(name) for name in names for file in files]
    return [chunk if isinstance(chunk, dict) else {} for chunk in found]


def _layers(chunks: Sequence[Mapping[str, Any]]) -> list[tuple[int, int]]:
    found = []
    for index, chunk in enumerate(chunks):
        own = {int(m[1]) for key in chunk if (m := re.match(r"decoder\.layers\.(\d+)\.", key))}
        found += [(index, number) for number in sorted(own)]
    return found
