"""Datasets of packed conversations.

:mod:`flagscale.train.data.chat.packing` decides which conversations share a sequence; this module
builds the tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from flagscale.errors import DataError
from flagscale.train.data.chat.encoding import decode_ids
from flagscale.train.data.chat.packing import pack_conversations
from flagscale.train.data.chat.token_cache import TokenizedSamples
from flagscale.train.models.base import DOCUMENT_NUMBERS_KEY

LongConversationPolicy = Literal["truncate", "drop", "refuse"]


@dataclass(frozen=True)
class SequenceSettings:
    """Settings of the sequences that conversations are packed into.

    Attributes:
        length: number of tokens of a sequence.
        is_packed: put several conversations into a sequence; otherwise, one.
        long_conversations: handling of conversations longer than a sequence: shorten them, leave
            them out, or raise a DataError.
        seed: seed of the order of sequences.
    """

    length: int
    is_packed: bool
    long_conversations: LongConversationPolicy
    seed: int


def build_sequence(
    conversations: Sequence[NDArray[np.int32]], length: int
) -> dict[str, NDArray[Any]]:
    """Concatenate conversations to a sequence, each a document with its own positions.

    Args:
        conversations: encoded tokens. A token's label is the next one of its conversation; the last
            token has none and is left out.
        length: number of tokens of the sequence, which is padded.

    Returns:
        Arrays ``[length]``: those of a micro-batch, and the document numbers.
    """
    tokens, labels, positions = np.zeros((3, length), dtype=np.int64)
    loss_mask = np.zeros(length, dtype=np.float32)
    documents = np.zeros(length, dtype=np.int32)
    begin = 0
    for number, encoded_tokens in enumerate(conversations):
        end = begin + len(encoded_tokens) - 1
        ids = decode_ids(encoded_tokens)
        tokens[begin:end], labels[begin:end] = ids[:-1], ids[1:]
        loss_mask[begin:end] = encoded_tokens[1:] >= 0
        positions[begin:end] = np.arange(end - begin)
        documents[begin:end] = number
        begin = end
    documents[begin:] = len(conversations)  # padding
    positions[begin:] = np.arange(length - begin)
    return {
        "tokens": tokens,
        "labels": labels,
        "loss_mask": loss_mask,
        "position_ids": positions,
        DOCUMENT_NUMBERS_KEY: documents,
    }


class PackedSamples(Dataset[dict[str, torch.Tensor]]):
    """Base class of datasets of conversations, concatenated into sequences of a fixed length.

    Its samples are conversations or pairs of them. Those of a pair are at the same place of two
    sequences.
    """

    conversations_per_sample: ClassVar[int] = 1
    """Number of conversations of a sample, which are adjacent in the files of tokens."""
    noun: ClassVar[str] = "conversations"
    """Name of the samples in messages."""
    argument: ClassVar[str] = "sft"
    """Argument that selects such data, for messages."""

    def __init__(
        self,
        name: str,
        selected_samples: Sequence[tuple[TokenizedSamples, NDArray[np.int64]]],
        settings: SequenceSettings,
    ) -> None:
        """Pack the samples of a split.

        Args:
            name: name of the split, for error messages.
            selected_samples: for each file, its tokens and the indices of the samples to use.
            settings: settings of the sequences.

        Raises:
            DataError: no sample is left, or one is too long and the setting is ``refuse``.
        """
        self.settings = settings
        self._files = [samples for samples, _ in selected_samples]
        # For each sample: the index of its file, and its index in that file.
        file_indices = [
            np.full(len(indices), index) for index, (_, indices) in enumerate(selected_samples)
        ]
        self._file_indices = (
            np.concatenate(file_indices) if file_indices else np.empty(0, dtype=np.int64)
        )
        self._sample_indices = np.concatenate([selected for _, selected in selected_samples])
        lengths_by_file = [
            (np.diff(tokens.offsets) - 1).reshape(-1, self.conversations_per_sample)[selected]
            for tokens, selected in selected_samples
        ]
        lengths = np.concatenate(lengths_by_file).astype(np.int64)
        self.truncated_count, self.dropped_count = 0, 0
        lengths = self._apply_length_limit(name, lengths)
        if not len(lengths):
            message, hint = self._explain_emptiness(name)
            raise DataError(message, hint=hint)
        self._lengths = lengths
        self._sequences = pack_conversations(
            lengths.max(1),
            settings.length,
            seed=settings.seed,
            one_per_sequence=not settings.is_packed,
        )

    @classmethod
    def count_samples(cls, tokens: TokenizedSamples) -> int:
        """Return the number of samples of a file."""
        return len(tokens) // cls.conversations_per_sample

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def sample_count(self) -> int:
        return len(self._lengths)

    @property
    def token_utilization(self) -> float:
        """Fraction of the sequences' tokens that belong to conversations."""
        capacity = len(self) * self.conversations_per_sample * self.settings.length
        return float(self._lengths.sum() / capacity)

    def _get_tokens(self, sample: int, member: int) -> NDArray[np.int32]:
        """Return a conversation's encoded tokens, limited to the length of a sequence."""
        file = self._files[int(self._file_indices[sample])]
        index = int(self._sample_indices[sample]) * self.conversations_per_sample + member
        return file[index][: self.settings.length + 1]

    def _build_sequence(self, index: int, member: int) -> dict[str, NDArray[Any]]:
        """Build the sequence of one conversation of each sample."""
        conversations = [self._get_tokens(sample, member) for sample in self._sequences[index]]
        return build_sequence(conversations, self.settings.length)

    def _can_truncate(self, sample: int) -> bool:
        """Return whether a truncated sample still has a loss."""
        return all(
            bool((self._get_tokens(sample, member)[1:] >= 0).any())
            for member in range(self.conversations_per_sample)
        )

    def _explain_emptiness(self, name: str) -> tuple[str, str]:
        """Return the message and the hint of an error about a split without samples."""
        message = f"{self.argument}: no {self.noun.removesuffix('s')} is left for {name}"
        if not self.dropped_count:
            hint = f"use more {self.noun}, give this split a larger share, or set eval_iters: 0"
            return message, hint
        reason = (
            "all their answers are behind it"
            if self.settings.long_conversations == "truncate"
            else "sft_too_long is drop"
        )
        message += (
            f": {self.dropped_count:,} are longer than seq_length {self.settings.length}, and "
            f"{reason}"
        )
        return message, "raise seq_length, or shorten the conversations"

    def _apply_length_limit(self, name: str, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Truncate, drop or refuse long samples; return the lengths of the remaining ones."""
        capacity = self.settings.length
        longest = lengths.max(1)
        long_indices = np.flatnonzero(longest > capacity)
        if len(long_indices) and self.settings.long_conversations == "refuse":
            max_length, longest_file = int(longest.max()), int(self._file_indices[longest.argmax()])
            raise DataError(
                f"{self.argument}: {len(long_indices)} {self.noun} for {name} are longer than "
                f"seq_length {capacity}; the longest has {max_length} tokens, in "
                f"{self._files[longest_file].path}",
                hint="raise seq_length, or set sft_too_long to truncate or drop",
            )
        # If no token with a loss remains, a truncated sample is dropped as well.
        can_truncate = [
            self.settings.long_conversations == "truncate" and self._can_truncate(index)
            for index in long_indices.tolist()
        ]
        self.truncated_count = sum(can_truncate)
        self.dropped_count = len(can_truncate) - self.truncated_count
        is_kept = np.ones(len(lengths), dtype=bool)
        is_kept[long_indices] = can_truncate
        self._file_indices = self._file_indices[is_kept]
        self._sample_indices = self._sample_indices[is_kept]
        return np.minimum(lengths[is_kept], capacity)


class PackedConversations(PackedSamples):
    """Dataset of conversations for supervised fine-tuning."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sequence = self._build_sequence(index, 0)
        return {name: torch.from_numpy(array) for name, array in sequence.items()}
