"""Our own checkpoints, read and written by one process, whatever layout they are of or for.

Training writes them through megatron.core, on all ranks. A converted one has the same files, and
is loaded as any other: its tensors lie in chunks of rows, and any layout takes its parts of them.
"""

from __future__ import annotations

import io
import json
import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from flagscale.checkpoint_metadata import METADATA
from flagscale.checkpoints import NAME, Checkpoints, check_whole
from flagscale.config.arguments.huggingface.models import config_of, effective
from flagscale.config.arguments.huggingface.reading import CONFIG, read_config
from flagscale.config.arguments.resuming import architecture
from flagscale.errors import CheckpointError
from flagscale.train.checkpoint.describing import BACKEND, METADATA_KEY, sharding_metadata
from flagscale.train.checkpoint.formats.base import (
    Inspect,
    Model,
    Report,
    refuse,
    without_padding,
)
from flagscale.train.checkpoint.formats.companions import beside, write_companions
from flagscale.train.checkpoint.formats.megatron_distributed import read_theirs
from flagscale.train.checkpoint.formats.metadata import tensors_of
from flagscale.train.checkpoint.formats.parts import Parts, resumable
from flagscale.train.checkpoint.formats.tensors import Region, Stored, pieces
from flagscale.train.checkpoint.store import CheckpointStore
from flagscale.train.state import Progress

BESIDE = "huggingface"
"""Directory, in a checkpoint, of the config.json and the tokenizer that it was converted with."""
_ITERATION = 0
_CHUNK = 64 << 20
_FILE = 4 << 30
_ALIGNED = 64


class Distributed:
    """Checkpoints of this project; Megatron-LM's are read, too."""

    name = "torch_dist"

    def recognises(self, path: Path) -> bool:
        return (path / METADATA).is_file() or bool(Checkpoints(path).iterations())

    def read(self, path: Path) -> Model:
        path, said = newest(path)
        if said.get("adapters"):
            raise CheckpointError(
                f"{path} holds adapters alone",
                hint="flagscale convert merges them into their model",
            )
        given = said.get("model")
        stored: dict[str, Stored] = dict(tensors_of(path))
        if given is None and (theirs := read_theirs(path, stored)) is not None:
            return theirs
        if given is None:
            raise CheckpointError(
                f"{path} does not say which model it is of: it was saved by an older version, or "
                "by another program",
                hint="load it once in training (finetune: true) and save it again",
            )
        given = {**given, "vocab_size": _vocabulary(given, stored)}
        values = effective(given)
        kept = path / BESIDE
        config = read_config(kept) if (kept / CONFIG).is_file() else None
        made = config_of(values, None if config is None else config["model_type"])
        model = Model(path, made["model_type"], values, {}, config, tuple(_files(kept)))
        names = [entry.name for entry in model.entries()]
        refuse(path, "lacks tensors", [name for name in names if name not in stored])
        tensors = {name: without_padding(name, stored[name], values) for name in names}
        return Model(path, model.kind, values, tensors, config, model.files)

    def write(self, model: Model, path: Path, report: Report, inspect: Inspect) -> Path:
        store = CheckpointStore(path)
        if store.iterations():
            raise CheckpointError(f"{path} holds checkpoints already")
        partial = store.begin(_ITERATION, again=model.origin is not None)
        with resumable(partial, model.origin) as parts:
            _Writer(parts, report).write(model)
            inspect(replace(model, path=partial, tensors=dict(tensors_of(partial))))
            _write_common(partial)
            if model.config is not None:
                (partial / BESIDE).mkdir()
                write_companions(partial / BESIDE, model.config, model.tensors, model.files)
        try:
            return store.publish(_ITERATION, describe(model))
        except BaseException:
            store.abandon(_ITERATION)
            raise


def describe(model: Model) -> dict[str, Any]:
    """The manifest's words on a converted checkpoint."""
    kind = str(model.dtype).removeprefix("torch.")
    precision = {"bfloat16": "bf16", "float16": "fp16"}.get(kind, "fp32")
    size = model.values["vocab_size"]
    return {
        "architecture": architecture(_told(model.values)),
        "model": dict(model.values),
        "precision": precision,
        "has_optimizer": False,
        "has_rng": False,
        "vocabulary": [size, size],
        "converted_from": str(model.path),
    }


def _told(values: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments without those that a run may well give otherwise."""
    unread = {"gated_linear_unit": None}  # swiglu says it
    if values["num_moe_experts"] and all(values["moe_layer_freq"]):
        unread["ffn_hidden_size"] = None
    if values["multi_latent_attention"]:
        unread |= {"kv_channels": None, "num_query_groups": None}
    return {**values, **unread}


def newest(path: Path) -> tuple[Path, Mapping[str, Any]]:
    """The checkpoint in a directory of checkpoints, or that the directory is, and its manifest."""
    if (path / METADATA).is_file():
        return path, check_whole(path, foreign=False)
    found = Checkpoints(path).find(foreign=False)
    if found is None:
        raise CheckpointError(f"{path} holds no checkpoint, expected one called {NAME}")
    return found.path, found.content


def _vocabulary(given: Mapping[str, Any], stored: Mapping[str, Stored]) -> int:
    """Tokens of the model: as it was told, or else all the rows there are."""
    embedding = stored.get("embedding.word_embeddings.weight")
    rows = 0 if embedding is None else embedding.shape[0]
    told = given.get("vocab_size")
    return min(told, rows) if told else rows


def _files(kept: Path) -> Iterator[Path]:
    if kept.is_dir():
        yield from beside(kept)


def _write_common(partial: Path) -> None:
    """What a checkpoint has beside tensors: where training would go on, which is at its start."""
    common = {"progress": Progress().state_dict(), METADATA_KEY: sharding_metadata()}
    torch.save(common, partial / "common.pt")
    (partial / "metadata.json").write_text(json.dumps(BACKEND), encoding="utf-8")


@dataclass(frozen=True)
class _Chunk:
    """A region of a tensor that is written by itself."""

    name: str
    tensor: Stored
    region: Region

    @property
    def offsets(self) -> torch.Size:
        return torch.Size(begin for begin, _ in self.region)

    @property
    def sizes(self) -> torch.Size:
        return torch.Size(end - begin for begin, end in self.region)

    @property
    def bytes(self) -> int:
        return self.sizes.numel() * self.tensor.dtype.itemsize


def _planned(model: Model) -> list[list[_Chunk]]:
    """A model's chunks, file by file."""
    files: list[list[_Chunk]] = []
    room = 0
    for name, tensor in model.tensors.items():
        for region in _chunks(tensor):
            if room <= 0:
                files.append([])
                room = _FILE
            files[-1].append(_Chunk(name, tensor, region))
            room -= files[-1][-1].bytes
    return files


class _Writer:
    """Writes tensors into files, one after the other, and what describes them."""

    def __init__(self, parts: Parts, report: Report) -> None:
        self._parts = parts
        self._report = report
        self._described: dict[str, Any] = {}
        self._places: dict[MetadataIndex, _StorageInfo] = {}

    def write(self, model: Model) -> None:
        empty = [place for item in model.tensors.items() for place in _empty_states(*item)]
        with _without_checksums():
            for number, chunks in enumerate(_planned(model)):
                self._file(f"__{number}_0.distcp", chunks, empty if number == 0 else [])
        with (self._parts.directory / METADATA).open("wb") as file:
            pickle.dump(Metadata(self._described, storage_data=self._places), file)
            file.flush()
            os.fsync(file.fileno())

    def _file(self, name: str, chunks: Sequence[_Chunk], empty: Sequence[str]) -> None:
        """A file of chunks; the first has what all that is ``empty`` share, too."""
        places = self._parts.kept(name)
        if places is None or len(places) != len(chunks) + bool(empty):
            places = self._saved(name, chunks, shared=bool(empty))
            self._parts.finish(name, places)
        else:
            self._report(sum(chunk.bytes for chunk in chunks))
        infos = [_StorageInfo(name, begin, length) for begin, length in places]
        for place in empty:
            self._described[place] = BytesStorageMetadata()
            self._places[MetadataIndex(place)] = infos[-1]
        for chunk, info in zip(chunks, infos, strict=False):
            self._describe(chunk)
            self._places[MetadataIndex(chunk.name, chunk.offsets)] = info

    def _describe(self, chunk: _Chunk) -> None:
        tensor = chunk.tensor
        if chunk.name not in self._described:
            properties, size = TensorProperties(dtype=tensor.dtype), torch.Size(tensor.shape)
            self._described[chunk.name] = TensorStorageMetadata(properties, size, [])
        place = ChunkStorageMetadata(chunk.offsets, chunk.sizes)
        self._described[chunk.name].chunks.append(place)

    def _saved(self, name: str, chunks: Sequence[_Chunk], *, shared: bool) -> list[list[int]]:
        """Write a file: where each chunk begins in it and how long it is, and last what is
        ``shared``."""
        places = []
        with (self._parts.directory / name).open("wb") as file:
            for chunk in chunks:
                part = _own(chunk.tensor.read(chunk.region))
                begin = _aligned(file)
                _save(part, file)
                places.append([begin, file.tell() - begin])
                self._report(part.nbytes)
            if shared:
                begin = _aligned(file)
                places.append([begin, file.write(_nothing())])
        return places


def _aligned(file: BinaryIO) -> int:
    """Go on where a tensor may begin; where that is."""
    file.write(b"\0" * (-file.tell() % _ALIGNED))
    return file.tell()


def _save(tensor: torch.Tensor, file: BinaryIO) -> None:
    try:
        torch.save(tensor, file)
    except RuntimeError as error:
        # torch's writer answers a failed write with an error of its own.
        cause = error.__cause__ or error.__context__
        raise cause if isinstance(cause, OSError) else error from None


def _own(part: torch.Tensor) -> torch.Tensor:
    """A tensor in memory of its own: saving a view would save all of the file that it is of."""
    if part.is_contiguous() and part.untyped_storage().nbytes() == part.nbytes:
        return part
    return part.clone(memory_format=torch.contiguous_format)


def _chunks(tensor: Stored) -> Iterator[Region]:
    """Regions that are written one by one: of experts, each by itself."""
    if len(tensor.shape) < 3:
        yield from pieces(tensor, _CHUNK)
        return
    for index in range(tensor.shape[0]):
        yield ((index, index + 1), *((0, size) for size in tensor.shape[1:]))


def _empty_states(name: str, tensor: Stored) -> Iterator[str]:
    """The names under which a linear layer of megatron.core wants to find that it has no state
    beside its weights."""
    module, _, what = name.rpartition(".")
    if what == "weight" and ".linear_" in module:
        count = tensor.shape[0] if len(tensor.shape) == 3 else 1
        for index in range(count):
            yield f"{module}._extra_state/shard_{index}_{count}"


def _nothing() -> bytes:
    buffer = io.BytesIO()
    torch.save([None], buffer)
    return buffer.getvalue()


@contextmanager
def _without_checksums() -> Iterator[None]:
    """torch.save without the checksum that takes most of its time and that nobody reads: what was
    written is compared with what was to be."""
    from torch.serialization import get_crc32_options, set_crc32_options

    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)
