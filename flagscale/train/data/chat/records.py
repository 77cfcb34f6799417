"""Conversations in JSON lines or Parquet, in three common formats.

``messages``  ``{"messages": [{"role": "user", "content": "…"}, {"role": "assistant", …}]}``, as in
              OpenAI's API; optionally with ``tools`` or ``functions``
``sharegpt``  ``{"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", …}]}``;
              optionally with ``system`` and ``tools``
``alpaca``    ``{"instruction": "…", "input": "…", "output": "…"}``; optionally with ``system`` and
              ``history``, a list of pairs of question and answer

Messages of either form are accepted under both keys. All are converted to one normal form
(:mod:`flagscale.train.data.chat.messages`). Every error names file and line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flagscale.errors import DataError
from flagscale.train.data.chat.messages import (
    ASSISTANT,
    Message,
    UnusableConversationError,
    describe_type,
    has_loss,
    normalize_messages,
    normalize_tools,
    require_text,
)
from flagscale.train.data.chat.record_files import Record, read_records

ConversationFormat = Literal["auto", "messages", "alpaca", "sharegpt"]
_MESSAGE_KEYS = ("messages", "conversations", "conversation")
_FORMATS_BY_KEY: Mapping[str, ConversationFormat] = {
    "messages": "messages",
    "conversations": "sharegpt",
    "conversation": "sharegpt",
    "instruction": "alpaca",
}


@dataclass(frozen=True)
class Conversation:
    """Conversation of one line of a file.

    Attributes:
        path: the file.
        line: line number, counted from 1, or ``row 1`` and so on in a Parquet file.
        messages: messages in order.
        tools: descriptions of the tools that the messages may call, as in OpenAI's API.
    """

    path: Path
    line: int | str
    messages: tuple[Message, ...]
    tools: Any = None

    def error(self, message: str) -> DataError:
        """Build an error about the conversation, with file and line."""
        return DataError(f"{self.path}:{self.line}: {message}")


def read_conversations(
    path: Path,
    conversation_format: ConversationFormat = "auto",
    on_progress: Callable[[int, int], None] | None = None,
) -> Iterator[Conversation]:
    """Read the conversations of a file, one per line; empty lines are skipped. The file may be
    compressed.

    Args:
        path: the file.
        conversation_format: format of the file; ``auto`` detects it for each line.
        on_progress: called with the bytes read and the size of the file in bytes.

    Raises:
        DataError: the file cannot be read, or a line is not a conversation.
    """
    for record in read_records(path, on_progress):
        yield _parse_conversation(record, conversation_format)


def _parse_conversation(record: Record, conversation_format: ConversationFormat) -> Conversation:
    fields = record.fields
    try:
        record_format = (
            _detect_format(fields) if conversation_format == "auto" else conversation_format
        )
        messages = tuple(_MESSAGE_READERS[record_format](fields))
        tools = normalize_tools(fields)
        require_answer(messages)
    except UnusableConversationError as error:
        raise record.error(str(error)) from None
    return Conversation(record.path, record.line, messages, tools)


def _detect_format(record: Mapping[str, Any]) -> ConversationFormat:
    """Return the format to which the first known key of a record belongs."""
    for key, conversation_format in _FORMATS_BY_KEY.items():
        if key in record:
            return conversation_format
    present_keys = ", ".join(repr(name) for name in list(record)[:8]) or "none"
    keys = ", ".join(map(repr, _FORMATS_BY_KEY))
    raise UnusableConversationError(
        f"no conversation: expected a key of {keys}; the object has {present_keys}"
    )


def _read_messages(record: Mapping[str, Any]) -> Iterator[Message]:
    """Yield the messages of a record in OpenAI's or ShareGPT's format."""
    key = next((name for name in _MESSAGE_KEYS if name in record), _MESSAGE_KEYS[0])
    messages = normalize_messages(_require_list(record, key), key)
    if record.get("system"):
        if any(message["role"] == "system" for message in messages):
            raise UnusableConversationError(f"system: {key} has a system message already")
        yield {"role": "system", "content": require_text(record["system"], "system")}
    yield from messages


def _iter_alpaca(record: Mapping[str, Any]) -> Iterator[Message]:
    if record.get("system"):
        yield {"role": "system", "content": require_text(record["system"], "system")}
    for index, pair in enumerate(record.get("history") or []):
        if not isinstance(pair, list) or len(pair) != 2:
            raise UnusableConversationError(f"history[{index}]: expected a question and its answer")
        for role, text in zip(("user", ASSISTANT), pair, strict=True):
            yield {"role": role, "content": require_text(text, f"history[{index}]")}
    instruction = require_text(record.get("instruction"), "instruction")
    if record.get("input"):
        instruction += "\n\n" + require_text(record["input"], "input")
    yield {"role": "user", "content": instruction}
    yield {"role": ASSISTANT, "content": require_text(record.get("output"), "output")}


_MESSAGE_READERS: Mapping[str, Callable[[Mapping[str, Any]], Iterator[Message]]] = {
    "messages": _read_messages,
    "sharegpt": _read_messages,
    "alpaca": _iter_alpaca,
}


def _require_list(record: Mapping[str, Any], key: str) -> list[Any]:
    items = record.get(key)
    if not isinstance(items, list):
        raise UnusableConversationError(f"{key}: expected a list, found {describe_type(items)}")
    return items


def require_answer(messages: Sequence[Message]) -> None:
    """Check that the loss is computed on at least one message.

    Raises:
        UnusableConversationError: it is not.
    """
    if not any(map(has_loss, messages)):
        roles = ", ".join(dict.fromkeys(str(message["role"]) for message in messages)) or "none"
        raise UnusableConversationError(
            f"no message of an assistant to compute the loss on; the roles are {roles}"
        )
