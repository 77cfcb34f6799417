"""Sequences of conversations, as training takes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from flagscale.errors import DataError
from flagscale.train.data.chat.cache import Samples
from flagscale.train.data.chat.encoding import ids_of
from flagscale.train.data.chat.packing import pack
from flagscale.train.models.base import DOCUMENTS

TooLong = Literal["truncate", "drop", "refuse"]


@dataclass(frozen=True)
class Shape:
    """How sequences are made. ``length``: their tokens; ``packed``: whether several conversations
    go into one."""

    length: int
    packed: bool
    too_long: TooLong
    seed: int


class Sequences(Dataset[dict[str, torch.Tensor]]):
    """Conversations, one behind the other, each a document with positions of its own. A token's
    label is the next one of its conversation; the last one, which has none, is left out."""

    def __init__(
        self, name: str, parts: Sequence[tuple[Samples, NDArray[np.int64]]], shape: Shape
    ) -> None:
        """``name``: what the split is called. ``parts``: of each file the samples that are taken.

        Raises:
            DataError: nothing is left, or a conversation is too long that may not be.
        """
        self.shape, self._parts = shape, [samples for samples, _ in parts]
        file = [np.full(len(taken), index) for index, (_, taken) in enumerate(parts)]
        self._file = np.concatenate(file) if file else np.empty(0, dtype=np.int64)
        self._sample = np.concatenate([taken for _, taken in parts])
        every = [np.diff(samples.begins)[taken] - 1 for samples, taken in parts]
        lengths = np.concatenate(every).astype(np.int64)
        self.cut, self.dropped = 0, 0
        lengths = self._fit(name, lengths)
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
    def conversations(self) -> int:
        return len(self._lengths)

    @property
    def used(self) -> float:
        """Share of the sequences' tokens that are of conversations."""
        return float(self._lengths.sum() / (len(self) * self.shape.length))

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        length = self.shape.length
        tokens, labels, positions = np.zeros((3, length), dtype=np.int64)
        mask = np.zeros(length, dtype=np.float32)
        documents = np.zeros(length, dtype=np.int32)
        begin = 0
        for number, one in enumerate(self._packed[index]):
            stored, end = self._stored(one), begin + int(self._lengths[one])
            ids = ids_of(stored)
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

    def _stored(self, one: int) -> NDArray[np.int32]:
        found = self._parts[int(self._file[one])][int(self._sample[one])]
        return found[: self.shape.length + 1]

    def _fit(self, name: str, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """The lengths of conversations that fit; what does not, is cut, left out or refused."""
        room = self.shape.length
        long = np.flatnonzero(lengths > room)
        if len(long) and self.shape.too_long == "refuse":
            longest, file = int(lengths.max()), int(self._file[lengths.argmax()])
            raise DataError(
                f"sft: {len(long)} conversations for {name} are longer than seq_length {room}; the "
                f"longest has {longest} tokens, in {self._parts[file].path}",
                hint="raise seq_length, or set sft_too_long to truncate or drop",
            )
        # What is cut may have lost all that was to be learned.
        kept = [
            self.shape.too_long == "truncate" and bool((self._stored(one)[1:] >= 0).any())
            for one in long.tolist()
        ]
        self.cut, self.dropped = sum(kept), len(kept) - sum(kept)
        keep = np.ones(len(lengths), dtype=bool)
        keep[long] = kept
        self._file, self._sample = self._file[keep], self._sample[keep]
        return np.minimum(lengths[keep], room)
