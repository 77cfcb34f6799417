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
from flagscale.config.arguments.huggingface.models import effective
from flagscale.errors import CheckpointError
from flagscale.train.checkpoint.formats.base import (
    Inspect,
    Model,
    Report,
    collect,
)
from flagscale.train.checkpoint.formats.companions import appearing
from flagscale.train.checkpoint.formats.megatron_layout import (
    EXPERT,
    FILE,
    Layout,
    expert_names,
    rank_file,
    require_shared,
    spelled,
    uncut,
    values_of,
)
from flagscale.train.checkpoint.formats.megatron_unpickler import load
from flagscale.train.checkpoint.formats.megatron_writing import write_ranks
from flagscale.train.checkpoint.formats.tables import Entry
from flagscale.train.checkpoint.formats.tensors import Mapped, Stack, Stored


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
        parts = _Parts.read(path)
        values = effective(values_of(parts.args))
        require_shared(values, path)
        gated = values["gated_linear_unit"]
        return collect(path, values, lambda entry: parts.whole(entry, gated=gated))

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


@dataclass(frozen=True)
class _Parts:
    """What the ranks saved: model chunks by place, and the layers that each begins with."""

    path: Path
    args: Mapping[str, Any]
    tensor: int
    expert: int
    chunks: Mapping[tuple[int, int], Sequence[Mapping[str, Any]]]
    """By place in tensor and expert parallelism: all model chunks, in the order of layers."""
    layers: Sequence[tuple[int, int]]
    """Of every layer of the model: its chunk, and its number there."""

    @classmethod
    def read(cls, path: Path) -> _Parts:
        """
        Raises:
            CheckpointError: a rank's file is missing or damaged, or the layout is not read.
        """
        first = load(min(path.glob(f"mp_rank_*/{FILE}")))
        given = first.get("args")
        args = vars(given) if isinstance(given, argparse.Namespace) else {}
        if not args:
            raise CheckpointError(f"{path} does not say its arguments: it is of an old version")
        tp, pp, ep = (
            int(args.get(f"{name}_model_parallel_size") or 1)
            for name in ("tensor", "pipeline", "expert")
        )
        if (args.get("expert_tensor_parallel_size") or tp) != tp and args.get("num_experts"):
            raise CheckpointError(
                f"{path}: experts are cut otherwise than the rest (expert_tensor_parallel_size), "
                "which is not read",
                hint="let Megatron-LM save it as torch_dist",
            )
        chunks, layout = {}, Layout(tp, pp, ep)
        for t in range(tp):
            for e in range(ep):
                files = [load(rank_file(path, layout, (t, p, e))) for p in range(pp)]
                chunks[t, e] = _in_order(files)
        return cls(path, args, tp, ep, chunks, _layers(chunks[0, 0]))

    def whole(self, entry: Entry, *, gated: bool) -> Stored | None:
        """A tensor of the model, of the ranks' parts; None where they have none."""
        if EXPERT.fullmatch(entry.name):
            count = entry.sizes.experts
            each = count // self.expert
            tensors = []
            for expert in range(count):
                place, own = divmod(expert, each)
                names = expert_names(entry.name, own) or ()
                tensors.append(self._merged(entry, names, place, gated=gated))
            whole = [tensor for tensor in tensors if tensor is not None]
            return Stack(tuple(whole)) if len(whole) == count else None
        return self._merged(entry, list(spelled(entry.name)), 0, gated=gated)

    def _merged(
        self, entry: Entry, names: Sequence[str], place: int, *, gated: bool
    ) -> Stored | None:
        """A tensor of the parts that tensor-parallel ranks have by one of these names."""
        chunk, local = self._chunk(entry.name)
        found = [_first(names, self.chunks[t, place][chunk], local) for t in range(self.tensor)]
        stored: list[Stored] = [_stored(part) for part in found if part is not None]
        if len(stored) < self.tensor:
            return None
        return uncut(entry.name, stored, entry.theirs[0][1][0], gated=gated)

    def _chunk(self, name: str) -> tuple[int, tuple[str, str]]:
        """The chunk that has a tensor, and what of its name is exchanged there."""
        if found := re.match(r"decoder\.layers\.(\d+)\.", name):
            layer = int(found[1])
            if layer >= len(self.layers):
                return 0, (name, name)
            chunk, own = self.layers[layer]
            return chunk, (found[0], f"decoder.layers.{own}.")
        return (0 if name.startswith("embedding.") else -1), ("", "")


def _first(names: Sequence[str], chunk: Mapping[str, Any], local: tuple[str, str]) -> Any:
    """The tensor that a chunk has by one of these names."""
    old, new = local
    tried = (chunk.get(new + name.removeprefix(old)) for name in names)
    return next((found for found in tried if isinstance(found, torch.Tensor)), None)


def _stored(tensor: torch.Tensor) -> Stored:
    own = tensor.detach()
    return Mapped(tuple(own.shape), own.dtype, lambda: own)


def _in_order(files: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The model chunks of a pipeline's stages: the first chunk of each, then the second, …"""
    numbers = sorted(int(m[1]) for name in files[0] if (m := re.fullmatch(r"model(\d+)", name)))
    names = [f"model{number}" for number in numbers] or ["model"]
    found = [file.get(name) for name in names for file in files]
    return [chunk if isinstance(chunk, dict) else {} for chunk in found]


def _layers(chunks: Sequence[Mapping[str, Any]]) -> list[tuple[int, int]]:
    found = []
    for index, chunk in enumerate(chunks):
        own = {int(m[1]) for key in chunk if (m := re.match(r"decoder\.layers\.(\d+)\.", key))}
        found += [(index, number) for number in sorted(own)]
    return found
