"""Conversations in JSON lines, in three common formats.

``messages``  ``{"messages": [{"role": "user", "content": "…"}, {"role": "assistant", …}]}``, as in
              OpenAI's API; optionally with ``tools``, and with ``"weight": 0`` in messages without
              loss
``sharegpt``  ``{"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", …}]}``
``alpaca``    ``{"instruction": "…", "input": "…", "output": "…"}``; optionally with ``system`` and
              ``history``, a list of pairs of question and answer

Every error names file and line. A line is read at once, so its length is limited.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flagscale.errors import DataError

ConversationFormat = Literal["auto", "messages", "alpaca", "sharegpt"]
Message = Mapping[str, Any]

MAX_LINE = 64 << 20
"""Maximum length of a line in bytes."""
ASSISTANT = "assistant"
_SPEAKERS: Mapping[str, str] = {
    "human": "user",
    "user": "user",
    "gpt": ASSISTANT,
    "chatgpt": ASSISTANT,
    "bard": ASSISTANT,
    "bing": ASSISTANT,
    "model": ASSISTANT,
    ASSISTANT: ASSISTANT,
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
_KEYS: Mapping[str, ConversationFormat] = {
    "messages": "messages",
    "conversations": "sharegpt",
    "instruction": "alpaca",
}


class UnusableConversationError(Exception):
    """A conversation cannot be trained on; the message gives the reason."""


@dataclass(frozen=True)
class Conversation:
    """Messages in order, and the tools that they may call. ``line`` counts from 1."""

    path: Path
    line: int
    messages: tuple[Message, ...]
    tools: Any = None

    def error(self, message: str) -> DataError:
        """Build an error about the conversation, with file and line."""
        return DataError(f"{self.path}:{self.line}: {message}")


def read_conversations(
    path: Path, kind: ConversationFormat = "auto", report: Callable[[int, int], None] | None = None
) -> Iterator[Conversation]:
    """Read the conversations of a file, one per line; empty lines are skipped.

    Args:
        path: the file.
        kind: its format.
        report: called with the bytes read and their total.

    Raises:
        DataError: the file cannot be read, or a line is not a conversation.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE + 1), b""), 1):
                if report is not None:
                    report(file.tell(), size)
                if len(line) > MAX_LINE:
                    raise DataError(
                        f"{path}:{number}: is longer than {MAX_LINE >> 20} MiB",
                        hint="a conversation is one line of JSON; a file that is one JSON list has "
                        "to be written as lines first",
                    )
                body = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                if body.strip():
                    yield _parse_conversation(path, number, body, kind)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None


def _parse_conversation(
    path: Path, line: int, body: bytes, kind: ConversationFormat
) -> Conversation:
    location = f"{path}:{line}"
    try:
        record = json.loads(body)
    except UnicodeDecodeError as error:
        compression_hint = "; the file looks gzip-compressed" if body[:2] == b"\x1f\x8b" else ""
        raise DataError(f"{location}: not UTF-8: {error.reason}{compression_hint}") from None
    except ValueError as error:
        raise DataError(f"{location}: not JSON: {error}") from None
    except RecursionError:
        raise DataError(f"{location}: not JSON that can be read: nested too deeply") from None
    if not isinstance(record, dict):
        message = f"{location}: expected a JSON object a line, found {type(record).__name__}"
        raise DataError(message)
    try:
        detected = _detect_format(record) if kind == "auto" else kind
        messages = tuple(_READERS[detected](record))
        _require_answer(messages)
    except UnusableConversationError as error:
        raise DataError(f"{location}: {error}") from None
    return Conversation(path, line, messages, record.get("tools"))


def _detect_format(record: Mapping[str, Any]) -> ConversationFormat:
    for key, conversation_format in _KEYS.items():
        if key in record:
            return conversation_format
    has = ", ".join(repr(name) for name in list(record)[:8]) or "none"
    keys = ", ".join(map(repr, _KEYS))
    raise UnusableConversationError(
        f"no conversation: expected a key of {keys}; the object has {has}"
    )


def _iter_messages(record: Mapping[str, Any]) -> Iterator[Message]:
    for index, item in enumerate(_require_list(record, "messages")):
        if not isinstance(item, dict) or not isinstance(item.get("role"), str):
            raise UnusableConversationError(
                f"messages[{index}]: expected an object with a role, found {_describe_type(item)}"
            )
        yield {**item, "content": _get_content(item, f"messages[{index}].content")}


def _get_content(item: Message, where: str) -> str:
    """Return the text of a message.

    In OpenAI's format, the content may be a list of parts, or missing next to a tool call.
    """
    content = item.get("content")
    if content is None and item.get("tool_calls"):
        return ""
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else None for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) < len(parts):
            raise UnusableConversationError(f"{where}: only parts of text are learned here")
        return _require_text("".join(texts), where)
    return _require_text(content, where)


def _iter_sharegpt(record: Mapping[str, Any]) -> Iterator[Message]:
    if record.get("system"):
        yield {"role": "system", "content": _require_text(record["system"], "system")}
    for index, item in enumerate(_require_list(record, "conversations")):
        where = f"conversations[{index}]"
        if not isinstance(item, dict):
            raise UnusableConversationError(
                f"{where}: expected an object, found {_describe_type(item)}"
            )
        speaker, text = item.get("from", item.get("role")), item.get("value", item.get("content"))
        if not isinstance(speaker, str) or speaker not in _SPEAKERS:
            speakers = ", ".join(_SPEAKERS)
            raise UnusableConversationError(
                f"{where}.from: {speaker!r} is nobody known ({speakers})"
            )
        yield {"role": _SPEAKERS[speaker], "content": _require_text(text, f"{where}.value")}


def _iter_alpaca(record: Mapping[str, Any]) -> Iterator[Message]:
    if record.get("system"):
        yield {"role": "system", "content": _require_text(record["system"], "system")}
    for index, pair in enumerate(record.get("history") or []):
        if not isinstance(pair, list) or len(pair) != 2:
            raise UnusableConversationError(f"history[{index}]: expected a question and its answer")
        for role, text in zip(("user", ASSISTANT), pair, strict=True):
            yield {"role": role, "content": _require_text(text, f"history[{index}]")}
    instruction = _require_text(record.get("instruction"), "instruction")
    if record.get("input"):
        instruction += "\n\n" + _require_text(record["input"], "input")
    yield {"role": "user", "content": instruction}
    yield {"role": ASSISTANT, "content": _require_text(record.get("output"), "output")}


_READERS: Mapping[str, Callable[[Mapping[str, Any]], Iterator[Message]]] = {
    "messages": _iter_messages,
    "sharegpt": _iter_sharegpt,
    "alpaca": _iter_alpaca,
}


def _require_list(record: Mapping[str, Any], key: str) -> list[Any]:
    items = record.get(key)
    if not isinstance(items, list):
        raise UnusableConversationError(f"{key}: expected a list, found {_describe_type(items)}")
    return items


def _require_text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise UnusableConversationError(f"{where}: expected a text, found {_describe_type(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        # JSON can encode half of a surrogate pair, which no tokenizer accepts.
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return value


def _describe_type(value: object) -> str:
    return "nothing" if value is None else type(value).__name__


def has_loss(message: Message) -> bool:
    """Return whether the loss is computed on a message."""
    return bool(message["role"] == ASSISTANT and message.get("weight", 1) != 0)


def _require_answer(messages: tuple[Message, ...]) -> None:
    if not any(map(has_loss, messages)):
        roles = ", ".join(dict.fromkeys(str(message["role"]) for message in messages)) or "nobody"
        raise UnusableConversationError(
            f"there is no answer of an assistant to learn; there speaks {roles}"
        )
