"""Tokenization of conversations, and selection of the tokens to compute the loss on.

These are the assistant's answers, up to the token that ends its turn.

Published chat templates do not mark answers. A conversation is therefore rendered up to the
question, with the generation prompt, and again with the answer; the difference is the answer. If a
template renders an earlier answer differently from the last one (for example, without its
reasoning), each answer becomes a separate sample with the context that the model would have seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flagscale.train.data.chat.records import Conversation, UnusableConversationError, has_loss
from flagscale.train.data.chat.templates import ChatTemplate
from flagscale.train.data.tokenizers import Tokenizer

CharacterSpan = tuple[int, int]
"""Half-open range ``[begin, end)`` of characters."""


@dataclass(frozen=True)
class RenderedSample:
    """A rendered text and the spans of its answers."""

    text: str
    answers: tuple[CharacterSpan, ...]


def render_samples(conversation: Conversation, template: ChatTemplate) -> list[RenderedSample]:
    """Render the samples of a conversation: one for the whole conversation, or one per answer.

    Raises:
        UnusableConversationError: the template rejects the conversation, or does not render an
        answer as
            a continuation of its question.
    """
    messages, tools = conversation.messages, conversation.tools
    answer_indices = [index for index, message in enumerate(messages) if has_loss(message)]
    with_answer = [template.render(messages[: index + 1], tools) for index in answer_indices]
    questions = [template.render(messages[:index], tools, ask=True) for index in answer_indices]
    for question, text in zip(questions, with_answer, strict=True):
        if not text.startswith(question) or len(text) == len(question):
            raise UnusableConversationError(
                f"the chat template of {template.source} does not render an answer as a "
                "continuation of its question (add_generation_prompt)"
            )
    answers = [(len(q), len(t)) for q, t in zip(questions, with_answer, strict=True)]
    full_text = template.render(messages, tools)
    if all(full_text.startswith(text) for text in with_answer):
        return [RenderedSample(full_text, tuple(answers))]
    return [
        RenderedSample(text, (answer,)) for text, answer in zip(with_answer, answers, strict=True)
    ]


def encode_samples(
    samples: Sequence[RenderedSample], tokenizer: Tokenizer
) -> Iterator[NDArray[np.int32]]:
    """Tokenize samples. A token without loss is returned as its complement (``~id``).

    Yields:
        For each sample, an int32 array of shape ``[tokens]``.
    """
    special = np.array(sorted(tokenizer.special_ids), dtype=np.int32)
    encodings = tokenizer.tokenize_with_offsets([sample.text for sample in samples])
    for sample, (ids, offsets) in zip(samples, encodings, strict=True):
        tokens, begins = np.array(ids, dtype=np.int32), np.array(offsets, dtype=np.int64)
        learned = np.zeros(len(tokens), dtype=bool)
        for begin, end in sample.answers:
            answer = np.flatnonzero((begins >= begin) & (begins < end))
            ends = answer[np.isin(tokens[answer], special)]
            if len(ends):
                # A model does not generate the text that the template writes after a turn's end.
                answer = answer[answer <= ends[-1]]
            learned[answer] = True
        yield np.where(learned, tokens, ~tokens)


def decode_ids(tokens: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the ids of tokens, with or without loss."""
    return np.where(tokens < 0, ~tokens, tokens)
