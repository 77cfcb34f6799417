"""Conversations in JSON lines, in three common formats.

``messages``  ``{"messages": [{"role": "user", "content": "…"}, {"role": "assistant", …}]}``, as in
              OpenAI's API; optionally with ``tools`` or ``functions``
``sharegpt``  ``{"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", …}]}``;
              optionally with ``system`` and ``tools``
``alpaca``    ``{"instruction": "…", "input": "…", "output": "…"}``; optionally with ``system`` and
              ``history``, a list of pairs of question and answer

Messages of either form are accepted under both keys. All are converted to one normal form
(:mod:`flagscale.train.data.chat.messages`). Every error names file and line. A line is read at
once, so its length is limited.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Callable, Iterator, Mapping
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
from flagscale.train.data.corpus import open_decompressed

ConversationFormat = Literal["auto", "messages", "alpaca", "sharegpt"]
MAX_LINE_BYTES = 64 << 20
"""Maximum length of a line in bytes."""
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
        line: line number, counted from 1.
        messages: messages in order.
        tools: descriptions of the tools that the messages may call, as in OpenAI's API.
    """

    path: Path
    line: int
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
    try:
        size = path.stat().st_size
        with open_decompressed(path) as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), 1):
                if on_progress is not None:
                    on_progress(min(file.tell(), size), size)
                if len(line) > MAX_LINE_BYTES:
                    raise DataError(
                        f"{path}:{number}: is longer than {MAX_LINE_BYTES >> 20} MiB",
                        hint="a conversation is one line of JSON; a file that is one JSON list has "
                        "to be written as lines first",
                    )
                body = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                if body.strip():
                    yield _parse_conversation(path, number, body, conversation_format)
    except (OSError, EOFError, lzma.LZMAError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{path}: cannot be read: {reason}") from None


def _parse_conversation(
    path: Path, line: int, body: bytes, conversation_format: ConversationFormat
) -> Conversation:
    location = f"{path}:{line}"
    try:
        record = json.loads(body)
    except UnicodeDecodeError as error:
        raise DataError(f"{location}: not UTF-8: {error.reason}") from None
    except ValueError as error:
        raise DataError(f"{location}: not JSON: {error}") from None
    except RecursionError:
        raise DataError(f"{location}: not JSON that can be read: nested too deeply") from None
    if not isinstance(record, dict):
        message = f"{location}: expected a JSON object a line, found {type(record).__name__}"
        raise DataError(message)
    try:
        record_format = (
            _detect_format(record) if conversation_format == "auto" else conversation_format
        )
        messages = tuple(_MESSAGE_READERS[record_format](record))
        tools = normalize_tools(record)
        _require_answer(messages)
    except UnusableConversationError as error:
        raise DataError(f"{location}: {error}") from None
    return Conversation(path, line, messages, tools)


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


def _require_answer(messages: tuple[Message, ...]) -> None:
    """Check that the loss is computed on at least one message."""
    if not any(map(has_loss, messages)):
        roles = ", ".join(dict.fromkeys(str(message["role"]) for message in messages)) or "none"
        raise UnusableConversationError(
            f"no message of an assistant to compute the loss on; the roles are {roles}"
        )
