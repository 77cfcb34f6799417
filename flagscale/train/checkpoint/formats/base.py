"""What a format of checkpoints is, and those that there are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from flagscale.config.arguments.huggingface.models import FURTHER, config_of
from flagscale.errors import CheckpointError
from flagscale.registry import Registry
from flagscale.train.checkpoint.formats.megatron_layout import Layout
from flagscale.train.checkpoint.formats.parts import Origin
from flagscale.train.checkpoint.formats.tables import Entry, entries
from flagscale.train.checkpoint.formats.tensors import (
    Alike,
    Cast,
    Copies,
    Shape,
    Stored,
    pieces,
    rows,
    size_of,
    whole,
)

Report = Callable[[int], None]
"""Called with bytes that are done."""
Inspect = Callable[["Model"], None]
"""Called with what was written, before it gets the name under which it is found."""
EXPERT_BIAS = ".router.expert_bias"
_MOST_NAMED, _MOST_PARTS = 20, 8
_EMBEDDING, _HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
_UNTIED = "untie_embeddings_and_output_weights"
_ANNOUNCING = (
    "the model would be another one without them: its args should say so by num_layers, "
    f"add_bias_linear, add_qkv_bias, qk_layernorm, num_experts, {_UNTIED} or the like"
)


@dataclass(frozen=True)
class Model:
    """A model's weights and what it is, wherever it lies.

    ``kind`` is its family (``model_type``), ``values`` the arguments that decide which function it
    is, written out, ``tensors`` its weights by the names of :mod:`.tables`, without padding.
    ``config`` is the config.json it came with, ``files`` what else belongs to it, a tokenizer's
    above all, and ``notes`` what is to be said of what was not taken.
    """

    path: Path
    kind: str
    values: Mapping[str, Any]
    tensors: Mapping[str, Stored]
    config: Mapping[str, Any] | None = None
    files: tuple[Path, ...] = ()
    origin: Origin | None = None
    """What lets a conversion of it that was cut go on."""
    notes: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(map(size_of, self.tensors.values()))

    @property
    def dtype(self) -> torch.dtype:
        """The precision of its weights; biases by which experts are chosen may have a higher."""
        return self.tensors[_EMBEDDING].dtype

    def entries(self) -> Iterator[Entry]:
        """Its tensors, and what they are made of in Hugging Face's."""
        return entries(self.kind, self.values)

    def alone(self, why: str = f"{FURTHER} is not set") -> Model:
        """The same without the layers that predict further tokens; a note says ``why``."""
        if not self.values[FURTHER]:
            return self
        tensors = {
            name: tensor.places[0] if isinstance(tensor, Alike) else tensor
            for name, tensor in self.tensors.items()
            if not name.startswith("mtp.")
        }
        note = f"its layers that predict further tokens are left out: {why}"
        values = {**self.values, FURTHER: None}
        return replace(self, values=values, tensors=tensors, notes=(*self.notes, note))

    def cast(self, dtype: torch.dtype) -> Model:
        """The same in another precision, but for the biases by which experts are chosen: they move
        by less than 16 bits can say."""
        tensors = {
            name: tensor if name.endswith(EXPERT_BIAS) else Cast(tensor, dtype)
            for name, tensor in self.tensors.items()
        }
        return replace(self, tensors=tensors)


@runtime_checkable
class CheckpointFormat(Protocol):
    """How a program keeps a model on disk."""

    name: str

    def recognises(self, path: Path) -> bool:
        """Whether a directory holds a model in this format."""

    def read(self, path: Path) -> Model:
        """The model in a directory; its tensors are read when they are asked for.

        Raises:
            CheckpointError: what is wrong with it, or cannot be had.
        """

    def write(self, model: Model, path: Path, report: Report, inspect: Inspect) -> Path:
        """Write a model to a directory that does not exist yet, or is empty; where it is then. What
        is cut short, or what ``inspect`` raises for, leaves nothing there that looks whole.

        Raises:
            CheckpointError: the model cannot be said in this format.
        """


@runtime_checkable
class LaidOut(CheckpointFormat, Protocol):
    """A format whose files are cut for a layout."""

    def laid_out(self, layout: Layout) -> CheckpointFormat:
        """The same, written for this layout."""


FORMATS = Registry(
    "flagscale.checkpoint_formats",
    "checkpoint format",
    {
        "huggingface": "flagscale.train.checkpoint.formats.huggingface:HuggingFace",
        # Before the last, whose directories have the same names.
        "torch": "flagscale.train.checkpoint.formats.megatron:MegatronTorch",
        "megatron_dist": (
            "flagscale.train.checkpoint.formats.megatron_distributed:MegatronDistributed"
        ),
        "torch_dist": "flagscale.train.checkpoint.formats.distributed:Distributed",
    },
)
"""By the names that ``flagscale convert --to`` takes."""


def format_of(path: Path) -> CheckpointFormat:
    """The format of what lies in a directory.

    Raises:
        CheckpointError: it is in none that is known.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path} is no directory")
    for name in FORMATS.names():
        made: CheckpointFormat = FORMATS.made(name, CheckpointFormat)
        if made.recognises(path):
            return made
    known = ", ".join(FORMATS.names())
    raise CheckpointError(
        f"{path} holds no model in a known format ({known})",
        hint="a directory of Hugging Face has config.json and *.safetensors; one of checkpoints "
        "iter_… directories",
    )


def fitting(
    path: Path, name: str, parts: Mapping[str, Stored], shapes: Mapping[str, Shape]
) -> Iterator[str]:
    """What keeps parts from making one tensor: shapes, precisions."""
    for part, shape in shapes.items():
        if parts[part].shape != shape:
            yield f"{part}: expected shape {list(shape)}, found {list(parts[part].shape)}"
    kinds = {str(tensor.dtype).removeprefix("torch.") for tensor in parts.values()}
    if len(kinds) > 1:
        few, more = [*parts][:_MOST_PARTS], len(parts) - _MOST_PARTS
        names = ", ".join(few) + (f" and {more} more" if more > 0 else "")
        yield f"{names}: one precision expected, found {' and '.join(sorted(kinds))}"
    for part, tensor in parts.items():
        if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
            kind = str(tensor.dtype).removeprefix("torch.")
            yield f"{part}: expected weights of 16 bits or more, found {kind}"


def refuse(path: Path, what: str, items: list[str], hint: str | None = None) -> None:
    """
    Raises:
        CheckpointError: with the items, if there are any.
    """
    if items:
        more = len(items) - _MOST_NAMED
        named = items[:_MOST_NAMED] + ([f"and {more} more"] if more > 0 else [])
        listed = "\n  ".join(named)
        raise CheckpointError(f"{path} {what}: {listed}", hint=hint)


class UnfitError(Exception):
    """The parts of a tensor that are found do not make it; ``problems`` tell why."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__(*problems)
        self.problems = problems


class Source(Protocol):
    """The tensors of a checkpoint that says no names of ours, found one by one."""

    def find(self, entry: Entry) -> Stored | None:
        """A tensor of the model; None where there is none.

        Raises:
            UnfitError: there is, but it is another.
        """

    def left(self) -> list[str]:
        """Weights that nobody has asked for yet, by their names there."""


def collect(path: Path, values: Mapping[str, Any], source: Source) -> Model:
    """The model of arguments written out, its tensors found one by one and without padding.

    Raises:
        CheckpointError: some are not found, are not as the arguments say, or are not said by them.
    """
    kind = config_of(values)["model_type"]
    tensors: dict[str, Stored] = {}
    lost, wrong = list[str](), list[str]()
    for entry in Model(path, kind, values, {}).entries():
        try:
            found = _found(source, entry, values)
        except UnfitError as error:
            wrong += error.problems
            continue
        if found is None:
            lost.append(entry.name)
        else:
            tensors[entry.name] = without_padding(entry.name, found, values)
    refuse(path, "lacks tensors", lost)
    refuse(path, "has tensors that do not fit its arguments", list(dict.fromkeys(wrong)))
    refuse(path, "has tensors that its arguments do not announce", source.left(), _ANNOUNCING)
    return Model(path, kind, values, tensors)


def _found(source: Source, entry: Entry, values: Mapping[str, Any]) -> Stored | None:
    """A tensor of the model. An output layer that is not announced must be the embedding."""
    found = source.find(entry)
    if found is None or entry.name != _EMBEDDING or values[_UNTIED]:
        return found
    head = source.find(replace(entry, name=_HEAD))
    if head is None:
        return found
    unlike = f"{_HEAD} is there and is not the embedding, but {_UNTIED} is false in its arguments"
    return Copies((found, head), unlike)


def without_padding(name: str, tensor: Stored, values: Mapping[str, Any]) -> Stored:
    """An embedding or an output layer cut to the vocabulary."""
    if name not in (_EMBEDDING, _HEAD):
        return tensor
    size = values["vocab_size"]
    return rows(tensor, 0, size) if tensor.shape[0] > size else tensor


UNSOUND = "it holds infinities, or what is no number"


def differs(tensor: Stored, other: Stored, report: Report) -> str | None:
    """What keeps two tensors from being the same, finite numbers, bit by bit; None if nothing."""
    if (tensor.dtype, tensor.shape) != (other.dtype, other.shape):
        return f"{other.dtype} {list(other.shape)}, expected {tensor.dtype} {list(tensor.shape)}"
    for region in pieces(whole(tensor.shape), tensor.dtype.itemsize):
        one, two = (side.read(region).contiguous() for side in (tensor, other))
        if not are_finite(one):
            return UNSOUND
        if not _same_bits(one, two):
            return "it is not what it was made of"
        report(one.nbytes)
    return None


def are_finite(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds neither infinities nor what is no number."""
    # The extremes are what any such number makes of them, and take a fraction of the time.
    return not tensor.numel() or bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all())


def _same_bits(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether two contiguous tensors of one shape hold the same bits."""
    # Words of 8 bytes are compared several times as fast, where memory is aligned for them.
    wide = all(side.nbytes % 8 == 0 and side.data_ptr() % 8 == 0 for side in (one, two))
    kind = torch.int64 if wide else torch.uint8
    return torch.equal(one.reshape(-1).view(kind), two.reshape(-1).view(kind))
