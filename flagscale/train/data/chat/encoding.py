"""From a conversation to tokens, and which of these are to be learned: an assistant's answers, up
to the token that ends its turn.

Published templates do not mark answers. So a conversation is rendered up to the question, as a
model is asked, and then with the answer: what the second has more is the answer. Where a template
renders an earlier answer otherwise than the last one (thoughts are left out), each answer becomes
a sample of its own, with what a model would have been shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flagscale.train.data.chat.records import Conversation, UnfitError, is_learned
from flagscale.train.data.chat.templates import ChatTemplate
from flagscale.train.data.tokenizers import Tokenizer

Span = tuple[int, int]
"""Characters ``[begin, end)``."""


@dataclass(frozen=True)
class Rendered:
    """A text and its answers."""

    text: str
    answers: tuple[Span, ...]


def rendered(conversation: Conversation, template: ChatTemplate) -> list[Rendered]:
    """The samples of a conversation: one, or one an answer.

    Raises:
        UnfitError: the template does not take it, or does not continue its own questions.
    """
    messages, tools = conversation.messages, conversation.tools
    places = [index for index, message in enumerate(messages) if is_learned(message)]
    through = [template.render(messages[: index + 1], tools) for index in places]
    asked = [template.render(messages[:index], tools, ask=True) for index in places]
    for question, text in zip(asked, through, strict=True):
        if not text.startswith(question) or len(text) == len(question):
            raise UnfitError(
                f"the chat template of {template.source} does not render an answer as a "
                "continuation of its question (add_generation_prompt)"
            )
    answers = [(len(q), len(t)) for q, t in zip(asked, through, strict=True)]
    whole = template.render(messages, tools)
    if all(whole.startswith(text) for text in through):
        return [Rendered(whole, tuple(answers))]
    return [Rendered(text, (answer,)) for text, answer in zip(through, answers, strict=True)]


def encoded(samples: Sequence[Rendered], tokenizer: Tokenizer) -> Iterator[NDArray[np.int32]]:
    """The tokens of each sample; one that is not to be learned is its complement (``~id``)."""
    special = np.array(sorted(tokenizer.special_ids), dtype=np.int32)
    found = tokenizer.tokenize_with_places([sample.text for sample in samples])
    for sample, (ids, places) in zip(samples, found, strict=True):
        tokens, begins = np.array(ids, dtype=np.int32), np.array(places, dtype=np.int64)
        learned = np.zeros(len(tokens), dtype=bool)
        for begin, end in sample.answers:
            own = np.flatnonzero((begins >= begin) & (begins < end))
            ends = own[np.isin(tokens[own], special)]
            # What the template writes behind the end of a turn is not said by a model.
            learned[own if not len(ends) else own[own <= ends[-1]]] = True
        yield np.where(learned, tokens, ~tokens)


def ids_of(tokens: NDArray[np.int32]) -> NDArray[np.int32]:
    """The tokens' ids, learned or not."""
    return np.where(tokens < 0, ~tokens, tokens)
