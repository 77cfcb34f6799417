"""Dataset of packed conversations.

:mod:`flagscale.train.data.chat.packing` decides which conversations share a sequence; this module
builds the tensors.
"""

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


class PackedConversations(Dataset[dict[str, torch.Tensor]]):
    """Dataset of conversations, concatenated into sequences of a fixed length.

    Each conversation is a document with its own positions. A token's label is the next token of its
    conversation; the last token has none and is left out.
    """

    def __init__(
        self,
        name: str,
        selected_samples: Sequence[tuple[TokenizedSamples, NDArray[np.int64]]],
        settings: SequenceSettings,
    ) -> None:
        """Pack the conversations of a split.

        Args:
            name: name of the split, for error messages.
            selected_samples: for each file, its samples and the indices of those to use.
            settings: settings of the sequences.

        Raises:
            DataError: no conversation is left, or one is too long and the setting is ``refuse``.
        """
        self.settings = settings
        self._files = [samples for samples, _ in selected_samples]
        # For each conversation: the index of its file, and its index in that file.
        file_indices = [
            np.full(len(indices), index) for index, (_, indices) in enumerate(selected_samples)
        ]
        self._file_indices = (
            np.concatenate(file_indices) if file_indices else np.empty(0, dtype=np.int64)
        )
        self._sample_indices = np.concatenate([selected for _, selected in selected_samples])
        lengths_by_file = [
            np.diff(samples.offsets)[selected] - 1 for samples, selected in selected_samples
        ]
        lengths = np.concatenate(lengths_by_file).astype(np.int64)
        self.truncated_count, self.dropped_count = 0, 0
        lengths = self._apply_length_limit(name, lengths)
        if not len(lengths):
            message, hint = self._explain_emptiness(name)
            raise DataError(message, hint=hint)
        self._lengths = lengths
        self._sequences = pack_conversations(
            lengths, settings.length, seed=settings.seed, one_per_sequence=not settings.is_packed
        )

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def conversation_count(self) -> int:
        return len(self._lengths)

    @property
    def token_utilization(self) -> float:
        """Fraction of the sequences' tokens that belong to conversations."""
        return float(self._lengths.sum() / (len(self) * self.settings.length))

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        length = self.settings.length
        tokens, labels, positions = np.zeros((3, length), dtype=np.int64)
        loss_mask = np.zeros(length, dtype=np.float32)
        documents = np.zeros(length, dtype=np.int32)
        begin = 0
        for number, conversation in enumerate(self._sequences[index]):
            encoded_tokens = self._get_tokens(conversation)
            end = begin + int(self._lengths[conversation])
            ids = decode_ids(encoded_tokens)
            tokens[begin:end], labels[begin:end] = ids[:-1], ids[1:]
            loss_mask[begin:end] = encoded_tokens[1:] >= 0
            positions[begin:end] = np.arange(end - begin)
            documents[begin:end] = number
            begin = end
        documents[begin:] = len(self._sequences[index])  # padding
        positions[begin:] = np.arange(length - begin)
        return {
            "tokens": torch.from_numpy(tokens),
            "labels": torch.from_numpy(labels),
            "loss_mask": torch.from_numpy(loss_mask),
            "position_ids": torch.from_numpy(positions),
            DOCUMENT_NUMBERS_KEY: torch.from_numpy(documents),
        }

    def _get_tokens(self, conversation: int) -> NDArray[np.int32]:
        """Return a conversation's encoded tokens, limited to the length of a sequence."""
        samples = self._files[int(self._file_indices[conversation])]
        tokens = samples[int(self._sample_indices[conversation])]
        return tokens[: self.settings.length + 1]

    def _explain_emptiness(self, name: str) -> tuple[str, str]:
        """Return the message and the hint of an error about a split without conversations."""
        message = f"sft: no conversation is left for {name}"
        if not self.dropped_count:
            hint = "use more conversations, give this split a larger share, or set eval_iters: 0"
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
        """Truncate, drop or refuse long conversations; return the lengths of the remaining ones."""
        capacity = self.settings.length
        long_indices = np.flatnonzero(lengths > capacity)
        if len(long_indices) and self.settings.long_conversations == "refuse":
            max_length, longest_file = int(lengths.max()), int(self._file_indices[lengths.argmax()])
            raise DataError(
                f"sft: {len(long_indices)} conversations for {name} are longer than seq_length "
                f"{capacity}; the longest has {max_length} tokens, in "
                f"{self._files[longest_file].path}",
                hint="raise seq_length, or set sft_too_long to truncate or drop",
            )
        # If no token with a loss remains, a truncated conversation is dropped as well.
        can_truncate = [
            self.settings.long_conversations == "truncate"
            and bool((self._get_tokens(index)[1:] >= 0).any())
            for index in long_indices.tolist()
        ]
        self.truncated_count = sum(can_truncate)
        self.dropped_count = len(can_truncate) - self.truncated_count
        is_kept = np.ones(len(lengths), dtype=bool)
        is_kept[long_indices] = can_truncate
        self._file_indices = self._file_indices[is_kept]
        self._sample_indices = self._sample_indices[is_kept]
        return np.minimum(lengths[is_kept], capacity)
