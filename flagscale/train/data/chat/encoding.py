"""Tokenization of conversations, and selection of the tokens to compute the loss on.

The loss is computed on the assistant's answers. Where a chat template marks answers by
``{% generation %}``, these marks decide, token by token as in transformers. Most published
templates have no marks. Their conversations are rendered up to the question, with the generation
prompt, and again with the answer; the difference, up to the token that ends the turn, is the
answer. If a template renders an earlier answer differently from the last one (for example, without
its reasoning), each answer becomes a separate sample with the context that the model would have
seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flagscale.train.data.chat.messages import ASSISTANT, UnusableConversationError, has_loss
from flagscale.train.data.chat.records import Conversation
from flagscale.train.data.chat.templates import ChatTemplate, Span
from flagscale.train.data.tokenizers import Tokenizer


@dataclass(frozen=True)
class RenderedSample:
    """A rendered text and the character spans of its answers.

    Attributes:
        text: the text.
        answer_spans: half-open ranges of characters.
        is_exact: the template marks the spans itself; otherwise they end with the turn.
        prefix_ids: tokens before those of the text, which have no loss.
    """

    text: str
    answer_spans: tuple[Span, ...]
    is_exact: bool = False
    prefix_ids: tuple[int, ...] = ()


def render_samples(conversation: Conversation, template: ChatTemplate) -> list[RenderedSample]:
    """Render the samples of a conversation: one for the whole conversation, or one per answer.

    Raises:
        UnusableConversationError: the template rejects the conversation, does not render an answer
            as a continuation of its question, or marks answers so that it is unknown which of
            them have ``weight: 0``.
    """
    messages, tools = conversation.messages, conversation.tools
    if template.marks_answers(tools):
        return [_render_marked(conversation, template)]
    full_text = template.render(messages, tools)
    _require_tools_rendered(conversation, template, full_text)
    answer_indices = [index for index, message in enumerate(messages) if has_loss(message)]
    texts_with_answer = [template.render(messages[: index + 1], tools) for index in answer_indices]
    questions = [
        template.render(messages[:index], tools, add_generation_prompt=True)
        for index in answer_indices
    ]
    for question, text in zip(questions, texts_with_answer, strict=True):
        if not text.startswith(question) or len(text) == len(question):
            raise UnusableConversationError(
                f"the chat template of {template.source} does not render an answer as a "
                "continuation of its question (add_generation_prompt)"
            )
    answer_spans = [(len(q), len(t)) for q, t in zip(questions, texts_with_answer, strict=True)]
    if all(full_text.startswith(text) for text in texts_with_answer):
        return [RenderedSample(full_text, tuple(answer_spans))]
    return [
        RenderedSample(text, (answer,))
        for text, answer in zip(texts_with_answer, answer_spans, strict=True)
    ]


def _require_tools_rendered(conversation: Conversation, template: ChatTemplate, text: str) -> None:
    """Check that the template does not ignore tools and their calls.

    Args:
        conversation: the conversation.
        template: the template, for messages.
        text: the rendered conversation.

    Raises:
        UnusableConversationError: a name of a tool is missing in the text.
    """
    calls = [
        call["function"]["name"]
        for message in conversation.messages
        for call in message.get("tool_calls", ())
    ]
    tools = [tool["function"]["name"] for tool in conversation.tools or ()]
    for key, names in (("tool_calls", calls), ("tools", tools)):
        if missing := [name for name in names if name not in text]:
            raise UnusableConversationError(
                f"the chat template of {template.source} ignores {key} ({missing[0]}); use a "
                "template that supports tools"
            )


def _render_marked(conversation: Conversation, template: ChatTemplate) -> RenderedSample:
    """Render a conversation with a template that marks answers."""
    text, spans = template.render_with_answers(conversation.messages, conversation.tools)
    _require_tools_rendered(conversation, template, text)
    answers = [message for message in conversation.messages if message["role"] == ASSISTANT]
    if not all(map(has_loss, answers)):
        if len(spans) != len(answers):
            raise UnusableConversationError(
                f"the chat template of {template.source} marks {len(spans)} passages in "
                f"{len(answers)} answers, so it is unknown which of them have weight 0"
            )
        spans = [span for span, message in zip(spans, answers, strict=True) if has_loss(message)]
    spans = [(begin, end) for begin, end in spans if begin < end]
    if not spans:
        raise UnusableConversationError(
            f"the chat template of {template.source} marks no answer ({{% generation %}})"
        )
    return RenderedSample(text, tuple(spans), is_exact=True)


def encode_samples(
    samples: Sequence[RenderedSample], tokenizer: Tokenizer
) -> Iterator[NDArray[np.int32]]:
    """Tokenize samples. A token without loss is returned as its complement (``~id``).

    Yields:
        For each sample, an int32 array of shape ``[tokens]``.
    """
    special_ids = np.array(sorted(tokenizer.special_ids), dtype=np.int32)
    encodings = tokenizer.tokenize_with_offsets([sample.text for sample in samples])
    for sample, (ids, offsets) in zip(samples, encodings, strict=True):
        tokens, token_begins = np.array(ids, dtype=np.int32), np.array(offsets, dtype=np.int64)
        in_loss = np.zeros(len(tokens), dtype=bool)
        for begin, end in sample.answer_spans:
            if sample.is_exact:
                # The first token may begin before the passage.
                first = max(int(np.searchsorted(token_begins, begin, side="right")) - 1, 0)
                in_loss[first : int(np.searchsorted(token_begins, end, side="left"))] = True
                continue
            answer_tokens = np.flatnonzero((token_begins >= begin) & (token_begins < end))
            turn_ends = answer_tokens[np.isin(tokens[answer_tokens], special_ids)]
            if len(turn_ends):
                # A model does not generate the text that the template writes after a turn's end.
                answer_tokens = answer_tokens[answer_tokens <= turn_ends[-1]]
            in_loss[answer_tokens] = True
        prefix = ~np.array(sample.prefix_ids, dtype=np.int32)
        yield np.concatenate((prefix, np.where(in_loss, tokens, ~tokens)))


def decode_ids(tokens: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the ids of tokens that :func:`encode_samples` has encoded."""
    return np.where(tokens < 0, ~tokens, tokens)
