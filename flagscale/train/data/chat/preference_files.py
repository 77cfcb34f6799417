"""Tokenization of pairs (:mod:`.preferences`): the chosen answer, then the rejected one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from flagscale.errors import DataError
from flagscale.train.data.chat.encoding import RenderedSample, encode_samples, render_samples
from flagscale.train.data.chat.messages import UnusableConversationError
from flagscale.train.data.chat.preferences import (
    ANSWER_KEYS,
    Dialog,
    Preference,
    TextPair,
    read_preferences,
)
from flagscale.train.data.chat.records import Conversation
from flagscale.train.data.chat.templates import ChatTemplate
from flagscale.train.data.chat.token_cache import BATCH_SIZE, TokenFile
from flagscale.train.data.progress_bar import ProgressCallback
from flagscale.train.data.tokenizers import Tokenizer


@dataclass(frozen=True)
class PreferenceFile(TokenFile):
    """A file of pairs, and the tokenizer and template for it.

    ``template`` is None if there is none; then pairs have to be texts.
    """

    path: Path
    tokenizer: Tokenizer
    template: ChatTemplate | None

    content: ClassVar[str] = "pair of answers"

    @property
    def format_identity(self) -> Any:
        return "pairs"

    def iter_tokenized(self, on_progress: ProgressCallback | None) -> Iterator[NDArray[np.int32]]:
        """Yield the tokens of the chosen and of the rejected answer of each pair, with the prompt.

        Raises:
            DataError: a pair is unusable; with file and line.
        """
        preferences = read_preferences(self.path, on_progress)
        while batch := list(islice(preferences, BATCH_SIZE)):
            samples = [sample for item in batch for sample in self._render(item)]
            encoded = list(encode_samples(samples, self.tokenizer))
            for index, preference in enumerate(batch):
                pair = encoded[2 * index : 2 * index + 2]
                _check_tokens(preference, *pair)
                yield from pair

    def _render(self, preference: Preference) -> list[RenderedSample]:
        """Render both conversations of a pair."""
        pair = preference.pair
        if isinstance(pair, TextPair):
            return self._render_texts(pair)
        if self.template is None:
            raise DataError(
                f"{preference.record.path}:{preference.record.line}: has messages, but the "
                "tokenizer has no chat template",
                hint="set chat_template: to chatml or llama3, or to a .jinja file",
            )
        samples = []
        for key, answer in zip(ANSWER_KEYS, pair.answers, strict=True):
            try:
                samples.append(_render_answer(preference, pair, answer, self.template))
            except UnusableConversationError as error:
                raise preference.record.error(f"{key}: {error}") from None
        return samples

    def _render_texts(self, pair: TextPair) -> list[RenderedSample]:
        """Render texts as they are, between the tokens that begin and end a text."""
        eod = self.tokenizer.eod
        end = self.tokenizer.special_tokens.get("eos_token") or self.tokenizer.detokenize([eod])
        texts = [answer if answer.endswith(end) else answer + end for answer in pair.answers]
        begin = len(pair.prompt)
        return [
            RenderedSample(
                pair.prompt + text,
                ((begin, begin + len(text)),),
                is_exact=True,
                prefix_ids=self.tokenizer.text_prefix_ids,
            )
            for text in texts
        ]


def _render_answer(
    preference: Preference, dialog: Dialog, answer: tuple[Any, ...], template: ChatTemplate
) -> RenderedSample:
    record = preference.record
    messages = (*dialog.prompt, *answer)
    samples = render_samples(
        Conversation(record.path, record.line, messages, dialog.tools), template
    )
    if len(samples) > 1:
        raise UnusableConversationError(
            f"the chat template of {template.source} renders an earlier answer differently from "
            "the last one, so several answers are no single sample; keep the last one behind the "
            "prompt"
        )
    return samples[0]


def _check_tokens(
    preference: Preference, chosen: NDArray[np.int32], rejected: NDArray[np.int32]
) -> None:
    """Check that both answers have tokens with a loss, and that they differ."""
    for key, tokens in zip(ANSWER_KEYS, (chosen, rejected), strict=True):
        if not (tokens[1:] >= 0).any():
            raise preference.record.error(f"{key}: the answer has no tokens")
    if np.array_equal(chosen, rejected):
        raise preference.record.error(
            "chosen and rejected are equal after the chat template and the tokenizer; remove the "
            "line"
        )
