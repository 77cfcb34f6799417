"""Pairs of a preferred and a rejected answer, in the formats of TRL.

====================  =============================================================================
explicit prompt       ``{"prompt": …, "chosen": …, "rejected": …}``
implicit prompt       ``{"chosen": …, "rejected": …}``: the prompt is the common beginning
====================  =============================================================================

The values are texts or lists of messages. Lists of messages that begin with the prompt are
accepted next to a ``prompt``, which many published data sets have. Messages may be of OpenAI's or
of ShareGPT's form, and ``system`` and ``tools`` belong to the prompt. Other keys are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flagscale.train.data.chat.messages import (
    ASSISTANT,
    Message,
    UnusableConversationError,
    describe_type,
    normalize_messages,
    normalize_tools,
    require_text,
)
from flagscale.train.data.chat.record_files import Record, read_records
from flagscale.train.data.chat.records import require_answer

ANSWER_KEYS = ("chosen", "rejected")
_CONVERSATION_KEYS = ("messages", "conversations", "instruction")


@dataclass(frozen=True)
class Dialog:
    """A pair of conversations: messages that both share, and the answers of each.

    Attributes:
        prompt: the shared messages, with ``weight`` 0 for the assistant's, which have no loss.
        answers: the messages behind the prompt, chosen and rejected.
        tools: descriptions of the tools that the messages may call.
    """

    prompt: tuple[Message, ...]
    answers: tuple[tuple[Message, ...], tuple[Message, ...]]
    tools: Any = None


@dataclass(frozen=True)
class TextPair:
    """A pair of texts: a prompt, and the chosen and the rejected continuation."""

    prompt: str
    answers: tuple[str, str]


@dataclass(frozen=True)
class Preference:
    """Pair of one line of a file.

    ``record`` is that line, for messages of errors.
    """

    record: Record
    pair: Dialog | TextPair


def read_preferences(
    path: Path, on_progress: Callable[[int, int], None] | None = None
) -> Iterator[Preference]:
    """Read the pairs of a file.

    Args:
        path: file of JSON lines or Parquet.
        on_progress: called with the bytes read and the size of the file in bytes.

    Raises:
        DataError: the file cannot be read, or a line is not a pair.
    """
    for record in read_records(path, on_progress):
        try:
            pair = parse_pair(record.fields)
        except UnusableConversationError as error:
            raise record.error(str(error)) from None
        yield Preference(record, pair)


def parse_pair(fields: Mapping[str, Any]) -> Dialog | TextPair:
    """Parse a pair.

    Raises:
        UnusableConversationError: the fields are no pair, the answers are equal, or they have no
            common prompt.
    """
    _require_answers(fields)
    prompt, (chosen, rejected) = fields.get("prompt"), (fields[key] for key in ANSWER_KEYS)
    if type(chosen) is not type(rejected) or not isinstance(chosen, str | list):
        raise UnusableConversationError(
            "chosen and rejected: expected two texts or two lists of messages, found "
            f"{describe_type(chosen)} and {describe_type(rejected)}"
        )
    if chosen == rejected:
        raise UnusableConversationError(
            "chosen and rejected are equal, so there is nothing to prefer; remove the line"
        )
    if isinstance(chosen, list):
        return _parse_dialog(fields, prompt, chosen, rejected)
    if prompt is not None and not isinstance(prompt, str):
        raise UnusableConversationError(
            f"prompt: expected a text, like chosen and rejected, found {describe_type(prompt)}"
        )
    for key in ("system", "tools"):
        if fields.get(key):
            raise UnusableConversationError(
                f"{key}: is not supported with texts; write lists of messages"
            )
    return _parse_texts(prompt, *(require_text(fields[key], key) for key in ANSWER_KEYS))


def _require_answers(fields: Mapping[str, Any]) -> None:
    """Check that there are a chosen and a rejected answer."""
    missing = [key for key in ANSWER_KEYS if fields.get(key) is None]
    if not missing:
        return
    present = ", ".join(repr(name) for name in list(fields)[:8]) or "none"
    advice = ""
    if len(missing) == 2 and any(key in fields for key in _CONVERSATION_KEYS):
        advice = "; to train on conversations set sft: true instead of dpo"
    elif "completion" in fields and "label" in fields:
        advice = "; answers with a label each, without a pair (KTO), are not supported"
    raise UnusableConversationError(
        f"no pair of answers: {' and '.join(missing)} missing; the keys are {present}{advice}"
    )


def _parse_texts(prompt: str | None, chosen: str, rejected: str) -> TextPair:
    if prompt is None:
        prompt = chosen[: _count_shared(chosen, rejected)]
        if prompt.endswith(" "):
            prompt = prompt[:-1]  # tokens begin with the space before a word
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    if not prompt:
        raise UnusableConversationError(
            "chosen and rejected have no common prompt at their beginning; write it as prompt"
        )
    for key, answer in zip(ANSWER_KEYS, (chosen, rejected), strict=True):
        if not answer:
            raise UnusableConversationError(f"{key}: has no text behind the prompt")
    return TextPair(require_text(prompt, "prompt"), (chosen, rejected))


def _parse_dialog(
    fields: Mapping[str, Any], prompt: Any, chosen: list[Any], rejected: list[Any]
) -> Dialog:
    conversations = [
        normalize_messages(items, key)
        for key, items in zip(ANSWER_KEYS, (chosen, rejected), strict=True)
    ]
    shared = _count_shared(*conversations)
    if isinstance(prompt, list):
        prompt_messages = normalize_messages(prompt, "prompt")
        if shared >= len(prompt_messages) and conversations[0][: len(prompt)] == prompt_messages:
            conversations = [messages[len(prompt) :] for messages in conversations]
    elif prompt is None or shared:
        prompt_messages = conversations[0][:shared]
        _require_prompt_among(prompt, prompt_messages)
        conversations = [messages[shared:] for messages in conversations]
    else:
        prompt_messages = [{"role": "user", "content": require_text(prompt, "prompt")}]
    if system := fields.get("system"):
        if any(message["role"] == "system" for message in prompt_messages):
            raise UnusableConversationError("system: the prompt has a system message already")
        prompt_messages.insert(0, {"role": "system", "content": require_text(system, "system")})
    if not prompt_messages:
        raise UnusableConversationError(
            "chosen and rejected have no common message at their beginning; write the prompt as "
            "prompt"
        )
    for key, messages in zip(ANSWER_KEYS, conversations, strict=True):
        try:
            require_answer(messages)
        except UnusableConversationError as error:
            raise UnusableConversationError(f"{key}: behind the prompt, {error}") from None
    first, second = map(tuple, conversations)
    return Dialog(
        tuple(map(_without_loss, prompt_messages)),
        (first, second),
        normalize_tools(fields),
    )


def _without_loss(message: Message) -> Message:
    return {**message, "weight": 0} if message["role"] == ASSISTANT else message


def _count_shared(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return the number of messages, or characters, at the beginning that two answers share."""
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        count += 1
    return count


def _require_prompt_among(prompt: Any, messages: Sequence[Message]) -> None:
    """Check that a text given as ``prompt`` is one of the messages that chosen and rejected
    share."""
    if prompt is None:
        return
    text = require_text(prompt, "prompt").strip()
    if text not in (str(message.get("content", "")).strip() for message in messages):
        raise UnusableConversationError(
            "prompt: is none of the messages at the beginning of chosen and rejected; write the "
            "whole prompt there, or only in prompt"
        )
