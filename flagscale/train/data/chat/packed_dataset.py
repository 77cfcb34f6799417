"""Dataset of packed conversations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from flagscale.errors import DataError
from flagscale.train.data.chat.encoding import decode_ids
from flagscale.train.data.chat.packing import pack
from flagscale.train.data.chat.token_cache import TokenizedSamples
from flagscale.train.models.base import DOCUMENTS

TooLong = Literal["truncate", "drop", "refuse"]


@dataclass(frozen=True)
class SequenceSettings:
    """Settings of sequences: number of tokens, packing, and handling of long conversations."""

    length: int
    packed: bool
    too_long: TooLong
    seed: int


class PackedConversations(Dataset[dict[str, torch.Tensor]]):
    """Dataset of conversations, concatenated into sequences of a fixed length.

    Each conversation is a document with its own positions. A token's label is the next token of its
    conversation; the last token has none and is left out.
    """

    def __init__(
        self,
        name: str,
        parts: Sequence[tuple[TokenizedSamples, NDArray[np.int64]]],
        shape: SequenceSettings,
    ) -> None:
        """Pack the conversations of a split.

        Args:
            name: name of the split, for error messages.
            parts: for each file, its samples and the indices of those to use.
            shape: settings of the sequences.

        Raises:
            DataError: no conversation is left, or one is too long and ``too_long`` is ``refuse``.
        """
        self.shape = shape
        self._parts = [samples for samples, _ in parts]
        files = [np.full(len(selected), index) for index, (_, selected) in enumerate(parts)]
        self._file = np.concatenate(files) if files else np.empty(0, dtype=np.int64)
        self._sample = np.concatenate([selected for _, selected in parts])
        lengths_by_file = [np.diff(samples.begins)[selected] - 1 for samples, selected in parts]
        lengths = np.concatenate(lengths_by_file).astype(np.int64)
        self.cut, self.dropped = 0, 0
        lengths = self._apply_length_limit(name, lengths)
        if not len(lengths):
            raise DataError(
                f"sft: no conversation is left for {name}",
                hint="use more conversations, give this split a larger share, or set eval_iters: 0",
            )
        self._lengths = lengths
        self._packed = pack(lengths, shape.length, seed=shape.seed, alone=not shape.packed)

    def __len__(self) -> int:
        return len(self._packed)

    @property
    def conversation_count(self) -> int:
        return len(self._lengths)

    @property
    def token_utilization(self) -> float:
        """Fraction of the sequences' tokens that belong to conversations."""
        return float(self._lengths.sum() / (len(self) * self.shape.length))

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        length = self.shape.length
        tokens, labels, positions = np.zeros((3, length), dtype=np.int64)
        mask = np.zeros(length, dtype=np.float32)
        documents = np.zeros(length, dtype=np.int32)
        begin = 0
        for number, conversation in enumerate(self._packed[index]):
            stored = self._get_tokens(conversation)
            end = begin + int(self._lengths[conversation])
            ids = decode_ids(stored)
            tokens[begin:end], labels[begin:end] = ids[:-1], ids[1:]
            mask[begin:end] = stored[1:] >= 0
            positions[begin:end] = np.arange(end - begin)
            documents[begin:end] = number
            begin = end
        documents[begin:] = len(self._packed[index])  # padding
        positions[begin:] = np.arange(length - begin)
        return {
            "tokens": torch.from_numpy(tokens),
            "labels": torch.from_numpy(labels),
            "loss_mask": torch.from_numpy(mask),
            "position_ids": torch.from_numpy(positions),
            DOCUMENTS: torch.from_numpy(documents),
        }

    def _get_tokens(self, conversation: int) -> NDArray[np.int32]:
        tokens = self._parts[int(self._file[conversation])][int(self._sample[conversation])]
        return tokens[: self.shape.length + 1]

    def _apply_length_limit(self, name: str, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Truncate, drop or refuse long conversations; return the lengths of the remaining ones."""
        capacity = self.shape.length
        long = np.flatnonzero(lengths > capacity)
        if len(long) and self.shape.too_long == "refuse":
            longest, file = int(lengths.max()), int(self._file[lengths.argmax()])
            raise DataError(
                f"sft: {len(long)} conversations for {name} are longer than seq_length "
                f"{capacity}; the longest has {longest} tokens, in {self._parts[file].path}",
                hint="raise seq_length, or set sft_too_long to truncate or drop",
            )
        # A truncated conversation may have no token with a loss any more; it is dropped as well.
        truncated = [
            self.shape.too_long == "truncate" and bool((self._get_tokens(index)[1:] >= 0).any())
            for index in long.tolist()
        ]
        self.cut = sum(truncated)
        self.dropped = len(truncated) - self.cut
        keep = np.ones(len(lengths), dtype=bool)
        keep[long] = truncated
        self._file, self._sample = self._file[keep], self._sample[keep]
        return np.minimum(lengths[keep], capacity)
