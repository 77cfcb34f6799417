"""Writes Megatron-LM's ``torch`` format, a piece of a tensor at a time.

A rank's file is what ``torch.save`` makes of its arguments and tensors. It is made of tensors that
have no data; their bytes are then put where they belong, so that memory holds a piece of one.
"""

from __future__ import annotations

import argparse
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.serialization import get_crc32_options, set_crc32_options, skip_data

from flagscale.checkpoints import TRACKER
from flagscale.errors import CheckpointError
from flagscale.train.checkpoint.formats.base import Model, Report
from flagscale.train.checkpoint.formats.megatron_layout import (
    EMBEDDING,
    FILE,
    HEAD,
    RELEASE,
    Layout,
    Padded,
    arguments_for,
    cut,
    expert_names,
    precision_of,
    spelled_for,
)
from flagscale.train.checkpoint.formats.parts import Parts
from flagscale.train.checkpoint.formats.spans import Span
from flagscale.train.checkpoint.formats.tensors import Item, Stored, size_of, write

_LOCAL_HEADER = 30
_VERSION = 3.0


def write_ranks(model: Model, layout: Layout, parts: Parts, report: Report) -> None:
    """Write the files of all ranks of a layout, and the one that names the checkpoint.

    Raises:
        CheckpointError: the model cannot be cut so.
    """
    plan = _Plan(model, layout)
    arguments = argparse.Namespace(
        **arguments_for(model.values, layout), **precision_of(model.dtype)
    )
    for place in plan.places():
        name = f"{RELEASE}/{layout.directory(place)}/{FILE}"
        stored, own = plan.rank(place), plan.first_written(place)
        if parts.kept(name):
            report(sum(own.values()))
            continue
        (parts.directory / name).parent.mkdir(parents=True, exist_ok=True)
        spans = _write(parts.directory / name, arguments, stored, own, report)
        parts.finish(name, spans=spans)
    (parts.directory / TRACKER).write_text(f"{RELEASE}\n", encoding="utf-8")


@dataclass(frozen=True)
class _Plan:
    """Which rank has which part of a model's tensors."""

    model: Model
    layout: Layout

    def __post_init__(self) -> None:
        values, layout = self.model.values, self.layout
        experts = values["num_moe_experts"]
        if layout.grouped and not layout.engine:
            raise CheckpointError(
                "moe_grouped_gemm is written for Transformer Engine's layers alone",
                hint="leave out --transformer-impl local, or --moe-grouped-gemm",
            )
        if layout.pipeline == 1 and layout.chunks > 1:
            raise CheckpointError("several chunks a stage take several stages")
        for key, count, ranks in (
            ("num_query_groups", values["num_query_groups"], layout.tensor),
            ("num_moe_experts", experts or 0, layout.expert),
        ):
            if count % ranks:
                raise CheckpointError(f"{key}: {count} cannot be shared out over {ranks} ranks")
        if layout.expert > 1 and not experts:
            raise CheckpointError(f"a model without experts is not cut for {layout.expert} ranks")

    def places(self) -> Iterator[tuple[int, int, int]]:
        """The ranks' places in tensor, pipeline and expert parallelism."""
        layout = self.layout
        for tensor in range(layout.tensor):
            for stage in range(layout.pipeline):
                for expert in range(layout.expert):
                    yield tensor, stage, expert

    def rank(self, place: tuple[int, int, int]) -> dict[str, dict[str, Stored]]:
        """A rank's tensors, by the model chunk that they are of."""
        layout = self.layout
        layers = layout.layers(self.model.values["num_layers"])
        found = {}
        for number in range(layout.chunks):
            index = number * layout.pipeline + place[1]
            key = f"model{number}" if layout.chunks > 1 else "model"
            ends = (index == 0, index == len(layers) - 1)
            found[key] = dict(self._chunk(place, layers[index], ends))
        return found

    def _chunk(
        self, place: tuple[int, int, int], layers: list[int], ends: tuple[bool, bool]
    ) -> Iterator[tuple[str, Stored]]:
        """The tensors of a chunk; ``ends``: whether it is the model's first, and its last."""
        own = {layer: number for number, layer in enumerate(layers)}
        for name, tensor in self.model.tensors.items():
            words = name.split(".")
            if words[:2] == ["decoder", "layers"]:
                layer = int(words[2])
                if layer in own:
                    local = ".".join([*words[:2], str(own[layer]), *words[3:]])
                    yield from self._of_layer(name, local, layer, tensor, place)
            elif ends[0] if words[0] == "embedding" else ends[1]:
                yield name, self._end(name, tensor, place[0])
        if ends == (False, True) and HEAD not in self.model.tensors:
            # Of a tied model the last stage has a copy of its own.
            yield HEAD, self._end(HEAD, self.model.tensors[EMBEDDING], place[0])

    def _of_layer(
        self, name: str, local: str, layer: int, tensor: Stored, place: tuple[int, int, int]
    ) -> Iterator[tuple[str, Stored]]:
        layout = self.layout
        if expert_names(name, 0) is None:
            spelling = spelled_for(local, self.model.values, layer, engine=layout.engine)
            yield spelling, self._cut(name, tensor, place[0])
            return
        count = tensor.shape[0] // layout.expert
        for expert in range(count):
            names = expert_names(local, expert)
            assert names is not None
            whole = Item(tensor, place[2] * count + expert)
            yield names[layout.grouped], self._cut(name, whole, place[0])

    def _cut(self, name: str, tensor: Stored, place: int) -> Stored:
        gated = bool(self.model.values["gated_linear_unit"])
        layout = self.layout
        return cut(name, tensor, place, layout.tensor, gated=gated, engine=layout.engine)

    def _end(self, name: str, tensor: Stored, place: int) -> Stored:
        """A tensor of the first or the last stage; those of the vocabulary are padded."""
        if name in (EMBEDDING, HEAD):
            tensor = Padded(tensor, self.layout.padded(tensor.shape[0]))
        return self._cut(name, tensor, place)

    def first_written(self, place: tuple[int, int, int]) -> dict[str, int]:
        """Bytes of the model that this rank's file is the first to have, by tensor: those that
        several have are counted once."""
        found = {}
        for chunk, tensors in self.rank(place).items():
            for name, tensor in tensors.items():
                alike = place[2] > 0 and ".experts." not in name
                found[f"{chunk}.{name}"] = 0 if alike else size_of(tensor)
        return found


def _write(
    path: Path,
    arguments: argparse.Namespace,
    chunks: Mapping[str, Mapping[str, Stored]],
    counted: Mapping[str, int],
    report: Report,
) -> list[Span]:
    """Write a rank's file; where each tensor lies in it."""
    stored: list[tuple[str, Stored]] = []
    state: dict[str, Any] = {
        "args": arguments,
        "checkpoint_version": _VERSION,
        "iteration": 0,
    }
    with FakeTensorMode():
        for chunk, tensors in chunks.items():
            own: dict[str, Any] = {}
            for name, tensor in tensors.items():
                own[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
                stored.append((f"{chunk}.{name}", tensor))
                if own_state := _no_state(name):
                    own[own_state] = None
            state[chunk] = own
    _save(path, state)
    with path.open("r+b") as file:
        begins = _begins(file)
        spans = []
        for number, (name, tensor) in enumerate(stored):
            file.seek(begins[number])
            spans.append(write(file, tensor, report if counted[name] else lambda _size: None))
    return spans


def _no_state(name: str) -> str | None:
    """The name under which a linear layer wants to find that it has no state beside its weights."""
    module, _, what = name.rpartition(".")
    linear = ".linear_" in module or module == "output_layer"
    return f"{module}._extra_state" if what == "weight" and linear else None


def _save(path: Path, state: Mapping[str, Any]) -> None:
    before = get_crc32_options()
    set_crc32_options(False)  # what was written is compared with what was to be
    try:
        with skip_data(materialize_fake_tensors=True):
            torch.save(state, path)
    except RuntimeError as error:
        # torch's writer answers a failed write with an error of its own.
        cause = error.__cause__ or error.__context__
        raise cause if isinstance(cause, OSError) else error from None
    finally:
        set_crc32_options(before)


def _begins(file: BinaryIO) -> dict[int, int]:
    """Where the bytes of each tensor begin, by its number in the order of saving."""
    found = {}
    with zipfile.ZipFile(file) as archive:
        records = archive.infolist()
    for record in records:
        _, _, number = record.filename.rpartition("/data/")
        if number.isdecimal():
            file.seek(record.header_offset)
            head = file.read(_LOCAL_HEADER)
            names = int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
            found[int(number)] = record.header_offset + _LOCAL_HEADER + names
    return found
