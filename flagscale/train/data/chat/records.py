"""Conversations in JSON lines, in the formats that people have.

``messages``  ``{"messages": [{"role": "user", "content": "…"}, {"role": "assistant", …}]}``, as
              OpenAI has it; ``tools`` beside it, and ``"weight": 0`` in a message that is not to be
              learned
``sharegpt``  ``{"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", …}]}``
``alpaca``    ``{"instruction": "…", "input": "…", "output": "…"}``; ``system`` and ``history``,
              pairs of question and answer, may be there

Every error names file and line. A line is read whole, so its length is bounded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flagscale.errors import DataError

Format = Literal["auto", "messages", "alpaca", "sharegpt"]
Message = Mapping[str, Any]

MAX_LINE = 64 << 20
"""Bytes."""
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
_KEYS: Mapping[str, Format] = {
    "messages": "messages",
    "conversations": "sharegpt",
    "instruction": "alpaca",
}


class UnfitError(Exception):
    """Why a conversation cannot be learned from."""


@dataclass(frozen=True)
class Conversation:
    """Who said what, in order, and with which tools. ``line`` counts from 1."""

    path: Path
    line: int
    messages: tuple[Message, ...]
    tools: Any = None

    def error(self, message: str) -> DataError:
        """What is wrong with it, for the user."""
        return DataError(f"{self.path}:{self.line}: {message}")


def read(
    path: Path, kind: Format = "auto", report: Callable[[int, int], None] | None = None
) -> Iterator[Conversation]:
    """The conversations of a file, a line each; empty lines are passed over. ``report`` is told the
    bytes that have been read, and those in all.

    Raises:
        DataError: the file cannot be read; with its line, what is no conversation.
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
                    yield _conversation(path, number, body, kind)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None


def _conversation(path: Path, line: int, body: bytes, kind: Format) -> Conversation:
    where = f"{path}:{line}"
    try:
        record = json.loads(body)
    except UnicodeDecodeError as error:
        zipped = "; the file looks gzip-compressed" if body[:2] == b"\x1f\x8b" else ""
        raise DataError(f"{where}: not UTF-8: {error.reason}{zipped}") from None
    except ValueError as error:
        raise DataError(f"{where}: not JSON: {error}") from None
    except RecursionError:
        raise DataError(f"{where}: not JSON that can be read: nested too deeply") from None
    if not isinstance(record, dict):
        kinds = f"{where}: expected a JSON object a line, found {type(record).__name__}"
        raise DataError(kinds)
    try:
        found = _format_of(record) if kind == "auto" else kind
        messages = tuple(_READERS[found](record))
        _check(messages)
    except UnfitError as error:
        raise DataError(f"{where}: {error}") from None
    return Conversation(path, line, messages, record.get("tools"))


def _format_of(record: Mapping[str, Any]) -> Format:
    for key, found in _KEYS.items():
        if key in record:
            return found
    has = ", ".join(repr(name) for name in list(record)[:8]) or "none"
    known = ", ".join(map(repr, _KEYS))
    raise UnfitError(f"no conversation: expected a key of {known}; the object has {has}")


def _messages(record: Mapping[str, Any]) -> Iterator[Message]:
    for index, item in enumerate(_list(record, "messages")):
        if not isinstance(item, dict) or not isinstance(item.get("role"), str):
            raise UnfitError(
                f"messages[{index}]: expected an object with a role, found {_kind(item)}"
            )
        yield {**item, "content": _content(item, f"messages[{index}].content")}


def _content(item: Message, where: str) -> str:
    """What a message says. OpenAI's may be a list of parts, or nothing beside a tool's call."""
    content = item.get("content")
    if content is None and item.get("tool_calls"):
        return ""
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else None for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) < len(parts):
            raise UnfitError(f"{where}: only parts of text are learned here")
        return _text("".join(texts), where)
    return _text(content, where)


def _sharegpt(record: Mapping[str, Any]) -> Iterator[Message]:
    if record.get("system"):
        yield {"role": "system", "content": _text(record["system"], "system")}
    for index, item in enumerate(_list(record, "conversations")):
        where = f"conversations[{index}]"
        if not isinstance(item, dict):
            raise UnfitError(f"{where}: expected an object, found {_kind(item)}")
        speaker, said = item.get("from", item.get("role")), item.get("value", item.get("content"))
        if not isinstance(speaker, str) or speaker not in _SPEAKERS:
            known = ", ".join(_SPEAKERS)
            raise UnfitError(f"{where}.from: {speaker!r} is nobody known ({known})")
        yield {"role": _SPEAKERS[speaker], "content": _text(said, f"{where}.value")}


def _alpaca(record: Mapping[str, Any]) -> Iterator[Message]:
    if record.get("system"):
        yield {"role": "system", "content": _text(record["system"], "system")}
    for index, pair in enumerate(record.get("history") or []):
        if not isinstance(pair, list) or len(pair) != 2:
            raise UnfitError(f"history[{index}]: expected a question and its answer")
        for role, said in zip(("user", ASSISTANT), pair, strict=True):
            yield {"role": role, "content": _text(said, f"history[{index}]")}
    asked = _text(record.get("instruction"), "instruction")
    if record.get("input"):
        asked += "\n\n" + _text(record["input"], "input")
    yield {"role": "user", "content": asked}
    yield {"role": ASSISTANT, "content": _text(record.get("output"), "output")}


_READERS: Mapping[str, Callable[[Mapping[str, Any]], Iterator[Message]]] = {
    "messages": _messages,
    "sharegpt": _sharegpt,
    "alpaca": _alpaca,
}


def _list(record: Mapping[str, Any], key: str) -> list[Any]:
    found = record.get(key)
    if not isinstance(found, list):
        raise UnfitError(f"{key}: expected a list, found {_kind(found)}")
    return found


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise UnfitError(f"{where}: expected a text, found {_kind(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        # Half of a character, which JSON can spell and no tokenizer takes.
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return value


def _kind(value: object) -> str:
    return "nothing" if value is None else type(value).__name__


def is_learned(message: Message) -> bool:
    """Whether a message is one to learn."""
    return bool(message["role"] == ASSISTANT and message.get("weight", 1) != 0)


def _check(messages: tuple[Message, ...]) -> None:
    if not any(map(is_learned, messages)):
        roles = ", ".join(dict.fromkeys(str(message["role"]) for message in messages)) or "nobody"
        raise UnfitError(f"there is no answer of an assistant to learn; there speaks {roles}")
