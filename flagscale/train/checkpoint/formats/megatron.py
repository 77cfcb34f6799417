"""Megatron-LM's ``torch`` format, read: a file a rank, tensors cut as the ranks held them.

``iter_0000100`` (or ``release``) ``/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt``: places in tensor,
pipeline and expert parallelism; the latter two only where there are several. Layers are counted
within a rank's model chunk, experts within a rank.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flagscale.checkpoints import TRACKER
from flagscale.config.arguments.huggingface.models import FUNCTION, config_of, effective
from flagscale.errors import CheckpointError
from flagscale.train.checkpoint.formats.base import (
    Inspect,
    Model,
    Report,
    refuse,
    without_padding,
)
from flagscale.train.checkpoint.formats.megatron_unpickler import Unknown, load
from flagscale.train.checkpoint.formats.tables import Entry
from flagscale.train.checkpoint.formats.tensors import (
    Mapped,
    Stack,
    Stored,
    Transposed,
    joined,
    rows,
)

_FILE = "model_optim_rng.pt"
_ALIASES = {"num_moe_experts": "num_experts", "layernorm_epsilon": "norm_epsilon"}
"""Names of arguments there, where they are others."""
_LOCAL = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
"""Names of norms without Transformer Engine, and of a mixture's with it."""
_EXPERT = re.compile(r"(.*\.mlp\.experts\.)experts\.(linear_fc[12])\.(weight)")
_ROWS = re.compile(r".*(linear_qkv|word_embeddings|output_layer)\.(weight|bias)")
_HALVES = re.compile(r".*linear_fc1\.(weight|bias)")
_COLUMNS = re.compile(r".*(linear_proj|linear_fc2)\.weight")


class MegatronTorch:
    """Checkpoints of Megatron-LM (``ckpt_format: torch``). They are read, and not written."""

    name = "torch"

    def recognises(self, path: Path) -> bool:
        return any(path.glob(f"mp_rank_*/{_FILE}")) or any(path.glob(f"*/mp_rank_*/{_FILE}"))

    def read(self, path: Path) -> Model:
        path = _newest(path)
        parts = _Parts.read(path)
        values = effective({**parts.values(), "vocab_size": parts.vocabulary()})
        if values["multi_latent_attention"]:
            raise CheckpointError(
                f"{path}: multi-latent attention is not read from Megatron-LM's torch format",
                hint="take the model as Hugging Face has it",
            )
        kind = config_of(values)["model_type"]
        model = Model(path, kind, values, {})
        tensors: dict[str, Stored] = {}
        lost: list[str] = []
        for entry in model.entries():
            found = parts.whole(entry, gated=values["gated_linear_unit"])
            if found is None:
                lost.append(entry.name)
            else:
                tensors[entry.name] = without_padding(entry.name, found, values)
        refuse(path, "lacks tensors", lost)
        return Model(path, kind, values, tensors)

    def write(self, model: Model, path: Path, report: Report, inspect: Inspect) -> Path:
        raise CheckpointError(
            "Megatron-LM's torch format is read, and not written",
            hint="it loads torch_dist checkpoints: ckpt_format: torch_dist, finetune: true",
        )


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
        first = load(min(path.glob(f"mp_rank_*/{_FILE}")))
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
        chunks = {}
        for t in range(tp):
            for e in range(ep):
                files = [load(_place(path, (t, p, e), (tp, pp, ep))) for p in range(pp)]
                chunks[t, e] = _in_order(files)
        return cls(path, args, tp, ep, chunks, _layers(chunks[0, 0]))

    def values(self) -> dict[str, Any]:
        """Arguments that say which function the model is, under our names."""
        found = {}
        for name in FUNCTION:
            value = self.args.get(_ALIASES.get(name, name))
            if value is not None and not isinstance(value, Unknown):
                found[name] = list(value) if isinstance(value, tuple) else value
        if not self.args.get("group_query_attention"):
            found["num_query_groups"] = found.get("num_attention_heads")
        return found

    def vocabulary(self) -> int:
        """Tokens, without the rows of padding where it says how many there are."""
        told, padded = self.args.get("vocab_size"), self.args.get("padded_vocab_size")
        return int(told or padded or 0)

    def whole(self, entry: Entry, *, gated: bool) -> Stored | None:
        """A tensor of the model, of the ranks' parts; None where they have none."""
        if found := _EXPERT.fullmatch(entry.name):
            count = entry.sizes.experts
            each = count // self.expert
            tensors = []
            for expert in range(count):
                place, own = divmod(expert, each)
                names = [
                    f"{found[1]}local_experts.{own}.{found[2]}.{found[3]}",
                    f"{found[1]}{found[2]}.{found[3]}{own}",
                ]
                tensors.append(self._merged(entry.name, names, place, gated=gated))
            whole = [tensor for tensor in tensors if tensor is not None]
            return Stack(tuple(whole)) if len(whole) == count else None
        return self._merged(entry.name, list(_spelled(entry.name)), 0, gated=gated)

    def _merged(self, name: str, names: Sequence[str], place: int, *, gated: bool) -> Stored | None:
        """A tensor of the parts that tensor-parallel ranks have by one of these names."""
        chunk, local = self._chunk(name)
        found = [_first(names, self.chunks[t, place][chunk], local) for t in range(self.tensor)]
        stored: list[Stored] = [_stored(part) for part in found if part is not None]
        if len(stored) < self.tensor:
            return None
        if len(stored) == 1:
            return stored[0]
        if _HALVES.fullmatch(name) and gated:
            half = stored[0].shape[0] // 2
            return joined([rows(part, begin, half) for begin in (0, half) for part in stored])
        if _HALVES.fullmatch(name) or _ROWS.fullmatch(name):
            return joined(stored)
        if _COLUMNS.fullmatch(name):
            return Transposed(joined([Transposed(part) for part in stored]))
        return stored[0]

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


def _spelled(name: str) -> Iterator[str]:
    yield name
    for theirs, ours in _LOCAL.items():
        if theirs in name:
            yield name.replace(theirs, ours)


def _stored(tensor: torch.Tensor) -> Stored:
    own = tensor.detach()
    return Mapped(tuple(own.shape), own.dtype, lambda: own)


def _place(path: Path, place: Sequence[int], sizes: Sequence[int]) -> Path:
    name = f"mp_rank_{place[0]:02d}"
    name += f"_{place[1]:03d}" if sizes[1] > 1 else ""
    name += f"_{place[2]:03d}" if sizes[2] > 1 else ""
    if not (path / name / _FILE).is_file():
        raise CheckpointError(f"{path / name / _FILE} is missing")
    return path / name / _FILE


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
