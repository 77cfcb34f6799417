"""Streaming writer of Megatron-LM's ``torch`` format.

A rank's file is written by ``torch.save`` from its arguments and fake tensors without data. The
tensors' bytes are then written in place, so that memory holds only a chunk of one tensor.
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

from flagscale.checkpoints import TRACKER_FILE
from flagscale.errors import CheckpointError
from flagscale.train.checkpoint.formats.base import ByteProgress, StoredModel
from flagscale.train.checkpoint.formats.lazy_tensors import (
    LazyTensor,
    TensorItem,
    count_bytes,
    write_bytes,
)
from flagscale.train.checkpoint.formats.megatron_layout import (
    EMBEDDING,
    EXPERT_TENSOR,
    OUTPUT_LAYER,
    RANK_FILE,
    RELEASE_DIRECTORY,
    MegatronLayout,
    PaddedTensor,
    RankCoordinates,
    build_megatron_arguments,
    build_precision_arguments,
    shard_tensor,
    spell_expert,
    spell_for_layer,
)
from flagscale.train.checkpoint.formats.resumable_directory import ResumableDirectory
from flagscale.train.checkpoint.formats.span_checksums import FileSpan

_LOCAL_HEADER_BYTES = 30
"""Bytes of a zip archive's local file header without its variable fields."""
_CHECKPOINT_VERSION = 3.0


def write_ranks(
    model: StoredModel, layout: MegatronLayout, output: ResumableDirectory, report: ByteProgress
) -> None:
    """Write the files of all ranks of a layout, and the tracker file.

    Args:
        model: the model.
        layout: parallel layout of the files.
        output: the directory being written.
        report: called after each chunk of bytes with its size.

    Raises:
        CheckpointError: the model cannot be sharded in this layout.
    """
    assignment = _RankAssignment(model, layout)
    arguments = argparse.Namespace(
        **build_megatron_arguments(model.values, layout), **build_precision_arguments(model.dtype)
    )
    for rank in assignment.iter_ranks():
        name = f"{RELEASE_DIRECTORY}/{layout.directory_name(rank)}/{RANK_FILE}"
        tensors = assignment.assign_tensors(rank)
        progress_bytes = assignment.count_progress_bytes(rank)
        if output.reuse_file(name):
            report(sum(progress_bytes.values()))
            continue
        (output.directory / name).parent.mkdir(parents=True, exist_ok=True)
        spans = _write_rank_file(
            output.directory / name, arguments, tensors, progress_bytes, report
        )
        output.record_file(name, spans=spans)
    (output.directory / TRACKER_FILE).write_text(f"{RELEASE_DIRECTORY}\n", encoding="utf-8")


@dataclass(frozen=True)
class _RankAssignment:
    """Assignment of a model's tensors and their shards to ranks."""

    model: StoredModel
    layout: MegatronLayout

    def __post_init__(self) -> None:
        values, layout = self.model.values, self.layout
        experts = values["num_moe_experts"]
        if layout.grouped_gemm and not layout.transformer_engine:
            raise CheckpointError(
                "moe_grouped_gemm is supported for Transformer Engine's layers only",
                hint="omit --transformer-impl local, or --moe-grouped-gemm",
            )
        if layout.pipeline_parallel == 1 and layout.chunks_per_stage > 1:
            raise CheckpointError("several model chunks per stage require several stages")
        for key, count, ranks in (
            ("num_query_groups", values["num_query_groups"], layout.tensor_parallel),
            ("num_moe_experts", experts or 0, layout.expert_parallel),
        ):
            if count % ranks:
                raise CheckpointError(f"{key}: {count} cannot be divided over {ranks} ranks")
        if layout.expert_parallel > 1 and not experts:
            raise CheckpointError(
                f"a model without experts cannot be divided between {layout.expert_parallel} ranks"
            )

    def iter_ranks(self) -> Iterator[RankCoordinates]:
        """Yield all ranks of the layout."""
        layout = self.layout
        for tensor in range(layout.tensor_parallel):
            for stage in range(layout.pipeline_parallel):
                for expert in range(layout.expert_parallel):
                    yield RankCoordinates(tensor, stage, expert)

    def assign_tensors(self, rank: RankCoordinates) -> dict[str, dict[str, LazyTensor]]:
        """Return a rank's tensors, by model chunk."""
        layout = self.layout
        layers = layout.split_layers(self.model.values["num_layers"])
        tensors = {}
        for number in range(layout.chunks_per_stage):
            index = number * layout.pipeline_parallel + rank.pipeline
            key = f"model{number}" if layout.chunks_per_stage > 1 else "model"
            tensors[key] = dict(
                self._iter_model_chunk(
                    rank,
                    layers[index],
                    is_first=index == 0,
                    is_last=index == len(layers) - 1,
                )
            )
        return tensors

    def _iter_model_chunk(
        self, rank: RankCoordinates, layers: list[int], *, is_first: bool, is_last: bool
    ) -> Iterator[tuple[str, LazyTensor]]:
        """Yield the tensors of a model chunk.

        Args:
            rank: coordinates of the rank.
            layers: numbers of the chunk's layers in the model.
            is_first: True for the model's first chunk, which has the embedding.
            is_last: True for the model's last chunk, which has the output layer.
        """
        local_numbers = {layer: number for number, layer in enumerate(layers)}
        for name, tensor in self.model.tensors.items():
            words = name.split(".")
            if words[:2] == ["decoder", "layers"]:
                layer = int(words[2])
                if layer in local_numbers:
                    local_name = ".".join([*words[:2], str(local_numbers[layer]), *words[3:]])
                    yield from self._iter_layer_tensor(name, local_name, layer, tensor, rank)
            elif is_first if words[0] == "embedding" else is_last:
                yield name, self._shard_outer_tensor(name, tensor, rank.tensor)
        if is_last and not is_first and OUTPUT_LAYER not in self.model.tensors:
            # In a model with tied embeddings, the last stage holds a copy of the embedding.
            embedding = self.model.tensors[EMBEDDING]
            yield OUTPUT_LAYER, self._shard_outer_tensor(OUTPUT_LAYER, embedding, rank.tensor)

    def _iter_layer_tensor(
        self,
        name: str,
        local_name: str,
        layer_number: int,
        tensor: LazyTensor,
        rank: RankCoordinates,
    ) -> Iterator[tuple[str, LazyTensor]]:
        """Yield a rank's shard of a layer's tensor; of stacked experts, one shard per expert."""
        layout = self.layout
        if not EXPERT_TENSOR.fullmatch(name):
            spelling = spell_for_layer(
                local_name,
                self.model.values,
                layer_number,
                transformer_engine=layout.transformer_engine,
            )
            yield spelling, self._shard(name, tensor, rank.tensor)
            return
        experts_per_rank = tensor.shape[0] // layout.expert_parallel
        for expert in range(experts_per_rank):
            names = spell_expert(local_name, expert)
            assert names is not None
            expert_tensor = TensorItem(tensor, rank.expert * experts_per_rank + expert)
            spelling = names.grouped if layout.grouped_gemm else names.separate
            yield spelling, self._shard(name, expert_tensor, rank.tensor)

    def _shard(self, name: str, tensor: LazyTensor, tensor_rank: int) -> LazyTensor:
        gated = bool(self.model.values["gated_linear_unit"])
        layout = self.layout
        return shard_tensor(
            name,
            tensor,
            tensor_rank,
            layout.tensor_parallel,
            gated=gated,
            transformer_engine=layout.transformer_engine,
        )

    def _shard_outer_tensor(self, name: str, tensor: LazyTensor, tensor_rank: int) -> LazyTensor:
        """Shard a tensor outside the layers; pad it if it has a row per vocabulary entry."""
        if name in (EMBEDDING, OUTPUT_LAYER):
            tensor = PaddedTensor(tensor, self.layout.pad_vocabulary(tensor.shape[0]))
        return self._shard(name, tensor, tensor_rank)

    def count_progress_bytes(self, rank: RankCoordinates) -> dict[str, int]:
        """Return the bytes of each of a rank's tensors that count as progress.

        They are 0 for a replica that the first expert-parallel rank counts.
        """
        sizes = {}
        for chunk, tensors in self.assign_tensors(rank).items():
            for name, tensor in tensors.items():
                is_replica = rank.expert > 0 and ".experts." not in name
                sizes[f"{chunk}.{name}"] = 0 if is_replica else count_bytes(tensor)
        return sizes


def _write_rank_file(
    path: Path,
    arguments: argparse.Namespace,
    chunks: Mapping[str, Mapping[str, LazyTensor]],
    progress_bytes: Mapping[str, int],
    report: ByteProgress,
) -> list[FileSpan]:
    """Write a rank's file and return the spans of its tensors.

    Args:
        path: the file.
        arguments: Megatron-LM's arguments.
        chunks: tensors by model chunk.
        progress_bytes: see :meth:`_RankAssignment.count_progress_bytes`.
        report: called after each chunk of bytes with its size.
    """
    named_tensors: list[tuple[str, LazyTensor]] = []
    state: dict[str, Any] = {
        "args": arguments,
        "checkpoint_version": _CHECKPOINT_VERSION,
        "iteration": 0,
    }
    with FakeTensorMode():
        for chunk, tensors in chunks.items():
            fake_tensors: dict[str, Any] = {}
            for name, tensor in tensors.items():
                fake_tensors[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
                named_tensors.append((f"{chunk}.{name}", tensor))
                if state_name := _name_extra_state(name):
                    fake_tensors[state_name] = None
            state[chunk] = fake_tensors
    _save_without_data(path, state)
    with path.open("r+b") as file:
        offsets = _find_data_offsets(file)
        spans = []
        for number, (name, tensor) in enumerate(named_tensors):
            file.seek(offsets[number])
            spans.append(
                write_bytes(file, tensor, report if progress_bytes[name] else lambda _size: None)
            )
    return spans


def _name_extra_state(name: str) -> str | None:
    """Return the name of the empty ``_extra_state`` that a linear layer expects, or None."""
    module, _, parameter = name.rpartition(".")
    linear = ".linear_" in module or module == "output_layer"
    return f"{module}._extra_state" if parameter == "weight" and linear else None


def _save_without_data(path: Path, state: Mapping[str, Any]) -> None:
    """Write the archive of a state of fake tensors, with space for their data."""
    previous_option = get_crc32_options()
    set_crc32_options(False)  # the output is compared with the input instead
    try:
        with skip_data(materialize_fake_tensors=True):
            torch.save(state, path)
    except RuntimeError as error:
        # torch's writer replaces the OSError of a failed write by an error of its own.
        cause = error.__cause__ or error.__context__
        raise cause if isinstance(cause, OSError) else error from None
    finally:
        set_crc32_options(previous_option)


def _find_data_offsets(file: BinaryIO) -> dict[int, int]:
    """Return the offset of each tensor's bytes, by its number in the order of saving."""
    offsets = {}
    with zipfile.ZipFile(file) as archive:
        records = archive.infolist()
    for record in records:
        _, _, number = record.filename.rpartition("/data/")
        if number.isdecimal():
            file.seek(record.header_offset)
            header = file.read(_LOCAL_HEADER_BYTES)
            variable_size = int.from_bytes(header[26:28], "little") + int.from_bytes(
                header[28:30], "little"
            )
            offsets[int(number)] = record.header_offset + _LOCAL_HEADER_BYTES + variable_size
    return offsets
